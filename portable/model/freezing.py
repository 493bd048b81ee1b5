"""Selection of the parameters that are trained, and dtypes of the frozen parameters.

A frozen parameter has no gradient and no optimizer state. Its dtype on the meta device is the dtype in which
an engine stores it. A trained parameter is fp32.
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
"""Compute dtype of each ``precision``. Other precisions have fp32."""
_CHECKPOINT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


def freeze_parameters(
    model: nn.Module, names: Collection[str], dtype: torch.dtype | Mapping[str, torch.dtype]
) -> None:
    """Freeze some parameters of a model and change their dtype. Tied parameters stay tied.

    Args:
        model: The model, on the meta device. Its other parameters do not change.
        names: Names of the parameters. A tied parameter may have any of its names.
        dtype: Dtype in which engines store the parameters: one for all, or one for each name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = parameters[name]
        parameter.requires_grad_(False)
        parameter.grad = None
        # Change the parameter in place, because a new object would lose ties and attributes.
        parameter.data = parameter.data.to(dtype if isinstance(dtype, torch.dtype) else dtype[name])


def list_frozen_names(model: nn.Module) -> list[str]:
    """List the names of the frozen parameters. Tied parameters have only their first name."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_untrained_parameters(
    model: nn.Module, settings: TrainConfig, dtype: torch.dtype, unreached_names: Collection[str] = ()
) -> None:
    """Freeze the parameters that ``train.trainable`` and ``train.frozen`` exclude from training.

    Args:
        model: The model, on the meta device.
        settings: The ``train`` section.
        dtype: Dtype in which engines store the frozen parameters.
        unreached_names: Names of the parameters that the loss does not depend on. They are frozen as well,
            unless ``train.trainable`` matches them.

    Raises:
        UserError: If a pattern is not a regular expression or matches no parameter, or if no parameter is
            trained.
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
        raise UserError(f"{key}: no parameter is left to train; let at least one parameter be trained")
    freeze_parameters(model, [name for name in names if name not in trained_names], dtype)


def build_tied_parameter_notes(model: nn.Module, settings: TrainConfig) -> list[str]:
    """Build notes about tied parameters if the patterns match only some of their names.

    Args:
        model: The model, after parameters were frozen.
        settings: The ``train`` section.

    Returns:
        A note for the user about each tied parameter.
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
    """Give each frozen parameter the dtype in which an engine stores its values exactly.

    This is the compute dtype if the stored tensor has it, otherwise fp32.

    Args:
        model: The model, on the meta device.
        stored_tensors: Tensors by name from which the parameters are loaded. Without a ``dtype``, they count
            as fp32.
        precision: Precision of the run.
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
