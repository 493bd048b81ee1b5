"""Compute the rows of tensors when they are read, a few rows at a time.

The functions that compute rows work on matrices. A tensor with more dimensions is treated as a
stack of matrices.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Protocol

from portable.converters.errors import CheckpointError, DamagedCheckpointError, UnsupportedQuantizationError
from portable.converters.lazy_numpy import np
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.dtypes import get_itemsize, get_numpy_dtype_names, to_numpy_dtype
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Shape

BLOCK_ELEMENTS = 1 << 16
"""Default number of elements to compute at once."""


class RowFunction(Protocol):
    """Function that computes rows of one matrix in a stack of matrices."""

    def __call__(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Compute rows of one matrix in a stack.

        Args:
            matrix_index: Index of the matrix along the leading dimensions of the tensor.
            first_row: Index of the first row.
            num_rows: Number of rows.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.

        Returns:
            Array of shape `[num_rows, columns]` in float32, float64, or the tensor's dtype.
        """
        ...


class FillFunction(Protocol):
    """Function that computes rows of a matrix and writes them into an array."""

    def __call__(
        self, out: Array, matrix_index: Shape, first_row: int, unverified_spans: UnverifiedSpans
    ) -> None:
        """Write rows of one matrix in a stack into an array.

        Args:
            out: Array of shape `[rows, columns]` with the tensor's dtype. Its length is the number of rows
                to write.
            matrix_index: Index of the matrix along the leading dimensions of the tensor.
            first_row: Index of the first row.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
        """
        ...


_last = threading.local()


class ComputedRowSource:
    """Byte source whose rows are computed on demand, in row-major order.

    A block of rows that a read requests completely is written directly to the buffer of the read.
    If a read requests only a part of a block, the complete block is computed and cached. Each
    thread has one cache, which all sources share and which holds at most one block.

    Args:
        shape: Shape of the tensor, with at least two dimensions.
        dtype: Safetensors dtype of the tensor.
        fill: Function that computes rows. `make_fill_function` creates one from a `RowFunction`.
        row_alignment: Number of rows to which blocks are aligned. Each block begins at a row index
            that is a multiple of this number.
        block_elements: Maximum number of elements to compute at once. A block has at least
            `row_alignment` rows, even if these rows have more elements.
    """

    def __init__(
        self, shape: Shape, dtype: str, fill: FillFunction, row_alignment: int, block_elements: int
    ) -> None:
        self.leading_shape, self.rows, self.columns = shape[:-2], shape[-2], shape[-1]
        self.dtype = dtype
        self.nbytes = prod(shape) * get_itemsize(dtype)
        self._fill = fill
        self._rows_per_block = max(1, block_elements // max(1, self.columns) // row_alignment) * row_alignment

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Compute the requested bytes and write them to a buffer. See `ByteSource.read_into`."""
        out, done = np.frombuffer(buffer, np.uint8), 0
        row = self.columns * get_itemsize(self.dtype)
        while done < out.size:
            index, start = divmod(offset + done, row)
            matrix, inside = divmod(index, self.rows)
            number, skipped = divmod(inside, self._rows_per_block)
            block_bytes = min(self._rows_per_block, self.rows - number * self._rows_per_block) * row
            if not (skipped or start) and out.size - done >= block_bytes:
                self._compute_block(matrix, number, out[done : done + block_bytes], unverified_spans)
                done += block_bytes
                continue
            block = self._get_block(matrix, number, block_bytes, unverified_spans)[skipped * row + start :]
            part = block[: out.size - done]
            out[done : done + part.size] = part
            done += part.size

    def _get_block(self, matrix: int, number: int, nbytes: int, unverified_spans: UnverifiedSpans) -> Array:
        """Return the bytes of a block of rows from this thread's cache, or compute and cache them.

        Blocks are cached because the next read usually requests the remaining bytes of the same
        block.

        Args:
            matrix: Index of the matrix in the tensor, which is treated as a stack of matrices.
            number: Index of the block in the matrix.
            nbytes: Size of the block in bytes.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
        """
        if getattr(_last, "key", None) != (self, matrix, number):
            # Free the old block first, because otherwise two blocks would be in memory.
            _last.key = _last.block = None
            block = np.empty(nbytes, np.uint8)
            self._compute_block(matrix, number, block, unverified_spans)
            _last.key, _last.block = (self, matrix, number), block
        cached: Array = _last.block
        return cached

    def _compute_block(self, matrix: int, number: int, out: Array, unverified_spans: UnverifiedSpans) -> None:
        """Compute a block of rows of one matrix, and write it to a buffer.

        Args:
            matrix: Index of the matrix in the tensor, which is treated as a stack of matrices.
            number: Index of the block in the matrix.
            out: Array of bytes that receives the rows. It has the size of the block.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
        """
        matrix_index = (
            tuple(int(n) for n in np.unravel_index(matrix, self.leading_shape)) if self.leading_shape else ()
        )
        with np.errstate(all="ignore"):
            rows = out.view(to_numpy_dtype(self.dtype)).reshape(-1, self.columns)
            self._fill(rows, matrix_index, number * self._rows_per_block, unverified_spans)


def make_fill_function(compute_rows: RowFunction) -> FillFunction:
    """Convert a `RowFunction` to a function that writes the rows into an array.

    The rows are rounded to the dtype of the array.
    """

    def fill_rows(out: Array, matrix_index: Shape, first_row: int, unverified_spans: UnverifiedSpans) -> None:
        values = compute_rows(matrix_index, first_row, len(out), unverified_spans).reshape(out.shape)
        out[...] = (
            round_to_dtype(values, get_numpy_dtype_names()[out.dtype])
            if values.dtype == np.float64
            else values
        )

    return fill_rows


def build_computed_tensor(
    name: str,
    dtype: str,
    shape: Shape,
    compute_rows: RowFunction,
    *,
    row_alignment: int = 1,
    block_elements: int = BLOCK_ELEMENTS,
    computed_shape: Shape | None = None,
) -> Tensor:
    """Build a tensor whose rows are computed when they are read.

    Args:
        name: Name of the tensor.
        dtype: Safetensors dtype of the tensor.
        shape: Shape of the tensor.
        compute_rows: Function that computes rows.
        row_alignment: See `ComputedRowSource`.
        block_elements: See `ComputedRowSource`.
        computed_shape: Shape for which `compute_rows` computes rows, if it differs from `shape`. Both
            shapes have the same elements in row-major order.
    """
    source = ComputedRowSource(
        computed_shape or shape, dtype, make_fill_function(compute_rows), row_alignment, block_elements
    )
    return Tensor.from_source(name, dtype, shape, source)


def read_region(tensor: Tensor, starts: Shape, sizes: Shape, unverified_spans: UnverifiedSpans) -> Array:
    """Read a region of a tensor without verifying the stored CRCs.

    Args:
        tensor: Tensor to read.
        starts: Start index of the region along each dimension.
        sizes: Size of the region along each dimension.
        unverified_spans: Set that collects the file spans whose CRC has not been verified yet.

    Returns:
        A new array of shape `sizes` with the tensor's dtype.

    Raises:
        CheckpointError: If the region extends beyond the tensor.
    """
    inside = len(starts) == len(tensor.shape) and all(
        low + size <= length for low, size, length in zip(starts, sizes, tensor.shape, strict=True)
    )
    check_tensor(inside, tensor, "is smaller than its quantized weight requires", DamagedCheckpointError)
    values = np.empty(sizes, to_numpy_dtype(tensor.dtype))
    tensor.fill(values, starts, unverified_spans)
    return values


def read_rows(
    tensor: Tensor, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
) -> Array:
    """Read rows of one matrix in a stack as a 2-D array with the tensor's dtype.

    See `RowFunction` for the arguments.
    """
    sizes = (*(1 for _ in matrix_index), num_rows, tensor.shape[-1])
    return read_region(tensor, (*matrix_index, first_row, 0), sizes, unverified_spans).reshape(sizes[-2:])


def check_tensor(
    fits: bool,
    tensor: Tensor,
    problem: str,
    error: type[CheckpointError] = UnsupportedQuantizationError,
) -> None:
    """Raise an error about a tensor if a condition is false.

    Args:
        fits: Condition that must be true.
        tensor: Tensor that the error describes.
        problem: Problem as a verb phrase whose subject is the tensor, such as `"is not a matrix"`.
        error: Class of the exception. It may add a remedy to the message.

    Raises:
        CheckpointError: If `fits` is false.
    """
    if not fits:
        raise error(f"{tensor.name}: the {tensor.dtype} tensor of shape {list(tensor.shape)} {problem}")
