"""Describe tensors assembled from regions of other tensors, before any data is read.

An `Arrangement` consists of a shape and the tiles that fill it. Each tile is a region of a source
tensor, possibly with permuted dimensions or with steps between its elements. Stacking, slicing,
concatenating, and transposing only change the tiles, so the result can still be streamed from file
spans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError, UnconvertibleNamesError
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Box, Tensor, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.converters.tensors.tensor import Shape

ZEROS = ""
"""Value of `Tile.source` for a tile that is filled with zeros instead of a region of a tensor."""
_MAX_TILES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tile:
    """Region of a source tensor, and its position in the result.

    Attributes:
        starts: Index of the tile's first element in the result, per dimension.
        sizes: Number of elements along each dimension of the result.
        source: Name of the source tensor, or `ZEROS`.
        source_starts: Index of the tile's first element in the source, per dimension of the source.
            Empty for `ZEROS`.
        source_dims: Source dimension for each dimension of the result, or -1 if there is none.
        steps: Step in the source between consecutive elements, for each dimension of the result.
    """

    starts: Shape
    sizes: Shape
    source: str
    source_starts: Shape
    source_dims: Shape
    steps: Shape


@dataclass(frozen=True)
class Arrangement:
    """Description of a tensor that is assembled from tiles.

    A tile is a region of another tensor, or a region of zeros. It has a position in the assembled
    tensor.

    Attributes:
        shape: Shape of the assembled tensor.
        tiles: Tiles that together cover each element of this shape exactly once.
    """

    shape: Shape
    tiles: tuple[Tile, ...]

    def find_identical_source(self, get_shape: Callable[[str], Shape]) -> str | None:
        """Return the name of the source tensor if the result is one complete, unchanged source tensor.

        Args:
            get_shape: Function that returns the shape of a source tensor.

        Returns:
            Name of the source tensor. None if the result is only a part of a tensor, reorders its elements,
            or combines several regions.
        """
        if len(self.tiles) != 1 or self.tiles[0].source == ZEROS:
            return None
        tile = self.tiles[0]
        is_complete = tile.sizes == self.shape == get_shape(tile.source)
        in_order = tile.source_dims == (*range(len(self.shape)),) and set(tile.steps) <= {1}
        return tile.source if is_complete and in_order else None

    def list_sources(self) -> list[str]:
        """List the source tensors without duplicates, in the order of the tiles."""
        return [name for name in dict.fromkeys(tile.source for tile in self.tiles) if name != ZEROS]


def arrange_source(name: str, shape: Sequence[int]) -> Arrangement:
    """Create an arrangement whose result is one complete, unchanged source tensor.

    An arrangement describes a tensor that is assembled from regions of source tensors, called
    tiles.

    Args:
        name: Name of the source tensor.
        shape: Shape of the source tensor.

    Returns:
        An arrangement with a single tile.
    """
    shape = tuple(shape)
    ndim = len(shape)
    tile = Tile((0,) * ndim, shape, name, (0,) * ndim, tuple(range(ndim)), (1,) * ndim)
    return Arrangement(shape, (tile,))


def arrange_zeros(shape: Sequence[int]) -> Arrangement:
    """Create an arrangement that is filled with zeros. It has a single tile."""
    shape = tuple(shape)
    ndim = len(shape)
    return Arrangement(shape, (Tile((0,) * ndim, shape, ZEROS, (), (-1,) * ndim, (1,) * ndim),))


def slice_arrangement(
    arrangement: Arrangement, dim: int, start: int, count: int, step: int = 1
) -> Arrangement:
    """Slice an arrangement along one dimension.

    Args:
        arrangement: Arrangement to slice.
        dim: Dimension to slice, which may be negative.
        start: Index of the first element. It must not be negative.
        count: Number of elements. If it is 0, the result has no tiles.
        step: Step between consecutive elements. It must be positive.

    Returns:
        An arrangement with `count` elements along `dim`.

    Raises:
        CheckpointError: If the slice exceeds the shape, or if the dimension does not exist.
    """
    dim = _normalize_dim(arrangement.shape, dim)
    if start < 0 or count < 0 or (count and start + (count - 1) * step >= arrangement.shape[dim]):
        raise UnconvertibleNamesError(
            f"cannot select elements {start} to {start + (count - 1) * step} along dimension {dim} of a "
            f"tensor with shape {list(arrangement.shape)}"
        )
    tiles = []
    for tile in arrangement.tiles:
        begin, size = tile.starts[dim], tile.sizes[dim]
        first = max(0, -((start - begin) // step))
        last = min(count - 1, (begin + size - 1 - start) // step)
        if first > last:
            continue
        lows, steps = list(tile.source_starts), list(tile.steps)
        if tile.source_dims[dim] >= 0:
            lows[tile.source_dims[dim]] += (start + first * step - begin) * steps[dim]
            steps[dim] *= step
        tiles.append(
            replace(
                tile,
                starts=_replace_at_dim(tile.starts, dim, first),
                sizes=_replace_at_dim(tile.sizes, dim, last - first + 1),
                source_starts=tuple(lows),
                steps=tuple(steps),
            )
        )
    return Arrangement(_replace_at_dim(arrangement.shape, dim, count), tuple(tiles))


def select_from_arrangement(arrangement: Arrangement, dim: int, index: int) -> Arrangement:
    """Select one index along `dim` and remove this dimension, as `torch.select` does.

    Raises:
        CheckpointError: If the index is negative or exceeds the dimension, or if the dimension does
            not exist.
    """
    dim = _normalize_dim(arrangement.shape, dim)
    element = slice_arrangement(arrangement, dim, index, 1)

    def drop(sizes: Shape) -> Shape:
        return sizes[:dim] + sizes[dim + 1 :]

    tiles = (
        replace(
            tile,
            starts=drop(tile.starts),
            sizes=drop(tile.sizes),
            source_dims=drop(tile.source_dims),
            steps=drop(tile.steps),
        )
        for tile in element.tiles
    )
    return Arrangement(drop(element.shape), tuple(tiles))


def chunk_arrangement(arrangement: Arrangement, dim: int, count: int) -> list[Arrangement]:
    """Split an arrangement into chunks along `dim`, as `torch.chunk` does.

    Args:
        arrangement: Arrangement to split.
        dim: Dimension to split.
        count: Number of chunks.

    Returns:
        `count` chunks of equal size, except that the last chunk may be smaller.

    Raises:
        CheckpointError: If the dimension does not exist, or if `torch.chunk` would return fewer than
            `count` chunks or empty chunks.
    """
    dim = _normalize_dim(arrangement.shape, dim)
    length = arrangement.shape[dim]
    size = -(-length // count)
    starts = range(0, length, size) if size else ()
    if len(starts) != count:
        raise UnconvertibleNamesError(
            f"cannot split a tensor with shape {list(arrangement.shape)} along dimension {dim} into {count} "
            "chunks"
        )
    return [slice_arrangement(arrangement, dim, low, min(size, length - low)) for low in starts]


def split_arrangement(arrangement: Arrangement, dim: int, sizes: Sequence[int]) -> list[Arrangement]:
    """Split an arrangement along `dim` into parts of the given sizes, as `torch.split` does.

    Args:
        arrangement: Arrangement to split.
        dim: Dimension to split.
        sizes: Size of each part along `dim`.

    Returns:
        The parts, in order.

    Raises:
        CheckpointError: If the sizes do not add up to the size of the dimension, or if the dimension
            does not exist.
    """
    parts, low = [], 0
    for size in sizes:
        parts.append(slice_arrangement(arrangement, dim, low, size))
        low += size
    if low != arrangement.shape[dim]:
        raise UnconvertibleNamesError(
            f"cannot split a tensor with shape {list(arrangement.shape)} along dimension {dim} into parts of "
            f"the sizes {list(sizes)}"
        )
    return parts


def concat_arrangements(parts: Sequence[Arrangement], dim: int) -> Arrangement:
    """Concatenate arrangements along `dim`.

    Args:
        parts: Arrangements whose shapes differ only in `dim`. There must be at least one.
        dim: Dimension along which to concatenate.

    Returns:
        An arrangement with the tiles of all parts.

    Raises:
        CheckpointError: If the shapes do not match, if the dimension does not exist, or if the result
            has more than `_MAX_TILES` tiles.
    """
    first = parts[0]
    dim = _normalize_dim(first.shape, dim)
    tiles: list[Tile] = []
    length = 0
    for part in parts:
        if len(part.shape) != len(first.shape) or (
            _replace_at_dim(part.shape, dim, 0) != _replace_at_dim(first.shape, dim, 0)
        ):
            raise UnconvertibleNamesError(
                f"cannot concatenate tensors with the shapes {list(first.shape)} and {list(part.shape)} "
                f"along dimension {dim}"
            )
        tiles += (
            replace(tile, starts=_replace_at_dim(tile.starts, dim, tile.starts[dim] + length))
            for tile in part.tiles
        )
        length += part.shape[dim]
    _check_tile_count(len(tiles))
    return Arrangement(_replace_at_dim(first.shape, dim, length), tuple(tiles))


def stack_arrangements(parts: Sequence[Arrangement], dim: int) -> Arrangement:
    """Stack arrangements of the same shape along a new dimension `dim`, as `torch.stack` does.

    Raises:
        CheckpointError: If the shapes differ, or if the result has more than `_MAX_TILES` tiles.
    """
    dim = _normalize_dim((*parts[0].shape, 1), dim)

    def insert(sizes: Shape, value: int) -> Shape:
        return (*sizes[:dim], value, *sizes[dim:])

    return concat_arrangements(
        [
            Arrangement(
                insert(part.shape, 1),
                tuple(
                    replace(
                        tile,
                        starts=insert(tile.starts, 0),
                        sizes=insert(tile.sizes, 1),
                        source_dims=insert(tile.source_dims, -1),
                        steps=insert(tile.steps, 1),
                    )
                    for tile in part.tiles
                ),
            )
            for part in parts
        ],
        dim,
    )


def transpose_arrangement(arrangement: Arrangement, first: int, second: int) -> Arrangement:
    """Swap two dimensions of an arrangement, as `torch.transpose` does.

    Raises:
        CheckpointError: If one of the dimensions does not exist.
    """
    first, second = (_normalize_dim(arrangement.shape, dim) for dim in (first, second))
    order = list(range(len(arrangement.shape)))
    order[first], order[second] = order[second], order[first]

    def permute(sizes: Shape) -> Shape:
        return tuple(sizes[dim] for dim in order)

    tiles = (
        replace(
            tile,
            starts=permute(tile.starts),
            sizes=permute(tile.sizes),
            source_dims=permute(tile.source_dims),
            steps=permute(tile.steps),
        )
        for tile in arrangement.tiles
    )
    return Arrangement(permute(arrangement.shape), tuple(tiles))


def interleave_arrangement(arrangement: Arrangement, dim: int, groups: int) -> Arrangement:
    """Interleave groups of consecutive elements along `dim`.

    The result is the same as reshaping the dimension into a matrix with `groups` rows, transposing
    the matrix, and flattening it. For example, with two groups, elements of the first half
    alternate with elements of the second half.

    Args:
        arrangement: Arrangement to reorder.
        dim: Dimension along which to interleave.
        groups: Number of groups.

    Returns:
        An arrangement of the same shape.

    Raises:
        CheckpointError: If the size of the dimension is not divisible by `groups`, if the dimension
            does not exist, or if the result has more than `_MAX_TILES` tiles.
    """
    length = arrangement.shape[_normalize_dim(arrangement.shape, dim)]
    if groups < 1 or length % groups:
        raise UnconvertibleNamesError(f"cannot divide {length} elements into {groups} groups of equal size")
    size = length // groups
    if 1 in (size, groups):
        return arrangement
    _check_tile_count(size)
    return concat_arrangements(
        [slice_arrangement(arrangement, dim, i, groups, size) for i in range(size)], dim
    )


def build_arranged_tensor(name: str, arrangement: Arrangement, tensors: Mapping[str, Tensor]) -> Tensor:
    """Build the tensor that an arrangement describes, without reading any data.

    Args:
        name: Name of the new tensor, used in error messages.
        arrangement: Arrangement of the new tensor.
        tensors: Source tensors, keyed by name.

    Returns:
        The new tensor. If the arrangement is one complete, unchanged source tensor, this source
        tensor itself is returned, which keeps its old name.

    Raises:
        CheckpointError: If the source tensors have different dtypes. Also if there is no source
            tensor, because the dtype is then unknown.
    """
    identical = arrangement.find_identical_source(lambda source: tensors[source].shape)
    if identical is not None:
        return tensors[identical]
    dtypes = {tensors[source].dtype for source in arrangement.list_sources()}
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtypes))
        raise CheckpointError(
            f"{name}: consists of tensors of several dtypes ({names}); convert the tensors to one dtype"
        )
    dtype = dtypes.pop()
    boxes: list[Box] = []
    for tile in arrangement.tiles:
        if tile.source == ZEROS:
            zero = View(InMemorySource(bytes(get_itemsize(dtype))), 0, (0,) * len(tile.sizes))
            boxes.append(Box(tile.starts, tile.sizes, zero))
        else:
            boxes += _intersect_boxes(tile, tensors[tile.source])
    return Tensor(name, dtype, arrangement.shape, boxes)


def _intersect_boxes(tile: Tile, tensor: Tensor) -> list[Box]:
    """Return the boxes that make up one tile of a rearranged tensor. The tile must not be `ZEROS`.

    A tensor consists of rectangular pieces, called boxes. Each box has a `View`, which locates its
    elements. Each box of the source tensor that overlaps the tile is cropped to the tile, and moved
    to its position in the rearranged tensor. No data is read. If the view of a source box is not
    known yet, it is computed on the first read.

    Args:
        tile: Region of the source tensor, and its position in the rearranged tensor.
        tensor: Source tensor.
    """
    extents = [1] * len(tensor.shape)
    for dim, size, step in zip(tile.source_dims, tile.sizes, tile.steps, strict=True):
        if dim >= 0:
            extents[dim] = (size - 1) * step + 1
    boxes = []
    for box in tensor.find_overlapping_boxes(tile.source_starts, tuple(extents)):
        is_outside = any(
            not offset <= low < offset + size
            for dim, (low, offset, size) in enumerate(
                zip(tile.source_starts, box.offsets, box.sizes, strict=True)
            )
            if dim not in tile.source_dims
        )
        if is_outside:
            continue
        offsets, sizes, begin = [], [], list(tile.source_starts)
        for start, count, dim, step in zip(
            tile.starts, tile.sizes, tile.source_dims, tile.steps, strict=True
        ):
            first, last = 0, count - 1
            if dim >= 0:
                offset, size = box.offsets[dim], box.sizes[dim]
                first = max(0, -((tile.source_starts[dim] - offset) // step))
                last = min(last, (offset + size - 1 - tile.source_starts[dim]) // step)
                begin[dim] += first * step
            offsets.append(start + first)
            sizes.append(last - first + 1)
        if min(sizes, default=1) < 1:
            continue
        index = tuple(low - offset for low, offset in zip(begin, box.offsets, strict=True))
        available = box.available_view
        view = (
            _build_tile_view(available, index, tile)
            if available
            else _build_deferred_tile_view(box, index, tile)
        )
        boxes.append(Box(tuple(offsets), tuple(sizes), view))
    return boxes


def _build_deferred_tile_view(box: Box, index: Shape, tile: Tile) -> Callable[[], View]:
    return lambda: _build_tile_view(box.view, index, tile)


def _build_tile_view(view: View, index: Shape, tile: Tile) -> View:
    """Build a view of the elements that a tile and a box have in common.

    A tile is a region of a source tensor. The source tensor is stored as boxes, and the tile may
    overlap several of them. This function handles one box.

    Args:
        view: View of the complete box.
        index: Position in the box of the first common element.
        tile: Tile, which determines the order of the dimensions and the step along each of them.
    """
    begin = view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=True))
    strides = tuple(
        view.strides[dim] * step if dim >= 0 else 0
        for dim, step in zip(tile.source_dims, tile.steps, strict=True)
    )
    return View(view.source, begin, strides)


def _normalize_dim(shape: Shape, dim: int) -> int:
    """Convert a dimension, which may be negative, to an index from 0.

    Raises:
        CheckpointError: If the shape does not have this dimension.
    """
    if not -len(shape) <= dim < len(shape):
        raise UnconvertibleNamesError(f"a tensor with shape {list(shape)} has no dimension {dim}")
    return dim % len(shape)


def _replace_at_dim(sizes: Shape, dim: int, value: int) -> Shape:
    return (*sizes[:dim], value, *sizes[dim + 1 :])


def _check_tile_count(count: int) -> None:
    if count > _MAX_TILES:
        raise UnconvertibleNamesError(
            f"would be assembled from {count:,} slices of tensors, but at most {_MAX_TILES:,} are supported"
        )
