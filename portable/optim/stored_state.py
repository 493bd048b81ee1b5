"""Check the optimizer state in checkpoints, and convert its scalars and parameter groups.

Scalars, such as step counts, may be stored as numbers or as tensors. All engines use these
functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from portable.converters import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.checkpoint import OptimizerState

Number = bool | int | float
KEYS_FROM_SETTINGS = ("params", "param_names", "lr", "initial_lr", "weight_decay")
"""Entries of a parameter group that are set by the settings of a run and not restored from a checkpoint."""


def check_state_entry(value: Any, shape: Sequence[int], name: str) -> None:
    """Check that an entry of a parameter's optimizer state exists and has the expected shape.

    Args:
        value: Tensor or number in the checkpoint. None if the checkpoint does not contain the entry.
        shape: Shape of the entry in the run. Empty for a number, which may be stored as a tensor of one
            element.
        name: Name of the entry, used in error messages.

    Raises:
        CheckpointError: If the entry is missing or its shape does not match.
    """
    stored = tuple(getattr(value, "shape", ()))
    if value is None:
        raise CheckpointError(
            f"{name}: is missing from the checkpoint; use a checkpoint of the same model and optimizer"
        )
    if stored != tuple(shape) and (len(shape) > 0 or math.prod(stored) != 1):
        raise CheckpointError(
            f"{name}: has the shape {list(stored)} in the checkpoint, but {list(shape)} in this run; use a "
            "checkpoint of the same model and optimizer"
        )


def restore_custom_group_values(groups: list[dict[str, Any]], stored: OptimizerState | None) -> None:
    """Restore numbers that a custom optimizer stores in its parameter groups, such as a step count.

    An entry of a group that is a tensor is filled with the stored number. Settings of the run
    (:data:`KEYS_FROM_SETTINGS`), booleans, values of other types, and entries that are not in
    the checkpoint are left unchanged.

    Args:
        groups: Parameter groups with ``param_names``. The values of a group are restored from
            the stored group that contains its first parameter. Groups without parameters are left
            unchanged. Modified in place.
        stored: Optimizer state of a checkpoint. None to leave the groups unchanged.
    """
    by_name = {name: group for group in (stored.param_groups if stored else ()) for name in group["params"]}
    for group in groups:
        values = by_name.get(next(iter(group["param_names"]), ""), {})
        for name in (group.keys() & values.keys()) - set(KEYS_FROM_SETTINGS):
            before, value = group[name], values[name]
            if isinstance(before, torch.Tensor):
                before.fill_(value)
            # Do not restore flags, because they belong to an engine.
            elif isinstance(before, int | float) and not isinstance(before, bool):
                group[name] = value


def cast_number(like: Any, number: float) -> Any:
    """Convert a number to the type of ``like``, which is a number or a tensor.

    Returns:
        A number, or a tensor with the shape, dtype and device of ``like``.
    """
    return torch.full_like(like, number) if isinstance(like, torch.Tensor) else type(like)(number)


def to_plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter group to values that a checkpoint can store.

    These are numbers, strings, None, and tuples and lists of them. A tensor of one element becomes a
    number. All other entries and ``param_names`` are dropped.
    """
    values = {name: value.item() if _is_scalar(value) else value for name, value in group.items()}
    return {name: value for name, value in values.items() if _is_plain(value) and name != "param_names"}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, Number | str)
