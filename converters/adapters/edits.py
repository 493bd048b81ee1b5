"""What an adapter does to the rows of a weight, in numpy.

A weight is seen as a matrix of rows. A stack of experts is the rows of all its matrices; a convolution has
one row for each output channel.

Source: peft/tuners/lora/layer.py (`get_delta_weight`), peft/tuners/lora/variants.py (DoRA's merging),
peft/tuners/ia3/layer.py, peft/tuners/trainable_tokens/layer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from threading import Lock, local
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.lazy_numpy import np

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.converters.tensors.edited_rows import Edit
    from portable.converters.tensors.tensor import Array, Tensor


# Multiplications below which OpenBLAS stays on one thread. Its threads would wait for each other, since every
# thread of a conversion multiplies: forty times slower, as measured on two busy cores.
_SMALL = 1 << 18
_BLOCK = 1 << 20  # bytes that are read at once
# Each thread reuses one buffer for its products: with new memory, the block leaves the core's cache.
_products = local()


def _get_product_buffer(count: int) -> Array:
    """Return this thread's buffer of at least `count` float32 elements, with any content."""
    buffer: Array | None = getattr(_products, "buffer", None)
    if buffer is None or buffer.size < count:
        buffer = _products.buffer = np.empty(count, np.float32)
    return buffer


def _add_product(rows: Array, left: Array, right: Array) -> None:
    """Add left @ right to rows, in tiles that fit into the cache."""
    rank, columns = right.shape
    width = max(32, min(1024, columns, _SMALL // (16 * rank)))
    height = max(1, _SMALL // (width * rank))
    whole = len(rows) // height * height
    product = _get_product_buffer(rows.size)[: rows.size].reshape(rows.shape)
    tiles, upper = product[:whole].reshape(-1, height, columns), left[:whole].reshape(-1, height, rank)
    for start in range(0, columns, width):
        inside = slice(start, start + width)
        # Compute a column of tiles in one call, because threads wait for the GIL between two calls.
        np.matmul(upper, right[:, inside], out=tiles[:, :, inside])
        if whole < len(rows):
            np.matmul(left[whole:], right[:, inside], out=product[whole:, inside])
    rows += product


class LoraFactors(NamedTuple):
    """The factors of a low-rank update, whose product `up @ down` has the rows of the weight.

    Attributes:
        up: Scaled, float32 [rows, rank].
        down: Float32 [rank, columns].
    """

    up: Array
    down: Array


class _RowOverlap(NamedTuple):
    """The rows that a block and an edit have in common.

    Attributes:
        block_rows: The rows, counted from the first row of the block.
        edit_rows: The same rows, counted from the first row of the edit.
    """

    block_rows: slice
    edit_rows: slice


def _find_overlap(block: Array, first: int, row: int, count: int) -> _RowOverlap | None:
    """Find the rows of a block, which begins at row `first`, in [row, row + count); None without any."""
    low, high = max(first, row), min(first + len(block), row + count)
    if low >= high:
        return None
    return _RowOverlap(slice(low - first, high - first), slice(low - row, high - row))


@dataclass
class LowRank:
    """Adds rows [start, start + count) of left @ right to the rows from `row` on.

    Attributes:
        factors: gives left (rows, rank), scaled, and right (rank, columns).
        magnitude: DoRA: gives the norms that the rows have in the end.
    """

    factors: Callable[[], LoraFactors]
    row: int
    start: int
    count: int
    magnitude: Callable[[], Array] | None = None

    def apply(self, block: Array, first: int) -> None:
        overlap = _find_overlap(block, first, self.row, self.count)
        if overlap is None:
            return
        here, there = overlap
        left, right = self.factors()
        there = slice(there.start + self.start, there.stop + self.start)
        rows = block[here]
        _add_product(rows, left[there], right)
        if self.magnitude is not None:
            rows *= (self.magnitude()[there] / np.sqrt(np.vecdot(rows, rows)))[:, None]


@dataclass
class ColumnMagnitude:
    """DoRA where a weight's outputs are its columns: gives each column its norm.

    Attributes:
        before: gives the weight before this change, a matrix that is read once.
    """

    magnitude: Callable[[], Array]
    before: Callable[[], Tensor] = field(compare=False)
    _lock: Lock = field(default_factory=Lock, compare=False)

    @cached_property
    def _factor(self) -> Array:
        before = self.before()
        rows, columns = before.shape
        # float64: the sum runs over all rows, one block after the other.
        total = np.zeros(columns)
        for block in before.iter_blocks_then_verify(max(_BLOCK, before.nbytes // rows)):
            total += np.square(block.reshape(-1, columns)).sum(axis=0, dtype=np.float64)
        return (self.magnitude() / np.sqrt(total)).astype(np.float32)

    def apply(self, block: Array, first: int) -> None:
        with self._lock:
            factor = self._factor
        block *= factor


@dataclass
class Scale:
    """Multiplies by a vector: one factor for each row from `row` on, or for each column."""

    vector: Callable[[], Array]
    row: int
    start: int
    count: int
    columns: bool

    def apply(self, block: Array, first: int) -> None:
        overlap = _find_overlap(block, first, self.row, self.count)
        if overlap is None:
            return
        here, there = overlap
        if self.columns:
            block[here] *= self.vector()
        else:
            block[here] *= self.vector()[there.start + self.start : there.stop + self.start, None]


@dataclass
class Add:
    """Adds a vector, scaled, to a bias: a tensor of one row."""

    vector: Callable[[], Array]

    def apply(self, block: Array, first: int) -> None:
        block += self.vector()


@dataclass
class ReplaceRows:
    """Replaces single rows: trained tokens of an embedding."""

    rows: tuple[int, ...]
    values: Callable[[], Array]

    def apply(self, block: Array, first: int) -> None:
        inside = [index for index, row in enumerate(self.rows) if first <= row < first + len(block)]
        if inside:
            block[[self.rows[index] - first for index in inside]] = self.values()[inside]


def is_same_edit(left: Edit, right: Edit) -> bool:
    """Whether two edits do the same: their fields are equal, or give equal arrays."""
    if type(left) is not type(right):
        return False
    names = [each.name for each in fields(left) if each.compare]  # type: ignore[arg-type]
    return all(_is_equal(getattr(left, name), getattr(right, name)) for name in names)


def _is_equal(left: Any, right: Any) -> bool:
    if callable(left) and callable(right):
        return left is right or _is_equal(left(), right())
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    return bool(np.array_equal(left, right))
