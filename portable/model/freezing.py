"""Frozen parameters: which of a model's parameters are trained, and the dtype of those that are not.

A frozen parameter has no gradient and no optimizer state. Its dtype on the meta device is the dtype in which
an engine stores it; a trained parameter is fp32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError
from portable.model.parameters import find_matching_parameters, find_tied_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from portable.config.sections import TrainConfig

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The compute type by ``precision``; fp32 where it is not listed."""
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16}


def freeze(model: nn.Module, names: Collection[str], dtype: torch.dtype | Mapping[str, torch.dtype]) -> None:
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


def find_frozen_names(model: nn.Module) -> list[str]:
    """The frozen parameters, tied ones by their first name."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_by_pattern(
    model: nn.Module, settings: TrainConfig, dtype: torch.dtype, unreached: Collection[str] = ()
) -> None:
    """Freeze what ``train.trainable`` and ``train.frozen`` leave out of training.

    Args:
        model: on the meta device.
        settings: the section ``train``.
        dtype: in which engines store the frozen parameters.
        unreached: Names of the parameters that the loss does not depend on. They are frozen as well, unless
            ``train.trainable`` matches them.

    Raises:
        UserError: if a pattern is not a regular expression or matches no parameter, or nothing is trained.
    """
    names = {first: [first, *others] for first, others in find_tied_names(model).items()}
    chosen = set(names).difference(unreached)
    if settings.trainable is not None:
        matches = [
            find_matching_parameters("train.trainable", pattern, names) for pattern in settings.trainable
        ]
        chosen = set().union(*matches)
    for pattern in settings.frozen:
        chosen -= find_matching_parameters("train.frozen", pattern, names)
    if not chosen:
        key = "train.frozen" if settings.frozen else "train.trainable"
        raise UserError(f"{key}: nothing is left to train; let at least one parameter be trained")
    freeze(model, [name for name in names if name not in chosen], dtype)


def build_tie_notes(model: nn.Module, settings: TrainConfig) -> list[str]:
    """Notes for the user on tied parameters of which the patterns name only one."""

    def match_patterns(parameter_name: str) -> tuple[bool, ...]:
        both = (settings.trainable or (), settings.frozen)
        return tuple(any(re.search(pattern, parameter_name) for pattern in patterns) for patterns in both)

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        f"{' and '.join([name, *others])} are tied, so both are {'trained' if name in trained else 'frozen'}"
        for name, others in find_tied_names(model).items()
        if len({match_patterns(alias) for alias in (name, *others)}) > 1
    ]


def keep_as_stored(model: nn.Module, tensors: Mapping[str, Any], precision: str) -> None:
    """Give each frozen parameter the dtype in which an engine keeps its values exactly.

    It is the compute type if ``tensors`` have it, otherwise fp32.

    Args:
        model: on the meta device.
        tensors: the values to come, by name; whatever has no ``dtype`` counts as fp32.
        precision: of the run.
    """
    compute = COMPUTE.get(precision, torch.float32)
    tied = find_tied_names(model)
    dtypes = {}
    for name in find_frozen_names(model):
        source = next((tensors[alias] for alias in (name, *tied[name]) if alias in tensors), None)
        same = _STORED.get(getattr(source, "dtype", "")) == compute
        dtypes[name] = compute if same else torch.float32
    freeze(model, list(dtypes), dtypes)
