"""Tensors of matrices whose rows are computed when they are read, a few at a time."""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from converters.errors import CheckpointError
from converters.tensors.casting import rounded
from converters.tensors.dtypes import itemsize, numpy_dtype
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from converters.storage.bytes import Touched
    from converters.tensors.tensor import Array, Shape

BLOCK = 1 << 16
"""Elements that are computed at once."""


class Rows(Protocol):
    def __call__(self, matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        """The rows [first, first + count) of one matrix of a stack, in float32 or in the tensor's dtype."""
        ...


_last = threading.local()


class ComputedRows:
    """The row-major bytes of matrices whose rows are computed; each thread keeps the last block of them all.

    Args:
        align: rows are made from multiples of this on.
        elements: how many are made at once, where `align` rows have no more.
    """

    def __init__(self, shape: Shape, dtype: str, rows: Rows, align: int, elements: int) -> None:
        self.lead, self.rows, self.columns = shape[:-2], shape[-2], shape[-1]
        self.dtype = dtype
        self.nbytes = prod(shape) * itemsize(dtype)
        self._make = rows
        self._step = max(1, elements // max(1, self.columns) // align) * align

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        out, done = np.frombuffer(buffer, np.uint8), 0
        row = self.columns * itemsize(self.dtype)
        while done < out.size:
            index, start = divmod(at + done, row)
            matrix, inside = divmod(index, self.rows)
            number, skipped = divmod(inside, self._step)
            block = self._block(matrix, number, touched)[skipped * row + start :]
            part = block[: out.size - done]
            out[done : done + part.size] = part
            done += part.size

    def _block(self, matrix: int, number: int, touched: Touched) -> Array:
        if getattr(_last, "key", None) != (self, matrix, number):
            _last.key = _last.block = None  # or two would be in memory
            first = number * self._step
            place = tuple(int(n) for n in np.unravel_index(matrix, self.lead)) if self.lead else ()
            with np.errstate(all="ignore"):
                made = self._make(place, first, min(self._step, self.rows - first), touched)
            _last.block = rounded(np.ascontiguousarray(made), self.dtype).view(np.uint8).reshape(-1)
            _last.key = self, matrix, number
        block: Array = _last.block
        return block


def tensor_of(
    name: str, dtype: str, shape: Shape, rows: Rows, *, align: int = 1, elements: int | None = None
) -> Tensor:
    """A tensor of `ComputedRows`."""
    return Tensor.contiguous(name, dtype, shape, ComputedRows(shape, dtype, rows, align, elements or BLOCK))


def part_of(tensor: Tensor, lows: Shape, sizes: Shape, touched: Touched) -> Array:
    """The elements from `lows` on; CheckpointError where the tensor has none there."""
    inside = len(lows) == len(tensor.shape) and all(
        low + size <= length for low, size, length in zip(lows, sizes, tensor.shape, strict=True)
    )
    require(inside, tensor, "is too small for what it belongs to")
    found = np.empty(sizes, numpy_dtype(tensor.dtype))
    tensor.fill(found, lows, touched)
    return found


def rows_of(tensor: Tensor, matrix: Shape, first: int, count: int, touched: Touched) -> Array:
    """The rows [first, first + count) of one matrix of a stack."""
    sizes = (*(1 for _ in matrix), count, tensor.shape[-1])
    return part_of(tensor, (*matrix, first, 0), sizes, touched).reshape(sizes[-2:])


def require(fits: bool, tensor: Tensor, why: str) -> None:
    """Refuse a tensor."""
    if not fits:
        raise CheckpointError(f"{tensor.name}: {tensor.dtype} of shape {list(tensor.shape)} {why}")
