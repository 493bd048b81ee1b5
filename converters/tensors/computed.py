"""A tensor that is computed from another one, block by block, while it is read.

The arithmetic is float32 (float64 for a float64 tensor), and each element is rounded once, at the end. Memory
holds a few rows at a time, whatever the size of the tensor.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from converters.tensors.casting import round_into, rounded
from converters.tensors.dtypes import itemsize, numpy_dtype
from converters.tensors.tensor import Box, Tensor, View, row_major

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.storage.bytes import Touched
    from converters.tensors.tensor import Array

# Elements of a block: its float32 copy and the product that is added to it fit a core's cache.
_BLOCK = 1 << 18


class Edit(Protocol):
    """One change of a tensor's rows."""

    def prepare(self, before: Callable[[Callable[[Array, int], None]], None]) -> None:
        """Called once, before any `apply`.

        Args:
            before: calls its argument with every block of the tensor as it is before this change, and with
                the number of the block's first row.
        """
        ...

    def apply(self, block: Array, first: int) -> None:
        """Change the rows [first, first + len(block)) in place; a 2-D float32 or float64 array."""
        ...


class Affine:
    """Each element times `factor`, or divided by `divisor`, plus `term`, in float32."""

    def __init__(self, factor: float = 1.0, divisor: float = 1.0, term: float = 0.0) -> None:
        self.factor, self.divisor, self.term = np.float32(factor), np.float32(divisor), np.float32(term)

    def prepare(self, before: Callable[[Callable[[Array, int], None]], None]) -> None:
        """Nothing: each element depends on itself alone."""

    def apply(self, block: Array, first: int) -> None:
        if self.factor != 1:
            block *= self.factor
        if self.divisor != 1:
            block /= self.divisor
        if self.term:
            block += self.term


class _Rows:
    """The rows of a tensor, edited; a byte source of the edited tensor in its new dtype."""

    def __init__(self, tensor: Tensor, dtype: str, lead: int, edits: Sequence[Edit]) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self.lead = tensor.shape[:lead]
        self.inner = tensor.shape[lead:]
        self.rows, self.columns = prod(self.lead), prod(self.inner)
        self.edits = edits
        self.nbytes = tensor.numel * itemsize(dtype)
        self._kind: Any = np.float64 if tensor.dtype == "F64" else np.float32
        self._memory = threading.local()
        self._prepared = False
        self._lock = threading.Lock()

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        if not buffer:
            return
        self._prepare(touched)
        row = self.columns * itemsize(self.dtype)
        out = np.frombuffer(buffer, np.uint8)
        stop, done = at + len(buffer), 0
        step = max(1, _BLOCK // self.columns)
        for first in range(at // row, (stop - 1) // row + 1, step):
            count = min(step, (stop - 1) // row + 1 - first)
            block = self._block(first, count, touched, self.edits)
            low, high = max(at, first * row), min(stop, (first + count) * row)
            part = out[done : done + high - low]
            if high - low == count * row:
                round_into(part.view(numpy_dtype(self.dtype)).reshape(block.shape), block, self.dtype)
            else:
                data = rounded(block, self.dtype).reshape(-1).view(np.uint8)
                part[...] = data[low - first * row : high - first * row]
            done += high - low

    def _prepare(self, touched: Touched) -> None:
        with self._lock:
            if self._prepared:
                return
            for i, edit in enumerate(self.edits):

                def before(see: Callable[[Array, int], None], i: int = i) -> None:
                    step = max(1, _BLOCK // self.columns)
                    for first in range(0, self.rows, step):
                        count = min(step, self.rows - first)
                        see(self._block(first, count, touched, self.edits[:i]), first)

                edit.prepare(before)
            self._prepared = True

    def _block(self, first: int, count: int, touched: Touched, edits: Sequence[Edit]) -> Array:
        """The rows [first, first + count) after `edits`; valid until this thread makes the next block."""
        stored = self._scratch("stored", (count, *self.inner), numpy_dtype(self.tensor.dtype))
        if len(self.lead) < 2:
            lows = (first,) * len(self.lead) + (0,) * len(self.inner)
            self.tensor.fill(stored.reshape(stored.shape if self.lead else self.inner), lows, touched)
        else:
            done = 0
            while done < count:  # up to the end of each matrix of the stack
                matrix, row = divmod(first + done, self.lead[-1])
                run = min(count - done, self.lead[-1] - row)
                above = np.unravel_index(matrix, self.lead[:-1])
                lows = (*(int(n) for n in above), row, *[0] * len(self.inner))
                part = stored[done : done + run].reshape(*[1] * len(above), run, *self.inner)
                self.tensor.fill(part, lows, touched)
                done += run
        block = self._scratch("block", (count, self.columns), np.dtype(self._kind))
        block[...] = stored.reshape(count, self.columns)
        for edit in edits:
            edit.apply(block, first)
        return block

    def _scratch(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """This thread's memory, of any content. New memory would be faulted in page by page."""
        nbytes = prod(shape) * dtype.itemsize
        held: Array | None = getattr(self._memory, name, None)
        if held is None or held.nbytes < nbytes:
            held = np.empty(nbytes, np.uint8)
            setattr(self._memory, name, held)
        found: Array = held[:nbytes].view(dtype).reshape(shape)
        return found


class _Zeros:
    """A byte source of zeros, for rows that an edit fills."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        buffer[:] = bytes(len(buffer))


def grown(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with rows of zeros after its own, `rows` in all, for edits to fill."""
    old, *inner = tensor.shape
    added, width = (rows - old, *inner), itemsize(tensor.dtype)
    view = View(_Zeros(prod(added) * width), 0, row_major(added, width))
    box = Box((old, *(0 for _ in inner)), added, view)
    return Tensor(tensor.name, tensor.dtype, (rows, *inner), [*tensor.boxes, box])


def computed(tensor: Tensor, dtype: str, lead: int, edits: Sequence[Edit]) -> Tensor:
    """`tensor` with `edits` applied, as `dtype`; nothing is read or computed before it is.

    Args:
        tensor: of a floating-point dtype.
        lead: how many of its dimensions are rows; the others make up a row.
    """

    def view() -> View:
        source = _Rows(tensor, dtype, lead, edits)
        return View(source, 0, row_major(tensor.shape, itemsize(dtype)))

    return Tensor(tensor.name, dtype, tensor.shape, [Box((0,) * len(tensor.shape), tensor.shape, view)])
