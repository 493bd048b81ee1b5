"""What a classifier learns of the labels of the data: one class of a text, several, or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from portable.data.documents import listed
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from portable.data.cache import LabelKind, TokenCache

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""transformers' ``problem_type``: which loss a classifier has."""
SINGLE, MULTI, REGRESSION = PROBLEMS = get_args(Problem)


@dataclass(frozen=True)
class KnownClasses:
    """The classes that a model has before it sees the data."""

    place: str
    """The setting that they come from."""
    names: tuple[str, ...]
    """In the order of their ids."""

    @property
    def named(self) -> bool:
        """Whether a person named them; transformers calls the others LABEL_0, LABEL_1 ..."""
        return any(name != f"LABEL_{index}" for index, name in enumerate(self.names))


@dataclass(frozen=True)
class Classes:
    """The classes that a model is trained on, or the numbers that it learns."""

    names: tuple[str, ...]
    """In the order of their ids."""
    ids: tuple[int, ...]
    """The id of each label of the data, in the order in which its token cache numbers them."""
    problem: Problem = SINGLE
    numbers: tuple[float, ...] = ()
    """For a regression on integers, the number of each label, in the same order."""


def classes_of(
    tokens: TokenCache,
    declared: Sequence[str] | None = None,
    known: KnownClasses | None = None,
    problem: Problem | None = None,
) -> Classes:
    """What a classifier learns of the labels of ``tokens``.

    Where the model does not say what it is for, the labels do, as in transformers: integers and strings are
    classes, and lists of them several classes a text; a number with a fraction is what a regression learns,
    and a list of these how far each class is the text's.

    Args:
        tokens: with labels.
        declared: names of the classes in a data set that knows them; its labels are numbers of these.
        known: the model's own classes, or names of what it tells in numbers; None for a head yet to be
            trained.
        problem: ``problem_type`` of the model's config.

    Raises:
        UserError: the labels are not of the kind that the model is for, or not its classes.
    """
    kind, names = tokens.label_kind, tokens.label_names
    width = len(known.names) if known is not None else int(tokens.meta.get("label_width", 1))
    if problem is None:
        if known is not None and width == 1:
            problem = REGRESSION
        else:
            by_kind = {"classes": SINGLE, "sets": MULTI, "values": REGRESSION if width == 1 else MULTI}
            problem = by_kind[kind]
    _check_kind(kind, names, problem)
    if problem != REGRESSION and kind != "values":
        return number_classes(names, declared, known, several=problem == MULTI)
    own = known.names if known is not None else tuple(f"LABEL_{index}" for index in range(width))
    if kind == "values":
        assert tokens.values is not None
        if (found := tokens.values.shape[1]) != len(own):
            raise UserError(
                f"data.label_field: {found} numbers a text, and {known.place if known else 'the model'} has "
                f"{len(own)} outputs (num_labels); they must be equally many"
            )
        if problem == MULTI:
            _check_shares(tokens.values[:])
        return Classes(own, (), problem)
    if len(own) != 1:
        raise UserError(
            f"data.label_field: one number a text, and {known.place if known else 'the model'} has "
            f"{len(own)} outputs (num_labels); give lists of as many numbers with a fraction"
        )
    return Classes(own, (), problem, tuple(float(name) for name in names))


_WANTED = {
    SINGLE: "one class a text (an integer or a string)",
    MULTI: "a list of classes a text (integers or strings), or of a number with a fraction for each class",
    REGRESSION: "a number a text, or a list of numbers with a fraction",
}
_ARE = {"classes": "one class a text", "sets": "lists of classes", "values": "numbers with a fraction"}


def _check_kind(kind: LabelKind, names: Sequence[int | str], problem: Problem) -> None:
    numbers = kind == "classes" and all(isinstance(name, int) for name in names)
    fits = {
        SINGLE: kind == "classes",
        MULTI: kind != "classes",
        REGRESSION: kind == "values" or numbers,
    }
    if not fits[problem]:
        raise UserError(
            f"data.label_field: the labels are {_ARE[kind]}, and a model whose problem_type is {problem} "
            f"learns {_WANTED[problem]}; give it these, or a model of another problem_type"
        )


def _check_shares(values: npt.NDArray[Any]) -> None:
    for start in range(0, len(values), 1 << 20):
        part = values[start : start + (1 << 20)]
        if part.min() < 0 or part.max() > 1:
            raise UserError(
                "data.label_field: some numbers are not from 0 to 1, which say how far a class is a text's; "
                "for a regression on several numbers set model.config.problem_type to regression"
            )


def number_classes(
    labels: Sequence[int | str],
    declared: Sequence[str] | None = None,
    known: KnownClasses | None = None,
    *,
    several: bool = False,
) -> Classes:
    """Give each label of the data the id that the model has for it.

    Args:
        labels: the different ones that there are, sorted.
        declared: names of the classes in a data set that knows them; its labels are numbers of these.
        known: the model's own classes; None for a head yet to be trained, which takes those of the data.
        several: a text may have any number of classes; the data need not have all of the model's.

    Raises:
        UserError: there are fewer than two, or they are not the model's.
    """
    problem: Problem = MULTI if several else SINGLE
    if several and not labels:
        raise UserError("data.label_field: no record has a class; there is nothing to learn")
    if len(labels) < 2 and not several:
        raise UserError("data.label_field: all records have one label; there is nothing to tell apart")
    if declared is not None:
        if outside := [label for label in labels if label not in range(len(declared))]:
            raise UserError(
                f"data.label_field: some records have the label {outside[0]!r}, which is none of the "
                f"{len(declared)} classes of the data set ({listed(declared)}); choose another data.split"
            )
        fresh = Classes(tuple(declared), tuple(int(label) for label in labels), problem)
    else:
        fresh = Classes(tuple(str(label) for label in labels), tuple(range(len(labels))), problem)
    if known is None:
        return fresh
    for spelt in (str, str.casefold):
        places = {spelt(name): index for index, name in enumerate(known.names)}
        ours = [spelt(name) for name in fresh.names]
        unlike = len(places) < len(known.names) or len(set(ours)) < len(ours)
        if not unlike and (places.keys() >= set(ours) if several else places.keys() == set(ours)):
            return Classes(known.names, tuple(places[ours[index]] for index in fresh.ids), problem)
    count = len(known.names)
    numbers = tuple(label for label in labels if isinstance(label, int) and 0 <= label < count)
    if declared is None and len(numbers) == len(labels) and not any(map(_is_number, known.names)):
        complete = len(numbers) == count and not known.named
        return Classes(fresh.names if complete else known.names, numbers, problem)
    if not known.named and count == len(fresh.names):
        return fresh
    raise UserError(
        f"data.label_field: the labels of the data ({listed(fresh.names)}) are not the classes of "
        f"{known.place} ({listed(known.names)}); give the data the model's names, or begin at a model whose "
        "head is not trained yet"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
