"""Choose block sizes for the 8-bit moments of :mod:`portable.optim.adamw_8bit`.

This module does not import torch.
"""

from __future__ import annotations

import math

MAX_BLOCK_ELEMENTS, MIN_BLOCK_ELEMENTS = 256, 32
MIN_QUANTIZED_ELEMENTS = 4096
"""Minimum number of elements of a parameter with 8-bit moments. Smaller parameters have 32-bit
moments, as in bitsandbytes and torchao."""


def choose_block_size(shape: tuple[int, ...]) -> int | None:
    """Choose the number of elements per quantization block.

    The result is the largest divisor of the row size that is at most 256.

    Args:
        shape: Shape of the parameter. A row consists of the elements with the same first index.

    Returns:
        The number of elements. None if the moments must not be quantized, because the parameter
        has fewer than two dimensions or fewer than 4096 elements, or because its row size has no
        divisor between 32 and 256.
    """
    if len(shape) < 2 or math.prod(shape) < MIN_QUANTIZED_ELEMENTS:
        return None
    row = math.prod(shape[1:])
    block = next(n for n in range(min(row, MAX_BLOCK_ELEMENTS), 0, -1) if row % n == 0)
    return block if block >= MIN_BLOCK_ELEMENTS else None
