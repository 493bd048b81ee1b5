"""Compute tensors by editing the rows of other tensors, block by block, while they are read.

The arithmetic uses float32, or float64 for float64 tensors, and each element is rounded once at the
end. Only a few rows are in memory at a time, regardless of the tensor size.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors.computed_rows import ComputedRowSource, make_fill_function
from portable.converters.tensors.dtypes import get_itemsize, to_numpy_dtype
from portable.converters.tensors.tensor import Box, Tensor, View, compute_row_major_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Shape

# Number of elements of a block. Its float32 copy and a product that is added to it fit in the cache of a
# core.
_BLOCK = 1 << 17


class RowEdit(Protocol):
    """Edit that changes rows of a tensor in place, one block of rows at a time."""

    def apply(self, block: Array, first_row: int) -> None:
        """Apply the edit to a block of rows, in place.

        Args:
            block: Rows as a 2-D array of float32 or float64.
            first_row: Index of the first row of the block in the tensor.
        """
        ...


class AffineEdit:
    """Edit that multiplies by `factor`, divides by `divisor`, and then adds `term`, in float32."""

    def __init__(self, factor: float = 1.0, divisor: float = 1.0, term: float = 0.0) -> None:
        self.factor, self.divisor, self.term = np.float32(factor), np.float32(divisor), np.float32(term)

    def apply(self, block: Array, first_row: int) -> None:
        """Multiply rows by `factor`, divide by `divisor` and add `term`, in place.

        All rows change in the same way, so `first_row` is not used.
        """
        if self.factor != 1:
            block *= self.factor
        if self.divisor != 1:
            block /= self.divisor
        if self.term:
            block += self.term


class _EditedRows:
    """`RowFunction` that reads rows from a tensor and applies edits to them."""

    def __init__(self, tensor: Tensor, num_row_dims: int, edits: Sequence[RowEdit]) -> None:
        self.tensor = tensor
        self.edits = edits
        self.row_shape: Shape = tensor.shape[:num_row_dims] or (1,)
        self.columns = prod(tensor.shape[num_row_dims:])
        self._kind: Any = np.float64 if tensor.dtype == "F64" else np.float32
        # Search for it once, because a search for each block is slow.
        self._contiguous_source = tensor.find_run()
        self._memory = threading.local()

    def __call__(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Read rows of the tensor and apply the edits to them. See `RowFunction`.

        The returned array is valid until the next call in the same thread, which overwrites it.
        """
        above = int(np.ravel_multi_index(matrix_index, self.row_shape[:-1])) if matrix_index else 0
        first_row += above * self.row_shape[-1]
        stored = self._get_scratch("stored", (num_rows, self.columns), to_numpy_dtype(self.tensor.dtype))
        if self._contiguous_source is None:
            self.tensor.fill_flat(stored.reshape(-1), first_row * self.columns, unverified_spans)
        else:
            self._contiguous_source.read_into(
                stored.view(np.uint8).reshape(-1).data, first_row * stored.strides[0], unverified_spans
            )
        block = self._get_scratch("block", (num_rows, self.columns), np.dtype(self._kind))
        block[...] = stored
        for edit in self.edits:
            edit.apply(block, first_row)
        return block

    def _get_scratch(self, name: str, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array in a buffer that this thread reuses.

        Reusing memory is faster than mapping new memory.

        Args:
            name: Name of the buffer. Each thread has one buffer per name.
            shape: Shape of the array.
            dtype: Dtype of the array.
        """
        nbytes = prod(shape) * dtype.itemsize
        buffer: Array | None = getattr(self._memory, name, None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = np.empty(nbytes, np.uint8)
            setattr(self._memory, name, buffer)
        scratch: Array = buffer[:nbytes].view(dtype).reshape(shape)
        return scratch


def append_zero_rows(tensor: Tensor, total_rows: int) -> Tensor:
    """Append rows of zeros to a tensor. No data is copied.

    The new rows can be filled later by editing the result with `apply_edits`.

    Args:
        tensor: Tensor to extend.
        total_rows: Number of rows of the result.

    Returns:
        A new lazy tensor.
    """
    old, *inner = tensor.shape
    added = (total_rows - old, *inner)
    # One element, which is repeated by strides of 0.
    view = View(InMemorySource(bytes(get_itemsize(tensor.dtype))), 0, (0,) * len(added))
    box = Box((old, *(0 for _ in inner)), added, view)
    return Tensor(tensor.name, tensor.dtype, (total_rows, *inner), [*tensor.boxes, box])


def apply_edits(tensor: Tensor, dtype: str, num_row_dims: int, edits: Sequence[RowEdit]) -> Tensor:
    """Return a lazy tensor that applies edits to the rows of another tensor while they are read.

    Args:
        tensor: Tensor with a floating-point dtype.
        dtype: Safetensors dtype of the result.
        num_row_dims: Number of leading dimensions that count as rows. The other dimensions form the
            columns.
        edits: Edits to apply, in order.
    """

    def build_view() -> View:
        rows = _EditedRows(tensor, num_row_dims, edits)
        source = ComputedRowSource(
            (*rows.row_shape, rows.columns), dtype, make_fill_function(rows), 1, _BLOCK
        )
        return View(source, 0, compute_row_major_strides(tensor.shape, get_itemsize(dtype)))

    return Tensor(tensor.name, dtype, tensor.shape, [Box((0,) * len(tensor.shape), tensor.shape, build_view)])
