"""Map the labels of the data to the outputs of a classifier.

A classifier is trained to predict one class per text, any number of classes per text, or numbers
(regression).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from portable.data.sources.documents import format_name_list
from portable.errors import UserError
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from portable.data.tokens.cache import LabelKind, TokenCache

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""Value of ``problem_type`` in a transformers config, which selects the loss of a classifier."""
SINGLE_LABEL, MULTI_LABEL, REGRESSION = PROBLEM_TYPES = get_args(ProblemType)


@dataclass(frozen=True)
class ModelClasses:
    """Class names of a classifier, and the setting or model that defines them."""

    setting_key: str
    """Setting or model that defines the classes, used in error messages."""
    names: tuple[str, ...]
    """Class names in the order of their ids."""

    @property
    def description(self) -> str:
        """Model description used in error messages, such as ``the model (model.name_or_path)``.

        The parentheses contain :attr:`setting_key`, the setting that determines the class labels of
        the model. There are no parentheses if :attr:`setting_key` is ``the model``, the value that
        :func:`map_eval_labels_to_outputs` uses.
        """
        return "the model" if self.setting_key == "the model" else f"the model ({self.setting_key})"

    @property
    def has_custom_names(self) -> bool:
        """Whether the names differ from transformers' defaults LABEL_0, LABEL_1 ..."""
        return any(name != f"LABEL_{index}" for index, name in enumerate(self.names))

    def would_rename_classes(self, names: Sequence[str]) -> bool:
        """Return whether ``names`` would replace the model's default names LABEL_0, LABEL_1 ...

        If so, the run prints a note. A model with default names may have been trained on other
        classes, or on the same classes in a different order. The result is False if all ``names``
        are numbers: the default name LABEL_1 already contains the number ``1``.
        """
        return not self.has_custom_names and names != self.names and not all(map(_is_number, names))


@dataclass(frozen=True)
class LabelMapping:
    """Data for mapping the labels in the token cache to the outputs of a classifier.

    The token cache stores integers and strings as classes, and other labels as floats. There are
    three cases:

    - Classification with classes: :attr:`output_ids` contains the output of each class.
    - Float labels: the floats are used directly as targets of the outputs. They are regression
      targets, or scores with one float per class.
    - Regression with integer labels: :attr:`regression_values` contains the integer of each class,
      which is the target.
    """

    output_names: tuple[str, ...]
    """Names of the outputs in the order of their ids."""
    output_ids: tuple[int, ...]
    """Output id of each class in the token cache, in the order of ``TokenCache.label_names``.

    Empty if labels are numbers.
    """
    problem_type: ProblemType = SINGLE_LABEL
    """Problem type, which selects the loss."""
    regression_values: tuple[float, ...] = ()
    """Value of each class in the token cache, for a regression on integers. Otherwise empty.

    The cache stores integers as classes.
    """


def map_labels_to_outputs(
    tokens: TokenCache,
    declared_names: Sequence[str] | None = None,
    model_classes: ModelClasses | None = None,
    problem_type: ProblemType | None = None,
) -> LabelMapping:
    """Map the labels in a token cache to the outputs of a classifier.

    If ``problem_type`` is None, it is regression if ``model_classes`` contains a single output.
    Otherwise, it is determined from the labels, as in transformers:

    - An integer or a string per text means single-label classification.
    - A list of integers or strings per text means multi-label classification.
    - One number per text means regression if some of these numbers have a fraction, such as 0.5.
    - A list of floats or booleans per text means multi-label classification with one score per
      class. If every list has a single item, it means regression.

    Args:
        tokens: Token cache with labels.
        declared_names: Class names that the dataset declares. The labels are then indices into
            them. None if the dataset declares none.
        model_classes: Names of the model's outputs. None if the head is untrained and
            ``model.config`` does not define them.
        problem_type: ``problem_type`` in the model's config. None if the config does not set it.

    Raises:
        UserError: If the labels do not fit the model or the problem type.
    """
    kind, names = tokens.label_kind, tokens.label_names
    width = len(model_classes.names) if model_classes is not None else int(tokens.meta.get("label_width", 1))
    if problem_type is None:
        if model_classes is not None and width == 1:
            problem_type = REGRESSION
        else:
            by_kind = {
                "classes": SINGLE_LABEL,
                "sets": MULTI_LABEL,
                "values": REGRESSION if width == 1 else MULTI_LABEL,
            }
            problem_type = by_kind[kind]
            _check_no_accidental_regression(tokens)
    _check_labels_fit_problem_type(kind, names, problem_type)
    if problem_type != REGRESSION and tokens.label_values is None:
        return map_labels_to_class_ids(
            names, declared_names, model_classes, is_multi_label=problem_type == MULTI_LABEL
        )
    outputs = (
        model_classes.names
        if model_classes is not None
        else tuple(f"LABEL_{index}" for index in range(width))
    )
    model_text = "the model" if model_classes is None else model_classes.description
    if tokens.label_values is not None:
        if (num_values := tokens.label_values.shape[1]) != len(outputs):
            raise UserError(
                f"data.label_field: each label has {format_count(num_values, 'number')}, but {model_text} "
                f"has {format_count(len(outputs), 'output')} (num_labels); use labels with one number per "
                f"output, or a model with {format_count(num_values, 'output')}"
            )
        if problem_type == MULTI_LABEL:
            _check_class_scores(tokens.label_values[:])
        return LabelMapping(outputs, (), problem_type)
    if len(outputs) != 1:
        raise UserError(
            f"data.label_field: each label is a single number, but {model_text} has {len(outputs)} outputs "
            f"(num_labels); use a list of {len(outputs)} floats as the label of each text, or a model with 1 "
            "output"
        )
    return LabelMapping(outputs, (), problem_type, tuple(float(name) for name in names))


def _check_no_accidental_regression(tokens: TokenCache) -> None:
    """Check that class labels are not treated as regression targets because of a few mistakes.

    A single label that is not an integer, such as 0.5, turns all labels into regression
    targets. If only a few labels are not integers, they are probably mistakes in class labels.

    Raises:
        UserError: If some labels are not integers, but their share is below
            :data:`_FEW_FRACTIONS`.
    """
    fractions, documents = int(tokens.meta.get("fractions", 0)), tokens.num_documents
    if tokens.label_kind == "values" and 0 < fractions < _FEW_FRACTIONS * documents:
        raise UserError(
            f"data.label_field: {fractions:,} of {documents:,} labels "
            f"{'has' if fractions == 1 else 'have'} a fraction, such as "
            f"{tokens.meta['fraction']:g}, but the others are whole numbers; write all labels as whole "
            "numbers to train a classifier, or set model.config.problem_type to regression"
        )


_FEW_FRACTIONS = 0.1
"""Minimum share of labels with a fraction for a regression. If the share is smaller, the fractions are
probably mistakes in class labels.
"""


def map_eval_labels_to_outputs(
    training_mapping: LabelMapping,
    training_tokens: TokenCache,
    training_declared_names: Sequence[str] | None,
    eval_tokens: TokenCache,
    eval_declared_names: Sequence[str] | None = None,
) -> LabelMapping:
    """Map the labels of evaluation data to the outputs of the corresponding training labels.

    Class labels correspond to an output if their class name is the name of the output or of a
    training label. If there is no exact match, case is ignored, unless some of these names differ
    only in case. Float labels, and all labels of a regression, are used directly as targets.

    In a mixture, the function also maps the labels of all training sources after the first source.
    ``eval_tokens`` is then the token cache of a later training source.

    Args:
        training_mapping: Mapping of the labels of the training data.
        training_tokens: Token cache of the training data.
        training_declared_names: Class names that the training dataset declares. None if it
            declares none.
        eval_tokens: Token cache of the evaluation data. Some classes may be missing.
        eval_declared_names: Class names that the evaluation dataset declares. None if it
            declares none.

    Raises:
        UserError: If a label of the evaluation data corresponds to no output, or if the labels
            do not fit the problem type or the number of outputs.
    """
    if training_mapping.problem_type == REGRESSION or eval_tokens.label_values is not None:
        known_classes = ModelClasses("the model", training_mapping.output_names)
        return map_labels_to_outputs(
            eval_tokens, eval_declared_names, known_classes, training_mapping.problem_type
        )
    _check_labels_fit_problem_type(
        eval_tokens.label_kind, eval_tokens.label_names, training_mapping.problem_type
    )
    ids = {name: index for index, name in enumerate(training_mapping.output_names)}
    for label, index in zip(
        training_tokens.label_names if training_mapping.output_ids else (),
        training_mapping.output_ids,
        strict=True,
    ):
        ids[_get_label_name(label, training_declared_names)] = index
    folded = {name.casefold(): index for name, index in ids.items()}
    class_ids = []
    for label in eval_tokens.label_names:
        name = _get_label_name(label, eval_declared_names)
        class_id = ids.get(name, folded.get(name.casefold()) if len(folded) == len(ids) else None)
        if class_id is None:
            raise UserError(
                f"data.label_field: the label {name!r} is not among the classes of the training data "
                f"({format_name_list(training_mapping.output_names)}); remove the records with this label, "
                "or add records of this class to the training data"
            )
        class_ids.append(class_id)
    return LabelMapping(training_mapping.output_names, tuple(class_ids), training_mapping.problem_type)


def _get_label_name(label: int | str, declared: Sequence[str] | None) -> str:
    """Return the class name of a label.

    If the dataset declares class names and the label is a valid index into ``declared``, return that
    name. Otherwise, return the label as text.
    """
    inside = declared is not None and isinstance(label, int) and 0 <= label < len(declared)
    return declared[label] if inside else str(label)  # type: ignore[index]


_EXPECTED_LABELS = {
    SINGLE_LABEL: "one class per text (an integer or a string)",
    MULTI_LABEL: "one list per text, with its classes (integers or strings) or one float per class",
    REGRESSION: "one float or one list of floats per text",
}
_KIND_DESCRIPTIONS = {
    "classes": "single classes",
    "sets": "lists of classes",
    "values": "decimal numbers",
}


def _check_labels_fit_problem_type(
    kind: LabelKind, names: Sequence[int | str], problem_type: ProblemType
) -> None:
    """Check that the labels are suitable for the problem type.

    Single-label classification needs one class per text. Multi-label classification needs a list of
    classes per text, or one or more floats per text. Regression needs one or more floats per text,
    or one integer per text.

    Args:
        kind: Kind of the labels in the token cache.
        names: Class names in the token cache. If all are integers, they can also be regression
            targets.
        problem_type: Problem type of the model.

    Raises:
        UserError: If the labels are not suitable.
    """
    numbers = kind == "classes" and all(isinstance(name, int) for name in names)
    fits = {
        SINGLE_LABEL: kind == "classes",
        MULTI_LABEL: kind != "classes",
        REGRESSION: kind == "values" or numbers,
    }
    if not fits[problem_type]:
        suitable_types = [name for name, is_suitable in fits.items() if is_suitable]
        raise UserError(
            f"data.label_field: the labels are {_KIND_DESCRIPTIONS[kind]}, but problem_type {problem_type} "
            f"needs {_EXPECTED_LABELS[problem_type]}; change the labels, or set model.config.problem_type to "
            f"{' or '.join(suitable_types)}"
        )


def _check_class_scores(values: npt.NDArray[Any]) -> None:
    """Check that class scores are between 0 and 1.

    Raises:
        UserError: If a score is outside this range.
    """
    for start in range(0, len(values), 1 << 20):
        part = values[start : start + (1 << 20)]
        if part.min() < 0 or part.max() > 1:
            raise UserError(
                "data.label_field: some class scores are outside the range 0 to 1; correct the scores, or "
                "set model.config.problem_type to regression to train on several numbers"
            )


def map_labels_to_class_ids(
    labels: Sequence[int | str],
    declared_names: Sequence[str] | None = None,
    model_classes: ModelClasses | None = None,
    *,
    is_multi_label: bool = False,
) -> LabelMapping:
    """Map each label in the data to a class id of the model.

    The class names in the data are compared with the model's class names, first exactly and then
    ignoring case. If the model does not have all names in the data, there are two fallbacks:

    1. Integer labels are used as class ids. This requires that all labels are valid class ids, that
       the dataset declares no class names, and that none of the model's class names is a number.
    2. The class names in the data replace the model's class names. This requires that the model has
       the same number of classes, and only default names such as LABEL_0.

    Args:
        labels: Distinct labels, sorted.
        declared_names: Class names that the dataset declares. The labels are then indices into
            them. None if the dataset declares none.
        model_classes: Classes of the model. If None, the head is untrained and gets the classes of
            the data.
        is_multi_label: Whether a text may have any number of classes.

    Raises:
        UserError: If there are fewer than two labels (or none, if ``is_multi_label`` is True). Also
            raised if a label is not an index into ``declared_names``, or not a class of the model.
    """
    problem: ProblemType = MULTI_LABEL if is_multi_label else SINGLE_LABEL
    if is_multi_label and not labels:
        raise UserError(
            "data.label_field: the list of labels is empty in all records; choose a field with labels"
        )
    if len(labels) < 2 and not is_multi_label:
        raise UserError("data.label_field: all records have the same label; use data with several classes")
    if declared_names is not None:
        if outside := [label for label in labels if label not in range(len(declared_names))]:
            raise UserError(
                f"data.label_field: some records have the label {outside[0]!r}, which is not one of the "
                f"{len(declared_names)} classes of the dataset ({format_name_list(declared_names)}); choose "
                "a data.split whose records have labels"
            )
        data_mapping = LabelMapping(tuple(declared_names), tuple(int(label) for label in labels), problem)
    else:
        data_mapping = LabelMapping(tuple(str(label) for label in labels), tuple(range(len(labels))), problem)
    if model_classes is None:
        return data_mapping
    for normalize_name in (str, str.casefold):
        ids = {normalize_name(name): index for index, name in enumerate(model_classes.names)}
        data_names = [normalize_name(name) for name in data_mapping.output_names]
        ambiguous = len(ids) < len(model_classes.names) or len(set(data_names)) < len(data_names)
        if not ambiguous and ids.keys() >= set(data_names):
            return LabelMapping(
                model_classes.names,
                tuple(ids[data_names[index]] for index in data_mapping.output_ids),
                problem,
            )
    count = len(model_classes.names)
    numbers = tuple(label for label in labels if isinstance(label, int) and 0 <= label < count)
    if (
        declared_names is None
        and len(numbers) == len(labels)
        and not any(map(_is_number, model_classes.names))
    ):
        complete = len(numbers) == count and not model_classes.has_custom_names
        return LabelMapping(data_mapping.output_names if complete else model_classes.names, numbers, problem)
    if not model_classes.has_custom_names and count == len(data_mapping.output_names):
        return data_mapping
    raise UserError(
        f"data.label_field: the labels of the data ({format_name_list(data_mapping.output_names)}) are not "
        f"the classes of {model_classes.setting_key} ({format_name_list(model_classes.names)}); use the "
        "model's class names in the data, or a model without a trained classification head"
    )


def _is_number(name: str) -> bool:
    """Return whether a class name is a number."""
    try:
        float(name)
    except ValueError:
        return False
    return True
