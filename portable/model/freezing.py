"""Select the parameters to train, and set the dtypes of the frozen parameters.

A frozen parameter has no gradient and no optimizer state. Engines store a frozen parameter in the
dtype that it has on the meta device. Trained parameters are stored in fp32, or in
``train.master_dtype``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError
from portable.model.parameters import map_tied_names, match_parameters

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from portable.config.sections import TrainConfig

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes, keyed by the value of ``precision``. The compute dtype for any other value is fp32."""
_CHECKPOINT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


def freeze_parameters(
    model: nn.Module, names: Collection[str], dtype: torch.dtype | Mapping[str, torch.dtype]
) -> None:
    """Freeze some parameters of a model and change their dtype. Tied parameters stay tied.

    Args:
        model: The model, on the meta device. Its other parameters do not change.
        names: Names of the parameters to freeze. For a tied parameter, any of its names.
        dtype: Dtype in which engines store the frozen parameters: a single dtype, or a mapping from
            names to dtypes.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = parameters[name]
        parameter.requires_grad_(False)
        parameter.grad = None
        # Change the parameter in place, because a new object would lose ties and attributes.
        parameter.data = parameter.data.to(dtype if isinstance(dtype, torch.dtype) else dtype[name])


def set_trained_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the trained parameters of a model on the meta device to another dtype.

    Args:
        model: The model, on the meta device. Modified in place.
        dtype: Dtype in which the engines will store the trained parameters.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Change the parameter in place, because a new object would lose ties and attributes.
            parameter.data = parameter.data.to(dtype)


def list_frozen_names(model: nn.Module) -> list[str]:
    """List the names of the frozen parameters. A tied parameter is listed once, under its first name."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_untrained_parameters(
    model: nn.Module, settings: TrainConfig, dtype: torch.dtype, unreached_names: Collection[str] = ()
) -> None:
    """Freeze parameters that ``train.trainable`` and ``train.frozen`` exclude from training.

    A parameter that both settings match is frozen. If ``train.trainable`` is not set, all
    parameters are trained, except the matches of ``train.frozen`` and the parameters in
    ``unreached_names``.

    Args:
        model: The model, on the meta device.
        settings: The ``train`` section.
        dtype: Dtype in which engines store the frozen parameters.
        unreached_names: Names of the parameters that do not affect the loss. They are also frozen,
            unless ``train.trainable`` matches them.

    Raises:
        UserError: If a pattern is not a regular expression or matches no parameter, or if no
            parameter is trained.
    """
    names = {first: [first, *others] for first, others in map_tied_names(model).items()}
    trained_names = set(names).difference(unreached_names)
    if settings.trainable is not None:
        matches = [match_parameters("train.trainable", pattern, names) for pattern in settings.trainable]
        trained_names = set().union(*matches)
    for pattern in settings.frozen:
        trained_names -= match_parameters("train.frozen", pattern, names)
    if not trained_names:
        key = "train.frozen" if settings.frozen else "train.trainable"
        raise UserError(
            f"{key}: no parameter is left to train; change {key} so that at least one parameter is trained"
        )
    freeze_parameters(model, [name for name in names if name not in trained_names], dtype)


def build_tied_parameter_notes(model: nn.Module, settings: TrainConfig) -> list[str]:
    """Build notes about tied parameters that ``train.trainable`` or ``train.frozen`` treats unequally.

    A tied parameter has several names. A note is built if ``train.trainable`` or ``train.frozen``
    matches only some of them.

    Args:
        model: The model, after parameters were frozen.
        settings: The ``train`` section.

    Returns:
        One note per such parameter, with the names of the parameter and whether it is trained or
        frozen.
    """

    def match_patterns(parameter_name: str) -> tuple[bool, ...]:
        both = (settings.trainable or (), settings.frozen)
        return tuple(any(re.search(pattern, parameter_name) for pattern in patterns) for patterns in both)

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        f"{' and '.join([name, *others])} are tied, so both are {'trained' if name in trained else 'frozen'}"
        for name, others in map_tied_names(model).items()
        if len({match_patterns(alias) for alias in (name, *others)}) > 1
    ]


def set_frozen_dtypes(model: nn.Module, stored_tensors: Mapping[str, Any], precision: str) -> None:
    """Set the dtype of each frozen parameter so that an engine stores its values without rounding.

    If the stored tensor has the compute dtype of the run, the parameter also gets this dtype.
    Otherwise, it gets fp32.

    Args:
        model: The model, on the meta device. Modified in place.
        stored_tensors: Tensors from which the parameters are loaded, keyed by name. A tensor without an
            attribute ``dtype`` counts as fp32.
        precision: Value of the setting ``precision``.
    """
    compute = COMPUTE_DTYPES.get(precision, torch.float32)
    tied_names = map_tied_names(model)
    dtypes = {}
    for name in list_frozen_names(model):
        source = next(
            (stored_tensors[alias] for alias in (name, *tied_names[name]) if alias in stored_tensors), None
        )
        is_compute_dtype = _CHECKPOINT_DTYPES.get(getattr(source, "dtype", "")) == compute
        dtypes[name] = compute if is_compute_dtype else torch.float32
    freeze_parameters(model, list(dtypes), dtypes)
