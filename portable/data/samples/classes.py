"""Map labels to a classifier's outputs: single-label, multi-label or regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from portable.data.sources.documents import format_names
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from portable.data.tokens.cache import LabelKind, TokenCache

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""transformers' ``problem_type``, which selects the loss of a classifier."""
SINGLE, MULTI, REGRESSION = PROBLEMS = get_args(Problem)


@dataclass(frozen=True)
class KnownClasses:
    """The classes of a model before training."""

    key: str
    """The setting that defines them."""
    names: tuple[str, ...]
    """In the order of their ids."""

    @property
    def has_names(self) -> bool:
        """Whether they have names other than transformers' defaults LABEL_0, LABEL_1 ..."""
        return any(name != f"LABEL_{index}" for index, name in enumerate(self.names))

    def is_renaming(self, names: Sequence[str]) -> bool:
        """Whether ``names`` are given to these without either telling that they are the same."""
        return not self.has_names and names != self.names and not all(map(_is_number, names))


@dataclass(frozen=True)
class Classes:
    """The outputs of a classifier: classes, or the numbers of a regression."""

    names: tuple[str, ...]
    """In the order of their ids."""
    ids: tuple[int, ...]
    """The id of each label of the data, in the order of the token cache."""
    problem: Problem = SINGLE
    numbers: tuple[float, ...] = ()
    """For a regression on integers, the value of each label in the same order."""


def map_classes(
    tokens: TokenCache,
    declared: Sequence[str] | None = None,
    known_classes: KnownClasses | None = None,
    problem: Problem | None = None,
) -> Classes:
    """Map the labels of ``tokens`` to the outputs of a classifier.

    If ``problem`` is None the labels decide, as in transformers. Integers and strings are classes, and lists
    of them are several classes per text. A number with a fraction is a regression target. A list of these is
    a score for each class.

    Args:
        tokens: a cache with labels.
        declared: class names of the data set, if it has them; its labels are indices of these.
        known_classes: the classes or outputs of the model; None for an untrained head.
        problem: ``problem_type`` of the model's config.

    Raises:
        UserError: if the labels do not fit the model.
    """
    kind, names = tokens.label_kind, tokens.label_names
    width = len(known_classes.names) if known_classes is not None else int(tokens.meta.get("label_width", 1))
    if problem is None:
        if known_classes is not None and width == 1:
            problem = REGRESSION
        else:
            by_kind = {"classes": SINGLE, "sets": MULTI, "values": REGRESSION if width == 1 else MULTI}
            problem = by_kind[kind]
            _check_fractions(tokens)
    _check_kind(kind, names, problem)
    if problem != REGRESSION and tokens.values is None:
        return number_labels(names, declared, known_classes, several=problem == MULTI)
    outputs = (
        known_classes.names
        if known_classes is not None
        else tuple(f"LABEL_{index}" for index in range(width))
    )
    if tokens.values is not None:
        if (num_values := tokens.values.shape[1]) != len(outputs):
            raise UserError(
                f"data.label_field: {num_values} numbers per text, but "
                f"{known_classes.key if known_classes else 'the model'} has {len(outputs)} outputs "
                "(num_labels); make them equal"
            )
        if problem == MULTI:
            _check_shares(tokens.values[:])
        return Classes(outputs, (), problem)
    if len(outputs) != 1:
        raise UserError(
            "data.label_field: one number per text, but "
            f"{known_classes.key if known_classes else 'the model'} has {len(outputs)} outputs (num_labels); "
            "give lists with one number with a fraction per output"
        )
    return Classes(outputs, (), problem, tuple(float(name) for name in names))


def _check_fractions(tokens: TokenCache) -> None:
    """Check that a few labels with a fraction do not turn a classification into a regression.

    Raises:
        UserError: If nearly all labels are whole numbers and a few have a fraction.
    """
    fractions, documents = int(tokens.meta.get("fractions", 0)), tokens.documents
    if tokens.label_kind == "values" and 0 < fractions < _FEW_FRACTIONS * documents:
        raise UserError(
            f"data.label_field: {fractions:,} of {documents:,} labels have a fraction, such as "
            f"{tokens.meta['fraction']:g}, and the others are whole numbers; correct these records for "
            "classes, or set model.config.problem_type to regression"
        )


_FEW_FRACTIONS = 0.1


def map_eval_classes(
    training: Classes,
    trained: TokenCache,
    declared: Sequence[str] | None,
    tokens: TokenCache,
    declared_there: Sequence[str] | None = None,
) -> Classes:
    """Map the labels of evaluation data to the outputs that the training data has.

    Args:
        training: the outputs of the model.
        trained: the training data. declared: its class names, if it has them.
        tokens: the evaluation data, which need not have every class. declared_there: its class names.

    Raises:
        UserError: if it has other labels.
    """
    if training.problem == REGRESSION or tokens.values is not None:
        known_classes = KnownClasses("the model", training.names)
        return map_classes(tokens, declared_there, known_classes, training.problem)
    _check_kind(tokens.label_kind, tokens.label_names, training.problem)
    ids = {name: index for index, name in enumerate(training.names)}
    for label, index in zip(trained.label_names if training.ids else (), training.ids, strict=True):
        ids[_get_label_name(label, declared)] = index
    folded = {name.casefold(): index for name, index in ids.items()}
    class_ids = []
    for label in tokens.label_names:
        name = _get_label_name(label, declared_there)
        class_id = ids.get(name, folded.get(name.casefold()) if len(folded) == len(ids) else None)
        if class_id is None:
            raise UserError(
                f"data.label_field: the label {name!r} is not one of the training data's classes "
                f"({format_names(training.names)}); remove these records, or train with this class"
            )
        class_ids.append(class_id)
    return Classes(training.names, tuple(class_ids), training.problem)


def _get_label_name(label: int | str, declared: Sequence[str] | None) -> str:
    """The name of a label, which may be an index of ``declared``."""
    inside = declared is not None and isinstance(label, int) and 0 <= label < len(declared)
    return declared[label] if inside else str(label)  # type: ignore[index]


_EXPECTED_LABELS = {
    SINGLE: "one class per text (an integer or a string)",
    MULTI: "a list of classes per text (integers or strings), or of a number with a fraction for each class",
    REGRESSION: "a number per text, or a list of numbers with a fraction",
}
_KIND_DESCRIPTIONS = {
    "classes": "one class per text",
    "sets": "lists of classes",
    "values": "numbers with a fraction",
}


def _check_kind(kind: LabelKind, names: Sequence[int | str], problem: Problem) -> None:
    numbers = kind == "classes" and all(isinstance(name, int) for name in names)
    fits = {
        SINGLE: kind == "classes",
        MULTI: kind != "classes",
        REGRESSION: kind == "values" or numbers,
    }
    if not fits[problem]:
        raise UserError(
            f"data.label_field: the labels are {_KIND_DESCRIPTIONS[kind]}, but problem_type {problem} needs "
            f"{_EXPECTED_LABELS[problem]}; change the labels or the model's problem_type"
        )


def _check_shares(values: npt.NDArray[Any]) -> None:
    for start in range(0, len(values), 1 << 20):
        part = values[start : start + (1 << 20)]
        if part.min() < 0 or part.max() > 1:
            raise UserError(
                "data.label_field: some scores of classes are not from 0 to 1; for a regression on several "
                "numbers set model.config.problem_type to regression"
            )


def number_labels(
    labels: Sequence[int | str],
    declared: Sequence[str] | None = None,
    known_classes: KnownClasses | None = None,
    *,
    several: bool = False,
) -> Classes:
    """Map each label of the data to the model's class id.

    Args:
        labels: the distinct labels, sorted.
        declared: class names of the data set, if it has them; its labels are indices of these.
        known_classes: the model's classes; None for an untrained head, which takes those of the data.
        several: whether a text may have any number of classes.

    Raises:
        UserError: if there are fewer than two classes, or they are not the model's.
    """
    problem: Problem = MULTI if several else SINGLE
    if several and not labels:
        raise UserError("data.label_field: no record has a class; use data with labels")
    if len(labels) < 2 and not several:
        raise UserError("data.label_field: all records have the same label; use data with several classes")
    if declared is not None:
        if outside := [label for label in labels if label not in range(len(declared))]:
            raise UserError(
                f"data.label_field: some records have the label {outside[0]!r}, which is not one of "
                f"the {len(declared)} classes of the data set ({format_names(declared)}); choose another "
                "data.split"
            )
        fresh = Classes(tuple(declared), tuple(int(label) for label in labels), problem)
    else:
        fresh = Classes(tuple(str(label) for label in labels), tuple(range(len(labels))), problem)
    if known_classes is None:
        return fresh
    for spelt in (str, str.casefold):
        ids = {spelt(name): index for index, name in enumerate(known_classes.names)}
        ours = [spelt(name) for name in fresh.names]
        ambiguous = len(ids) < len(known_classes.names) or len(set(ours)) < len(ours)
        if not ambiguous and ids.keys() >= set(ours):
            return Classes(known_classes.names, tuple(ids[ours[index]] for index in fresh.ids), problem)
    count = len(known_classes.names)
    numbers = tuple(label for label in labels if isinstance(label, int) and 0 <= label < count)
    if declared is None and len(numbers) == len(labels) and not any(map(_is_number, known_classes.names)):
        complete = len(numbers) == count and not known_classes.has_names
        return Classes(fresh.names if complete else known_classes.names, numbers, problem)
    if not known_classes.has_names and count == len(fresh.names):
        return fresh
    raise UserError(
        f"data.label_field: the labels of the data ({format_names(fresh.names)}) are not the classes of "
        f"{known_classes.key} ({format_names(known_classes.names)}); use the model's class names in the "
        "data, or a model with an untrained head"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
