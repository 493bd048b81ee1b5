"""Casts between floating-point dtypes, block by block: round to nearest, ties to even; NaN stays NaN."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.errors import CheckpointError, CommandError
from portable.converters.lazy_numpy import np
from portable.converters.options import DTYPES
from portable.converters.tensors.dtypes import CASTABLE_DTYPES, SUPPORTED_DTYPES, to_numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Tensor

# Of the source dtype. A conversion holds one block and its cast copy per thread; both fit a core's cache.
# With smaller blocks, threads wait for the interpreter's lock between them.
BLOCK_BYTES = 512 << 10


def parse_target_dtype(name: str, *, allow_ggml: bool = False) -> str | None:
    """The target dtype of `--dtype`, None for keep.

    Raises:
        CheckpointError: an unknown name; or one of ggml's blocks, unless `allow_ggml`.
    """
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if DTYPES[name] not in (None, *SUPPORTED_DTYPES) and not allow_ggml:
        raise CommandError(f"--dtype {name}: only --to gguf writes it")
    return DTYPES[name]


def select_written_dtype(tensor: Tensor, target: str | None) -> str:
    """The dtype to write `tensor` in: integers, booleans, 8-bit floats and 0-d tensors are never cast."""
    if target is None or tensor.dtype not in CASTABLE_DTYPES or not tensor.shape:
        return tensor.dtype
    return target


class CastLosses:
    """Elements that casts made infinite or 0, counted by several threads.

    Attributes:
        num_infinite, num_zero: how many.
        first_tensor_name: the tensor of one of them.
    """

    def __init__(self) -> None:
        self.num_infinite = self.num_zero = 0
        self.first_tensor_name = ""
        self._lock = threading.Lock()

    def add_losses(self, name: str, before: Array, after: Array) -> None:
        """Compare a block with its cast."""
        counts_after, counts_before = _count_infinite_and_nonzero(after), _count_infinite_and_nonzero(before)
        infinite = counts_after.infinite - counts_before.infinite
        zero = counts_before.nonzero - counts_after.nonzero
        if infinite or zero:
            with self._lock:
                self.num_infinite, self.num_zero = self.num_infinite + infinite, self.num_zero + zero
                self.first_tensor_name = self.first_tensor_name or name


class _ElementCounts(NamedTuple):
    """Numbers of elements of a block."""

    infinite: int
    nonzero: int


def _count_infinite_and_nonzero(block: Array) -> _ElementCounts:
    """How many elements are infinite, and how many are not 0."""
    if block.dtype.itemsize > 2:
        return _ElementCounts(int(np.count_nonzero(np.isinf(block))), int(np.count_nonzero(block)))
    # As integers without the sign: of the two 16-bit floats, numpy and ml_dtypes are slow.
    bits = block.view(np.uint16) << 1
    infinity = 0xFF00 if block.dtype == to_numpy_dtype("BF16") else 0xF800
    return _ElementCounts(int(np.count_nonzero(bits == infinity)), int(np.count_nonzero(bits)))


def iter_cast_blocks(
    tensor: Tensor,
    dtype: str,
    unverified_spans: UnverifiedSpans,
    block_bytes: int = BLOCK_BYTES,
    *,
    losses: CastLosses | None = None,
) -> Iterator[Array]:
    """The flattened elements as `dtype`, in blocks, each valid until the next; `losses` counts."""
    for block in tensor.iter_blocks(block_bytes, unverified_spans):
        if tensor.dtype == dtype:
            yield block
            continue
        converted = round_to_dtype(block, dtype)
        if losses is not None:
            losses.add_losses(tensor.name, block, converted)
        yield converted


def round_to_dtype(block: Array, dtype: str) -> Array:
    """The elements as `dtype`; `block` itself where it has that dtype."""
    if block.dtype == to_numpy_dtype(dtype):
        return block
    with np.errstate(all="ignore"):  # out of range becomes infinity
        if block.dtype == np.float64 and dtype == "BF16":
            block = _round_to_odd_float32(block)
        return block.astype(to_numpy_dtype(dtype))


def _round_to_odd_float32(block: Array) -> Array:
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
