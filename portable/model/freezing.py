"""Frozen parameters: which of a model's parameters are trained, and the dtype of those that are not.

A frozen parameter has no gradient and no optimizer state. Its dtype on the meta device is the dtype in which
an engine stores it; a trained parameter is fp32.
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
"""The compute type by ``precision``; fp32 where it is not listed."""
_CHECKPOINT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


def freeze_parameters(
    model: nn.Module, names: Collection[str], dtype: torch.dtype | Mapping[str, torch.dtype]
) -> None:
    """Freeze the parameters ``names`` of ``model``, on the meta device. Tied parameters stay tied.

    Args:
        model: on the meta device; its other parameters stay as they are.
        names: any name of a tied parameter stands for all of them.
        dtype: in which engines store the parameters; one for all, or by name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = parameters[name]
        parameter.requires_grad_(False)
        parameter.grad = None
        # In place: the parameter remains the same object, so ties and attributes remain.
        parameter.data = parameter.data.to(dtype if isinstance(dtype, torch.dtype) else dtype[name])


def list_frozen_names(model: nn.Module) -> list[str]:
    """The frozen parameters, tied ones by their first name."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_untrained_parameters(
    model: nn.Module, settings: TrainConfig, dtype: torch.dtype, unreached_names: Collection[str] = ()
) -> None:
    """Freeze what ``train.trainable`` and ``train.frozen`` leave out of training.

    Args:
        model: on the meta device.
        settings: the section ``train``.
        dtype: in which engines store the frozen parameters.
        unreached_names: Names of the parameters that the loss does not depend on. They are frozen as well,
        unless
            ``train.trainable`` matches them.

    Raises:
        UserError: if a pattern is not a regular expression or matches no parameter, or nothing is trained.
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
        raise UserError(f"{key}: nothing is left to train; let at least one parameter be trained")
    freeze_parameters(model, [name for name in names if name not in trained_names], dtype)


def build_tied_parameter_notes(model: nn.Module, settings: TrainConfig) -> list[str]:
    """Notes for the user on tied parameters of which the patterns name only one."""

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
    """Give each frozen parameter the dtype in which an engine keeps its values exactly.

    It is the compute type if ``stored_tensors`` have it, otherwise fp32.

    Args:
        model: on the meta device.
        stored_tensors: the values to come, by name; whatever has no ``dtype`` counts as fp32.
        precision: of the run.
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
