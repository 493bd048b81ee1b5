"""Read and set the classes and the problem type of sequence classifiers in a model config.

Also determine which token a classifier reads.
"""

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
    """Find the classes that are fixed by a pretrained head or by ``model.config``.

    A pretrained model has such a head if ``architectures`` in its config contains a class whose
    name ends with ``ForSequenceClassification``. Without ``architectures``, a pretrained head is
    assumed if a class name in the config does not begin with ``LABEL_``. With ``model.init:
    scratch``, there is no pretrained head.

    ``model.config`` fixes the classes only if it contains ``num_labels``, ``id2label`` or
    ``label2id``, and if ``model.name_or_path`` is not set. The outputs of a regression count as
    classes.

    Args:
        config: Transformers config of the model.
        settings: The ``model`` section of the config.

    Returns:
        The classes. None if they are not fixed, so that the labels in the data determine them.
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
    """Return the ``problem_type`` of a classifier's config.

    Args:
        config: Transformers config of the model.
        settings: The ``model`` section of the config.

    Returns:
        The problem type. None for other tasks, or if the config has no problem type. In the latter
        case, the labels in the data determine the problem type.

    Raises:
        UserError: If transformers does not support this problem type.
    """
    problem_type = getattr(config, "problem_type", None)
    if settings.task != "sequence-classification" or problem_type is None:
        return None
    if problem_type not in PROBLEM_TYPES:
        raise UserError(
            f"{settings.setting_key}: problem_type {problem_type!r} is not supported; use one of "
            f"{', '.join(PROBLEM_TYPES)}"
        )
    problem: ProblemType = problem_type
    return problem


def _list_class_names(config: PretrainedConfig) -> list[str]:
    """List the class names in the order of their ids.

    The names come from ``id2label``. If it is missing or contains only default names, they come
    from ``label2id``. Classes without a name are called ``LABEL_<id>``, as in transformers.
    """
    count = int(config.num_labels or 0)
    by_id = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    names = [by_id.get(index, f"LABEL_{index}") for index in range(count)]
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        by_name = {int(index): str(name) for name, index in (config.label2id or {}).items()}
        names = [by_name.get(index, name) for index, name in enumerate(names)]
    return names


def classifies_at_last_position(config: PretrainedConfig) -> bool:
    """Return whether a classifier reads the last position, which requires padding on the left.

    This applies to models with ``summary_type: last`` in their config, such as XLNet. It does not
    apply to classifiers that search for the last token before the padding, such as Llama.
    """
    return getattr(config, "summary_type", None) == "last"


def classifies_at_end_token(config: PretrainedConfig) -> bool:
    """Return whether a classifier reads the hidden state of the end token, as in BART and T5.

    The forward pass of such a classifier fails for a text without an end token. The classifier is
    recognized by the name ``eos_token_id`` in the bytecode of its forward method. The result is
    False for custom code from the Hub, and for models that transformers does not support as
    classifiers.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        model_class = get_model_class(AutoModelForSequenceClassification, config)
    except KeyError:  # custom code from the Hub, or not a classifier
        return False
    return "eos_token_id" in inspect.unwrap(model_class.forward).__code__.co_names


def build_label_arguments(config: PretrainedConfig, settings: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of ``build_data`` that depend on the config of a classifier.

    Args:
        config: Transformers config of the model.
        settings: The ``model`` section of the config.

    Returns:
        ``model_classes`` and ``problem_type``, which may be None, and ``pad_left``.

    Raises:
        UserError: If transformers does not support the problem type in the config.
    """
    return {
        "model_classes": find_known_classes(config, settings),
        "problem_type": read_problem_type(config, settings),
        "pad_left": classifies_at_last_position(config),
    }


def set_config_labels(config: PretrainedConfig, classes: LabelMapping) -> None:
    """Store the class names and the problem type in a transformers config.

    Single-label classification is transformers' default, so it is stored only if the config already has
    a problem type.

    Args:
        config: The transformers config. Modified in place.
        classes: Classes of the data.
    """
    config.id2label = dict(enumerate(classes.output_names))
    config.label2id = {name: index for index, name in enumerate(classes.output_names)}
    if classes.problem_type != SINGLE_LABEL or getattr(config, "problem_type", None) is not None:
        config.problem_type = classes.problem_type
