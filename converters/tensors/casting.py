"""Cast tensors between floating-point dtypes, block by block.

Values are rounded to nearest, with ties to even. NaN stays NaN.
"""

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

# Block size in bytes of the source dtype. Each thread of a conversion holds one block and its cast copy, and
# both fit in the cache of a core. With smaller blocks, threads would wait for the interpreter's lock between
# blocks.
BLOCK_BYTES = 512 << 10


def parse_target_dtype(name: str, *, allow_ggml: bool = False) -> str | None:
    """Parse the value of `--dtype`.

    Args:
        name: Name of a dtype, or `"keep"`.
        allow_ggml: Whether to accept ggml block formats, which only a conversion to GGUF can write.

    Returns:
        The safetensors dtype or the ggml format, or None to keep the dtypes.

    Raises:
        CheckpointError: If the name is unknown.
        CommandError: If the name is a ggml block format, but `allow_ggml` is False.
    """
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is unknown; specify one of {', '.join(DTYPES)}")
    if DTYPES[name] not in (None, *SUPPORTED_DTYPES) and not allow_ggml:
        raise CommandError(f"--dtype {name}: is only supported with --to gguf; add --to gguf")
    return DTYPES[name]


def select_written_dtype(tensor: Tensor, target: str | None) -> str:
    """Return the dtype to which a tensor is cast for writing.

    Args:
        tensor: Tensor to write.
        target: Requested dtype, or None to keep the dtype.

    Returns:
        `target`, or the tensor's dtype if `target` is None or the tensor is never cast. Integers,
        booleans, 8-bit floats, and 0-D tensors are never cast.
    """
    if target is None or tensor.dtype not in CASTABLE_DTYPES or not tensor.shape:
        return tensor.dtype
    return target


class CastLosses:
    """Thread-safe counters of elements that became infinite or zero in a cast.

    Attributes:
        num_infinite: Number of elements that became infinite.
        num_zero: Number of elements that became zero.
        first_tensor_name: Name of the first tensor that contains such an element. Empty if there is
            none.
    """

    def __init__(self) -> None:
        self.num_infinite = self.num_zero = 0
        self.first_tensor_name = ""
        self._lock = threading.Lock()

    def add_losses(self, name: str, before: Array, after: Array) -> None:
        """Add the elements of a block that became infinite or zero in a cast to the totals.

        Args:
            name: Name of the tensor. It is stored if this is the first tensor with such elements.
            before: Block before the cast.
            after: Block after the cast.
        """
        counts_after, counts_before = _count_infinite_and_nonzero(after), _count_infinite_and_nonzero(before)
        infinite = counts_after.infinite - counts_before.infinite
        zero = counts_before.nonzero - counts_after.nonzero
        if infinite or zero:
            with self._lock:
                self.num_infinite, self.num_zero = self.num_infinite + infinite, self.num_zero + zero
                self.first_tensor_name = self.first_tensor_name or name


class _ElementCounts(NamedTuple):
    """Number of infinite elements and number of nonzero elements in a block."""

    infinite: int
    nonzero: int


def _count_infinite_and_nonzero(block: Array) -> _ElementCounts:
    """Count the infinite elements and the nonzero elements of a block."""
    if block.dtype.itemsize > 2:
        return _ElementCounts(int(np.count_nonzero(np.isinf(block))), int(np.count_nonzero(block)))
    # Compare the 16-bit floats as integers without the sign, because NumPy and ml_dtypes are slow for these
    # dtypes.
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
    """Cast a tensor to a dtype, and iterate over its elements in row-major order as 1-D blocks.

    Args:
        tensor: Tensor to read.
        dtype: Safetensors dtype of the blocks.
        unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
        block_bytes: Maximum block size in bytes before the cast.
        losses: Counters of the elements that the cast makes infinite or zero. Updated in place.
            None to disable counting.

    Yields:
        1-D arrays. Each block is valid only until the next block is requested.
    """
    for block in tensor.iter_blocks(block_bytes, unverified_spans):
        if tensor.dtype == dtype:
            yield block
            continue
        converted = round_to_dtype(block, dtype)
        if losses is not None:
            losses.add_losses(tensor.name, block, converted)
        yield converted


def round_to_dtype(block: Array, dtype: str) -> Array:
    """Cast an array to a safetensors dtype. Out-of-range values become infinite.

    Returns:
        A new array, or `block` itself if it already has the dtype.
    """
    if block.dtype == to_numpy_dtype(dtype):
        return block
    with np.errstate(all="ignore"):  # Values out of range become infinite without a warning.
        if block.dtype == np.float64 and dtype == "BF16":
            block = _round_to_odd_float32(block)
        return block.astype(to_numpy_dtype(dtype))


def _round_to_odd_float32(block: Array) -> Array:
    """Cast float64 to float32 with rounding to odd, so that a second rounding to bfloat16 is correct.

    ml_dtypes casts float64 to bfloat16 through float32, so it rounds twice. The first rounding can
    create a tie: for example, it rounds 1 + 2**-8 + 2**-40 to 1 + 2**-8. Rounding to odd never creates
    ties, because it rounds toward zero and sets the last bit if the value is inexact.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    near = block.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= np.abs(back) > np.abs(block)
    bits |= (back != block) & ~np.isnan(block)
    return near
