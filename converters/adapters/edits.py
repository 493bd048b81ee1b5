"""Apply an adapter's edits to the rows of a weight, in NumPy.

A weight is treated as a matrix of rows. A stack of experts consists of the rows of all its
matrices, and a convolution has one row per output channel. Each edit has a method `apply(block,
first_row)`, which changes a block of rows in place. `first_row` is the index of the block's first
row in the tensor.

Source: `get_delta_weight` in peft/tuners/lora/layer.py, the merging of DoRA in
peft/tuners/lora/variants.py, peft/tuners/ia3/layer.py, peft/tuners/trainable_tokens/layer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from threading import Lock, local
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.lazy_numpy import np

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.converters.tensors.edited_rows import RowEdit
    from portable.converters.tensors.tensor import Array, Tensor


_MAX_MULTIPLICATIONS = 1 << 18
"""Maximum number of multiplications for which OpenBLAS uses a single thread.

Several threads of a conversion multiply at the same time. For larger products, each of them would
also start threads of OpenBLAS, which wait for each other. On two busy cores, such products were 40
times slower.
"""
_BLOCK_BYTES = 1 << 20  # size of the blocks in which a weight is read
# Each thread reuses one buffer for its products, because newly allocated memory would displace the block in
# the cache.
_products = local()


def _get_product_buffer(count: int) -> Array:
    """Return this thread's uninitialized float32 buffer, with at least `count` elements.

    The buffer is reallocated if it is too small.
    """
    buffer: Array | None = getattr(_products, "buffer", None)
    if buffer is None or buffer.size < count:
        buffer = _products.buffer = np.empty(count, np.float32)
    return buffer


def _add_product(rows: Array, up: Array, down: Array) -> None:
    """Add `up @ down` to `rows` in place.

    The product is computed in tiles, because OpenBLAS multiplies small matrices in a single thread.
    See `_MAX_MULTIPLICATIONS`.
    """
    rank, columns = down.shape
    width = max(32, min(1024, columns, _MAX_MULTIPLICATIONS // (16 * rank)))
    height = max(1, _MAX_MULTIPLICATIONS // (width * rank))
    num_tiled_rows = len(rows) // height * height
    product = _get_product_buffer(rows.size)[: rows.size].reshape(rows.shape)
    tiles, up_tiles = (
        product[:num_tiled_rows].reshape(-1, height, columns),
        up[:num_tiled_rows].reshape(-1, height, rank),
    )
    for start in range(0, columns, width):
        columns_slice = slice(start, start + width)
        # Compute a column of tiles in one call, because threads wait for the GIL between calls.
        np.matmul(up_tiles, down[:, columns_slice], out=tiles[:, :, columns_slice])
        if num_tiled_rows < len(rows):
            np.matmul(
                up[num_tiled_rows:], down[:, columns_slice], out=product[num_tiled_rows:, columns_slice]
            )
    rows += product


class LoraFactors(NamedTuple):
    """Factors of a low-rank update. Their product `up @ down` is added to rows of the weight.

    Attributes:
        up: First factor, multiplied by the scaling. Float32 array of shape `[rows, rank]`.
        down: Second factor. Float32 array of shape `[rank, columns]`.
    """

    up: Array
    down: Array


class _RowOverlap(NamedTuple):
    """Rows that a block and an edit have in common.

    Attributes:
        block_rows: The rows, counted from the first row of the block.
        edit_rows: The same rows, counted from the first row of the edit.
    """

    block_rows: slice
    edit_rows: slice


def _find_row_overlap(block: Array, block_start: int, first_row: int, num_rows: int) -> _RowOverlap | None:
    """Return the rows of a block that an edit changes, or None if there are none.

    Args:
        block: Block of rows.
        block_start: Index of the block's first row in the tensor.
        first_row: First row that the edit changes.
        num_rows: Number of rows that the edit changes.
    """
    low, high = max(block_start, first_row), min(block_start + len(block), first_row + num_rows)
    if low >= high:
        return None
    return _RowOverlap(slice(low - block_start, high - block_start), slice(low - first_row, high - first_row))


@dataclass
class LowRankEdit:
    """Edit that adds consecutive rows of the product `up @ down` to consecutive rows of a weight.

    `up` and `down` are the LoRA factors of the weight's update.

    Attributes:
        load_factors: Function that returns the factors `up` and `down`.
        first_row: Index of the first weight row to change.
        first_product_row: Index of the product row that is added to the first changed weight row.
        num_rows: Number of rows to change.
        load_magnitude: Function that returns DoRA's magnitudes, one per row of the product. After
            the addition, each changed row is rescaled so that its L2 norm equals its magnitude. If
            None, the rows are not rescaled.
    """

    load_factors: Callable[[], LoraFactors]
    first_row: int
    first_product_row: int
    num_rows: int
    load_magnitude: Callable[[], Array] | None = None

    def apply(self, block: Array, first_row: int) -> None:
        """Apply the edit to a block of the tensor's rows, in place.

        The edit changes a range of the tensor's rows. If the block contains rows of this range, the
        product of the two low-rank factors is added to these rows. With DoRA, the rows are then
        rescaled to the magnitudes stored in the adapter. Other rows of the block are unchanged.

        Args:
            block: Consecutive rows of the tensor.
            first_row: Index of the block's first row in the tensor.
        """
        overlap = _find_row_overlap(block, first_row, self.first_row, self.num_rows)
        if overlap is None:
            return
        block_rows, product_rows = overlap
        up, down = self.load_factors()
        product_rows = slice(
            product_rows.start + self.first_product_row, product_rows.stop + self.first_product_row
        )
        rows = block[block_rows]
        _add_product(rows, up[product_rows], down)
        if self.load_magnitude is not None:
            rows *= (self.load_magnitude()[product_rows] / np.sqrt(np.vecdot(rows, rows)))[:, None]


@dataclass
class ColumnMagnitudeEdit:
    """Edit that rescales each column of a weight so that its L2 norm equals DoRA's magnitude.

    It is used for weights whose columns are outputs.

    Attributes:
        load_magnitude: Function that returns DoRA's magnitudes, one per column.
        build_unscaled: Function that builds the weight before this edit, as a matrix. All of its
            elements are read once, to compute the norms of the columns.
    """

    load_magnitude: Callable[[], Array]
    build_unscaled: Callable[[], Tensor] = field(compare=False)
    _lock: Lock = field(default_factory=Lock, compare=False)

    @cached_property
    def _column_factors(self) -> Array:
        """Factor of each column: DoRA's magnitude divided by the norm of the column.

        The norm is computed from the tensor that `build_unscaled` returns, to which all earlier
        edits have been applied.
        """
        before = self.build_unscaled()
        rows, columns = before.shape
        # Use float64, because the sum accumulates over all rows, block by block.
        total = np.zeros(columns)
        for block in before.iter_blocks_then_verify(max(_BLOCK_BYTES, before.nbytes // rows)):
            total += np.square(block.reshape(-1, columns)).sum(axis=0, dtype=np.float64)
        return (self.load_magnitude() / np.sqrt(total)).astype(np.float32)

    def apply(self, block: Array, first_row: int) -> None:
        """Multiply each column of a block by its DoRA factor, in place.

        The factor of a column is its DoRA magnitude divided by its L2 norm over all rows of the
        weight.

        Args:
            block: Consecutive rows of the weight.
            first_row: Index of the block's first row in the weight. It is not used, because a
                column has the same factor in all rows.
        """
        with self._lock:
            factor = self._column_factors
        block *= factor


@dataclass
class ScaleEdit:
    """Edit that multiplies rows by factors from a vector.

    Attributes:
        load_vector: Function that returns the vector.
        first_row: First row to change.
        first_factor: Index of the vector element that scales `first_row`. Ignored if `scales_columns`
            is True.
        num_rows: Number of rows to change.
        scales_columns: Whether the vector has one factor per column instead of one per row.
    """

    load_vector: Callable[[], Array]
    first_row: int
    first_factor: int
    num_rows: int
    scales_columns: bool

    def apply(self, block: Array, first_row: int) -> None:
        """Scale the rows of a block that this edit covers, in place.

        Other rows are unchanged.

        Args:
            block: Consecutive rows of the tensor.
            first_row: Index of the block's first row in the tensor.
        """
        overlap = _find_row_overlap(block, first_row, self.first_row, self.num_rows)
        if overlap is None:
            return
        block_rows, edit_rows = overlap
        if self.scales_columns:
            block[block_rows] *= self.load_vector()
        else:
            block[block_rows] *= self.load_vector()[
                edit_rows.start + self.first_factor : edit_rows.stop + self.first_factor, None
            ]


@dataclass
class AddVectorEdit:
    """Edit that adds a vector to a bias. A bias is treated as a tensor with one row.

    Attributes:
        load_vector: Function that returns the vector.
    """

    load_vector: Callable[[], Array]

    def apply(self, block: Array, first_row: int) -> None:
        """Add this edit's vector to a bias, in place.

        Args:
            block: Complete bias, as an array with one row.
            first_row: Index of the block's first row. It is not used, because a bias is a single
                block.
        """
        block += self.load_vector()


@dataclass
class ReplaceRowsEdit:
    """Edit that replaces individual rows of a tensor, such as the embeddings of trained tokens.

    Attributes:
        rows: Indices of the rows to replace.
        values: Function that returns an array with the new rows, in the order of `rows`.
    """

    rows: tuple[int, ...]
    values: Callable[[], Array]

    def apply(self, block: Array, first_row: int) -> None:
        """Write the new rows into a block of the tensor, in place.

        Rows that are outside the block are skipped.

        Args:
            block: Consecutive rows of the tensor.
            first_row: Index of the block's first row in the tensor.
        """
        indices = [index for index, row in enumerate(self.rows) if first_row <= row < first_row + len(block)]
        if indices:
            block[[self.rows[index] - first_row for index in indices]] = self.values()[indices]


def are_equal_edits(first: RowEdit, second: RowEdit) -> bool:
    """Return whether two edits have the same effect.

    This is the case if the edits have the same type and all of their compared fields are equal.
    Fields with `compare=False` are ignored. Fields that are functions are equal if the functions
    return equal arrays. The functions may be called and may read tensors.
    """
    if type(first) is not type(second):
        return False
    names = [each.name for each in fields(first) if each.compare]  # type: ignore[arg-type]
    return all(_are_equal_values(getattr(first, name), getattr(second, name)) for name in names)


def _are_equal_values(first: Any, second: Any) -> bool:
    """Return whether two values are equal.

    Two functions are equal if they return equal values when they are called without arguments.
    Tuples are compared element by element, and other values as arrays.
    """
    if callable(first) and callable(second):
        return first is second or _are_equal_values(first(), second())
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_are_equal_values, first, second))
    return bool(np.array_equal(first, second))
