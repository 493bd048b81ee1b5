"""Tensors of matrices whose rows are computed when they are read, a few at a time."""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Protocol

from portable.converters.errors import CheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.dtypes import get_itemsize, get_numpy_dtype_names, to_numpy_dtype
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Shape

BLOCK_ELEMENTS = 1 << 16
"""Elements that are computed at once."""


class RowFunction(Protocol):
    def __call__(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """The rows [first, first + count) of one matrix of a stack, as float32, float64 or the tensor's."""
        ...


class FillFunction(Protocol):
    def __call__(
        self, out: Array, matrix_index: Shape, first_row: int, unverified_spans: UnverifiedSpans
    ) -> None:
        """Write rows of one matrix of a stack, from `first_row` on, into `out`, which has the tensor's dtype."""
        ...


_last = threading.local()


class ComputedRowSource:
    """The row-major bytes of matrices whose rows are computed; each thread keeps the last block of them all.

    Args:
        fill: computes rows; `make_fill_function` makes one.
        row_alignment: rows are made from multiples of this on.
        block_elements: how many are made at once, where `align` rows have no more.
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
        """The bytes of a block, of which a part is wanted: the rest comes next."""
        if getattr(_last, "key", None) != (self, matrix, number):
            _last.key = _last.block = None  # or two would be in memory
            block = np.empty(nbytes, np.uint8)
            self._compute_block(matrix, number, block, unverified_spans)
            _last.key, _last.block = (self, matrix, number), block
        cached: Array = _last.block
        return cached

    def _compute_block(self, matrix: int, number: int, out: Array, unverified_spans: UnverifiedSpans) -> None:
        matrix_index = (
            tuple(int(n) for n in np.unravel_index(matrix, self.leading_shape)) if self.leading_shape else ()
        )
        with np.errstate(all="ignore"):
            rows = out.view(to_numpy_dtype(self.dtype)).reshape(-1, self.columns)
            self._fill(rows, matrix_index, number * self._rows_per_block, unverified_spans)


def make_fill_function(compute_rows: RowFunction) -> FillFunction:
    """Writes what `compute_rows` computes."""

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
    """A tensor of `ComputedRowSource`, which are those of the shape `computed_shape` where that is another."""
    source = ComputedRowSource(
        computed_shape or shape, dtype, make_fill_function(compute_rows), row_alignment, block_elements
    )
    return Tensor.from_source(name, dtype, shape, source)


def read_region(tensor: Tensor, starts: Shape, sizes: Shape, unverified_spans: UnverifiedSpans) -> Array:
    """The elements from `starts` on; CheckpointError where the tensor has none there."""
    inside = len(starts) == len(tensor.shape) and all(
        low + size <= length for low, size, length in zip(starts, sizes, tensor.shape, strict=True)
    )
    check_tensor(inside, tensor, "is too small for what it belongs to")
    values = np.empty(sizes, to_numpy_dtype(tensor.dtype))
    tensor.fill(values, starts, unverified_spans)
    return values


def read_rows(
    tensor: Tensor, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
) -> Array:
    """The rows [first, first + count) of one matrix of a stack."""
    sizes = (*(1 for _ in matrix_index), num_rows, tensor.shape[-1])
    return read_region(tensor, (*matrix_index, first_row, 0), sizes, unverified_spans).reshape(sizes[-2:])


def check_tensor(fits: bool, tensor: Tensor, problem: str) -> None:
    """Refuse a tensor."""
    if not fits:
        raise CheckpointError(f"{tensor.name}: {tensor.dtype} of shape {list(tensor.shape)} {problem}")
