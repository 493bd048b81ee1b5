"""Casts between floating-point dtypes, block by block: round to nearest, ties to even; NaN stays NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from converters.errors import CheckpointError
from converters.options import DTYPES
from converters.tensors.dtypes import CASTABLE, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.storage.bytes import Touched
    from converters.tensors.tensor import Array, Tensor

# Of the source dtype. A conversion holds one block and its cast copy per thread; both fit a core's cache.
# With smaller blocks, threads wait for the interpreter's lock between them.
BLOCK_BYTES = 512 << 10


def parse_dtype(name: str, *, quantised: bool = False) -> str | None:
    """The target dtype of `--dtype`, None for keep.

    Raises:
        CheckpointError: an unknown name; or q8_0, unless `quantised`.
    """
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if DTYPES[name] == "Q8_0" and not quantised:
        raise CheckpointError("--dtype q8_0: only --to gguf writes it")
    return DTYPES[name]


def cast_dtype(tensor: Tensor, target: str | None) -> str:
    """The dtype to write `tensor` in: integers, booleans, 8-bit floats and 0-d tensors are never cast."""
    if target is None or tensor.dtype not in CASTABLE or not tensor.shape:
        return tensor.dtype
    return target


def cast_blocks(tensor: Tensor, dtype: str, touched: Touched, nbytes: int = BLOCK_BYTES) -> Iterator[Array]:
    """The flattened elements as `dtype`, in blocks, each valid until the next."""
    for block in tensor.blocks(nbytes, touched):
        yield block if tensor.dtype == dtype else rounded(block, dtype)


def rounded(block: Array, dtype: str) -> Array:
    """The elements as `dtype`; `block` itself where it has that dtype."""
    if block.dtype == numpy_dtype(dtype):
        return block
    made = np.empty(block.shape, numpy_dtype(dtype))
    round_into(made, block, dtype)
    return made


def round_into(target: Array, block: Array, dtype: str) -> None:
    """Write the elements as `dtype`, which `target` has, into it."""
    with np.errstate(all="ignore"):  # out of range becomes infinity
        if block.dtype == np.float64 and dtype == "BF16":
            block = _to_odd_float32(block)
        target[...] = block


def _to_odd_float32(block: Array) -> Array:
    """float64 as float32, rounded to odd, so that rounding again to bfloat16 is correct.

    ml_dtypes casts float64 to bfloat16 through float32 and rounds twice: 1 + 2**-8 + 2**-40 becomes a tie in
    between. Rounding to odd (towards zero, with the last bit set if the value is inexact) creates no ties.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    near = block.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= np.abs(back) > np.abs(block)
    bits |= (back != block) & ~np.isnan(block)
    return near
