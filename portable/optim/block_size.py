"""Block sizes of 8-bit moments; see :mod:`portable.optim.adamw_8bit`."""

from __future__ import annotations

import math

MAX_BLOCK_ELEMENTS, MIN_BLOCK_ELEMENTS = 256, 32
MIN_QUANTIZED_ELEMENTS = 4096
"""Parameters with fewer elements have 32-bit moments, as in bitsandbytes and torchao."""


def choose_block_size(shape: tuple[int, ...]) -> int | None:
    """Elements per block, a divisor of the row size; None for 32-bit moments."""
    if len(shape) < 2 or math.prod(shape) < MIN_QUANTIZED_ELEMENTS:
        return None
    row = math.prod(shape[1:])
    block = next(n for n in range(min(row, MAX_BLOCK_ELEMENTS), 0, -1) if row % n == 0)
    return block if block >= MIN_BLOCK_ELEMENTS else None
