"""Tensors of matrices whose rows are computed when they are read, a few at a time."""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Protocol

from portable.converters.errors import CheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.dtypes import get_itemsize, map_numpy_dtypes, to_numpy_dtype
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import Touched
    from portable.converters.tensors.tensor import Array, Shape

BLOCK = 1 << 16
"""Elements that are computed at once."""


class RowFunction(Protocol):
    def __call__(self, matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        """The rows [first, first + count) of one matrix of a stack, as float32, float64 or the tensor's."""
        ...


class Fill(Protocol):
    def __call__(self, out: Array, matrix: Shape, first: int, touched: Touched) -> None:
        """Write rows of one matrix of a stack, from `first` on, into `out`, which has the tensor's dtype."""
        ...


_last = threading.local()


class ComputedRows:
    """The row-major bytes of matrices whose rows are computed; each thread keeps the last block of them all.

    Args:
        fill: computes rows; `make_fill` makes one.
        align: rows are made from multiples of this on.
        elements: how many are made at once, where `align` rows have no more.
    """

    def __init__(self, shape: Shape, dtype: str, fill: Fill, align: int, elements: int) -> None:
        self.lead, self.rows, self.columns = shape[:-2], shape[-2], shape[-1]
        self.dtype = dtype
        self.nbytes = prod(shape) * get_itemsize(dtype)
        self._fill = fill
        self._step = max(1, elements // max(1, self.columns) // align) * align

    def read_into(self, buffer: memoryview, offset: int, touched: Touched) -> None:
        out, done = np.frombuffer(buffer, np.uint8), 0
        row = self.columns * get_itemsize(self.dtype)
        while done < out.size:
            index, start = divmod(offset + done, row)
            matrix, inside = divmod(index, self.rows)
            number, skipped = divmod(inside, self._step)
            block_bytes = min(self._step, self.rows - number * self._step) * row
            if not (skipped or start) and out.size - done >= block_bytes:
                self._compute(matrix, number, out[done : done + block_bytes], touched)
                done += block_bytes
                continue
            block = self._get_block(matrix, number, block_bytes, touched)[skipped * row + start :]
            part = block[: out.size - done]
            out[done : done + part.size] = part
            done += part.size

    def _get_block(self, matrix: int, number: int, nbytes: int, touched: Touched) -> Array:
        """The bytes of a block, of which a part is wanted: the rest comes next."""
        if getattr(_last, "key", None) != (self, matrix, number):
            _last.key = _last.block = None  # or two would be in memory
            block = np.empty(nbytes, np.uint8)
            self._compute(matrix, number, block, touched)
            _last.key, _last.block = (self, matrix, number), block
        cached: Array = _last.block
        return cached

    def _compute(self, matrix: int, number: int, out: Array, touched: Touched) -> None:
        place = tuple(int(n) for n in np.unravel_index(matrix, self.lead)) if self.lead else ()
        with np.errstate(all="ignore"):
            rows = out.view(to_numpy_dtype(self.dtype)).reshape(-1, self.columns)
            self._fill(rows, place, number * self._step, touched)


def make_fill(rows: RowFunction) -> Fill:
    """Writes what `rows` computes."""

    def fill_rows(out: Array, matrix: Shape, first: int, touched: Touched) -> None:
        values = rows(matrix, first, len(out), touched).reshape(out.shape)
        out[...] = (
            round_to_dtype(values, map_numpy_dtypes()[out.dtype]) if values.dtype == np.float64 else values
        )

    return fill_rows


def build_computed_tensor(
    name: str,
    dtype: str,
    shape: Shape,
    rows: RowFunction,
    *,
    align: int = 1,
    elements: int = BLOCK,
    computed_shape: Shape | None = None,
) -> Tensor:
    """A tensor of `ComputedRows`, which are those of the shape `computed_shape` where that is another."""
    source = ComputedRows(computed_shape or shape, dtype, make_fill(rows), align, elements)
    return Tensor.from_source(name, dtype, shape, source)


def read_region(tensor: Tensor, lows: Shape, sizes: Shape, touched: Touched) -> Array:
    """The elements from `lows` on; CheckpointError where the tensor has none there."""
    inside = len(lows) == len(tensor.shape) and all(
        low + size <= length for low, size, length in zip(lows, sizes, tensor.shape, strict=True)
    )
    require_tensor(inside, tensor, "is too small for what it belongs to")
    values = np.empty(sizes, to_numpy_dtype(tensor.dtype))
    tensor.fill(values, lows, touched)
    return values


def read_rows(tensor: Tensor, matrix: Shape, first: int, count: int, touched: Touched) -> Array:
    """The rows [first, first + count) of one matrix of a stack."""
    sizes = (*(1 for _ in matrix), count, tensor.shape[-1])
    return read_region(tensor, (*matrix, first, 0), sizes, touched).reshape(sizes[-2:])


def require_tensor(fits: bool, tensor: Tensor, why: str) -> None:
    """Refuse a tensor."""
    if not fits:
        raise CheckpointError(f"{tensor.name}: {tensor.dtype} of shape {list(tensor.shape)} {why}")
