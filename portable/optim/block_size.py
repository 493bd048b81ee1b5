"""Which moments are kept in 8 bits, and in blocks of how many; see :mod:`portable.optim.adamw_8bit`."""

from __future__ import annotations

import math

MOST_IN_A_BLOCK, FEWEST_IN_A_BLOCK = 256, 32
SMALLEST = 4096
"""Parameters with fewer elements keep 32-bit moments, as bitsandbytes and torchao do."""


def block_size(shape: tuple[int, ...]) -> int | None:
    """Elements in a block of a parameter, a divisor of its rows; None where its moments stay in 32 bits."""
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return None
    row = math.prod(shape[1:])
    block = next(n for n in range(min(row, MOST_IN_A_BLOCK), 0, -1) if row % n == 0)
    return block if block >= FEWEST_IN_A_BLOCK else None
