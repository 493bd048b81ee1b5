"""Bytes that optimizers keep for each parameter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from portable.optim.block_size import choose_block_size
from portable.plugins import names_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config.sections import TrainConfig

MASTER = 4
"""Bytes of a master weight, of its gradient, and of a moment: all fp32."""


class CustomStateBytes(NamedTuple):
    """Bytes of the state that a custom optimizer keeps for a parameter.

    Attributes:
        sharded: State with the shape of the parameter, which is sharded like the parameter.
        replicated: Other state, such as step counters.
    """

    sharded: int
    replicated: int


def compute_custom_state_bytes(train: TrainConfig, shape: tuple[int, ...], elements: int) -> CustomStateBytes:
    """Bytes of the state that a user's optimizer keeps of a part of a parameter: of its shape, and others.

    State of another shape counts completely. The optimizer is run on meta tensors.
    """
    from portable.optim.custom_optimizer import get_state_layout  # only here: it needs torch

    sharded = replicated = 0
    for size, itemsize in get_state_layout(train, shape):
        if size == shape:
            sharded += itemsize * elements
        else:
            replicated += itemsize * math.prod(size)
    return CustomStateBytes(sharded, replicated)


def compute_moment_bytes(
    train: TrainConfig, shape: Sequence[int], rows: int, *, exact: bool, matrices: bool = False
) -> int:
    """Bytes of the optimizer state of a parameter, or of ``rows`` of its rows.

    Args:
        train: Settings with the optimizer.
        shape: Shape of the complete parameter.
        rows: Number of rows along the first dimension.
        exact: whether 8-bit AdamW keeps its moments in fp32.
        matrices: whether Muon updates it as matrices.
    """
    row = math.prod(shape[1:])
    elements = rows * row if shape else 1
    average = MASTER * elements if train.ema is not None else 0
    return average + _compute_state_bytes(train, tuple(shape), rows, elements, exact=exact, matrices=matrices)


def _compute_state_bytes(
    train: TrainConfig, shape: tuple[int, ...], rows: int, elements: int, *, exact: bool, matrices: bool
) -> int:
    row, step = math.prod(shape[1:]), MASTER
    if names_code(train.optimizer):
        return sum(compute_custom_state_bytes(train, shape, elements))
    if matrices:
        return MASTER * elements
    if train.optimizer == "sgd":
        return MASTER * elements if train.betas[0] else 0
    if train.optimizer == "adafactor":
        if len(shape) < 2:
            return MASTER * elements + step
        columns = shape[-1] if len(shape) == 2 else elements // max(1, shape[-2])
        return MASTER * (elements // max(1, shape[-1]) + columns) + step
    block = choose_block_size(shape) if train.optimizer == "adamw_8bit" and not exact else None
    if block is None:
        return 2 * MASTER * elements + step
    return 2 * (elements + MASTER * rows * (row // block)) + step
