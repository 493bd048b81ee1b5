"""Casts between floating types, block by block: round to nearest, ties to even, NaN stays NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from converters.dtypes import CASTABLE, numpy_dtype
from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.storage import Touched
    from converters.tensor import Array, Tensor

CHOICES = {"keep": None, "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Of the source; one block and its cast copy are all that a conversion keeps in memory.
# They fit the cache of a core, where checksum, cast and write find the bytes.
BLOCK_BYTES = 256 << 10


def parse_dtype(name: str) -> str | None:
    """The target type of `--dtype`, None for keep; CheckpointError for a name it does not know."""
    if name not in CHOICES:
        raise CheckpointError(f"dtype {name!r} is not one of {', '.join(CHOICES)}")
    return CHOICES[name]


def cast_dtype(tensor: Tensor, target: str | None) -> str:
    """The type `tensor` gets: integers, booleans, 8-bit floats and 0-d buffers stay exact."""
    if target is None or tensor.dtype not in CASTABLE or not tensor.shape:
        return tensor.dtype
    return target


def cast_blocks(tensor: Tensor, dtype: str, touched: Touched, nbytes: int = BLOCK_BYTES) -> Iterator[Array]:
    """The raveled elements as `dtype`, in flat blocks, each valid until the next."""
    kind = numpy_dtype(dtype)
    for block in tensor.blocks(nbytes, touched):
        if tensor.dtype == dtype:
            yield block
        else:
            with np.errstate(all="ignore"):  # out of range becomes infinity, as everywhere
                yield block.astype(kind)
