"""Class names and ids, problem type and token position of sequence classifiers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from portable.data.samples.classes import PROBLEM_TYPES, SINGLE_LABEL, ModelClasses
from portable.errors import UserError
from portable.private.transformers_internals import get_model_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from portable.config.sections import ModelConfig
    from portable.data.samples.classes import LabelMapping, ProblemType


def find_known_classes(config: PretrainedConfig, settings: ModelConfig) -> ModelClasses | None:
    """Return the classes of a pretrained head or of ``model.config``, or None if neither has any.

    The outputs of a regression count as classes.
    """
    names = _list_class_names(config)
    if settings.name_or_path is None:
        has_classes = any(key in (settings.config or {}) for key in ("num_labels", "id2label", "label2id"))
    elif settings.init == "scratch":
        has_classes = False
    else:
        built = getattr(config, "architectures", None)
        has_names = any(not name.startswith("LABEL_") for name in names)
        has_classes = any(n.endswith("ForSequenceClassification") for n in built) if built else has_names
    return ModelClasses(settings.setting_key, tuple(names)) if has_classes else None


def read_problem_type(config: PretrainedConfig, settings: ModelConfig) -> ProblemType | None:
    """Return the config's ``problem_type``, or None if the labels decide it.

    Raises:
        UserError: if transformers does not have this problem type.
    """
    problem_type = getattr(config, "problem_type", None)
    if settings.task != "sequence-classification" or problem_type is None:
        return None
    if problem_type not in PROBLEM_TYPES:
        raise UserError(
            f"{settings.setting_key}: problem_type is {problem_type!r}; use one of {', '.join(PROBLEM_TYPES)}"
        )
    problem: ProblemType = problem_type
    return problem


def _list_class_names(config: PretrainedConfig) -> list[str]:
    """Class names in the order of their ids."""
    count = int(config.num_labels or 0)
    by_id = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    names = [by_id.get(index, f"LABEL_{index}") for index in range(count)]
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        by_name = {int(index): str(name) for name, index in (config.label2id or {}).items()}
        names = [by_name.get(index, name) for index, name in enumerate(names)]
    return names


def classifies_at_last_position(config: PretrainedConfig) -> bool:
    """Whether the classifier reads the last position, even if it is padding. Padding must then come first."""
    return getattr(config, "summary_type", None) == "last"


def classifies_at_end_token(config: PretrainedConfig) -> bool:
    """Whether the classifier reads the end token, as in BART and T5, and fails without one."""
    from transformers import AutoModelForSequenceClassification

    try:
        model_class = get_model_class(AutoModelForSequenceClassification, config)
    except KeyError:  # code from the hub, or not a classifier
        return False
    return "eos_token_id" in inspect.unwrap(model_class.forward).__code__.co_names


def build_label_arguments(config: PretrainedConfig, settings: ModelConfig) -> dict[str, Any]:
    """What a classifier's config says about its data, as arguments of ``build_data``."""
    return {
        "known_classes": find_known_classes(config, settings),
        "problem": read_problem_type(config, settings),
        "pad_left": classifies_at_last_position(config),
    }


def set_config_labels(config: PretrainedConfig, classes: LabelMapping) -> None:
    """Store the class names and the problem type in ``config``."""
    config.id2label = dict(enumerate(classes.output_names))
    config.label2id = {name: index for index, name in enumerate(classes.output_names)}
    if classes.problem_type != SINGLE_LABEL or getattr(config, "problem_type", None) is not None:
        config.problem_type = classes.problem_type
