"""Compute the size of a parameter's optimizer state, without creating the state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from portable.optim.block_size import choose_block_size
from portable.plugins import is_plugin_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config.sections import TrainConfig

FP32_BYTES = 4
"""Size in bytes of an fp32 element. Master weights, gradients and moments are fp32 by default."""
MASTER_BYTES = {"fp32": FP32_BYTES, "bf16": 2}
"""Size in bytes of an element of a master weight, keyed by ``train.master_dtype``. Moments that are not
quantized have the same size."""


class CustomStateBytes(NamedTuple):
    """Size in bytes of a custom optimizer's state for a parameter.

    Attributes:
        sharded: Size of the state tensors with the shape of the parameter, which are sharded like the
            parameter.
        replicated: Size of all other state, such as step counters, which is replicated on each rank.
    """

    sharded: int
    replicated: int


def compute_custom_state_bytes(train: TrainConfig, shape: tuple[int, ...], elements: int) -> CustomStateBytes:
    """Compute the size of a custom optimizer's state for a shard of a parameter.

    The optimizer is run on a meta tensor with the complete shape to find the state that it creates.
    If it fails on the meta device, it is run on a CPU tensor. Results of these runs are cached.

    Args:
        train: Settings whose ``optimizer`` is a custom optimizer.
        shape: Shape of the complete parameter.
        elements: Number of elements of the shard.

    Raises:
        UserError: If the optimizer cannot be created, or if it fails in a trial step.
    """
    # Imported here, because it imports torch.
    from portable.optim.custom_optimizer import list_state_tensor_layouts

    sharded = replicated = 0
    for size, itemsize in list_state_tensor_layouts(train, shape):
        if size == shape:
            sharded += itemsize * elements
        else:
            replicated += itemsize * math.prod(size)
    return CustomStateBytes(sharded, replicated)


def compute_optimizer_state_bytes(
    train: TrainConfig,
    shape: Sequence[int],
    num_rows: int,
    *,
    keeps_fp32_moments: bool,
    uses_muon: bool = False,
) -> int:
    """Compute the bytes of the optimizer state for a parameter, or for a shard with some of its rows.

    This includes the exponential moving average of the weights if ``train.ema`` is set.

    Args:
        train: Settings that select the optimizer.
        shape: Shape of the complete parameter.
        num_rows: Number of rows of the shard along the first dimension. ``shape[0]`` for the complete
            parameter.
        keeps_fp32_moments: Whether 8-bit AdamW keeps the moments of this parameter in fp32.
        uses_muon: Whether Muon updates the parameter.
    """
    row = math.prod(shape[1:])
    elements = num_rows * row if shape else 1
    average = FP32_BYTES * elements if train.ema is not None else 0
    return average + _compute_state_bytes_without_average(
        train, tuple(shape), num_rows, elements, keeps_fp32_moments=keeps_fp32_moments, uses_muon=uses_muon
    )


def _compute_state_bytes_without_average(
    train: TrainConfig,
    shape: tuple[int, ...],
    num_rows: int,
    elements: int,
    *,
    keeps_fp32_moments: bool,
    uses_muon: bool,
) -> int:
    """Compute the size of the optimizer state without the moving average of the weights.

    Args:
        train: Settings that select the optimizer.
        shape: Shape of the complete parameter.
        num_rows: Number of rows of the shard along the first dimension.
        elements: Number of elements of the shard.
        keeps_fp32_moments: Whether 8-bit AdamW keeps the moments of this parameter in fp32.
        uses_muon: Whether Muon updates the parameter.
    """
    row, step = math.prod(shape[1:]), FP32_BYTES
    if is_plugin_name(train.optimizer):
        return sum(compute_custom_state_bytes(train, shape, elements))
    if uses_muon:
        return FP32_BYTES * elements
    if train.optimizer == "sgd":
        return FP32_BYTES * elements if train.betas[0] else 0
    if train.optimizer == "adafactor":
        if len(shape) < 2:
            return FP32_BYTES * elements + step
        columns = shape[-1] if len(shape) == 2 else elements // max(1, shape[-2])
        return FP32_BYTES * (elements // max(1, shape[-1]) + columns) + step
    block = choose_block_size(shape) if train.optimizer == "adamw_8bit" and not keeps_fp32_moments else None
    if block is None:
        return 2 * MASTER_BYTES[train.master_dtype] * elements + step
    return 2 * (elements + FP32_BYTES * num_rows * (row // block)) + step
