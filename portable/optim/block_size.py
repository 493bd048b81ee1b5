"""Block sizes of 8-bit moments. See :mod:`portable.optim.adamw_8bit`."""

from __future__ import annotations

import math

MAX_BLOCK_ELEMENTS, MIN_BLOCK_ELEMENTS = 256, 32
MIN_QUANTIZED_ELEMENTS = 4096
"""Elements of the smallest parameter with 8-bit moments. Smaller parameters have 32-bit moments, as in
bitsandbytes and torchao.
"""


def choose_block_size(shape: tuple[int, ...]) -> int | None:
    """Choose the number of elements per block: a divisor of the row size, at most 256.

    Args:
        shape: Shape of the parameter.

    Returns:
        The number of elements. None if the moments of the parameter have 32 bits.
    """
    if len(shape) < 2 or math.prod(shape) < MIN_QUANTIZED_ELEMENTS:
        return None
    row = math.prod(shape[1:])
    block = next(n for n in range(min(row, MAX_BLOCK_ELEMENTS), 0, -1) if row % n == 0)
    return block if block >= MIN_BLOCK_ELEMENTS else None
