"""Tensors put together from regions of other tensors, described before anything is read.

An `Arrangement` is a shape and the tiles that fill it. Each tile is a region of a source tensor, possibly
with other dimensions or with steps between its elements. Stacking, cutting, concatenating and transposing
only change the tiles, so the result is again a set of file spans that tile a tensor, and it streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.storage.bytes import Memory
from converters.tensors.dtypes import itemsize
from converters.tensors.tensor import Box, Tensor, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from converters.tensors.tensor import Shape

ZEROS = ""
"""The source of a tile that is filled with zeros."""
_MAX_TILES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tile:
    """A region of a source tensor and its position in the result.

    Attributes:
        at: First element in the result.
        sizes: Number of elements along each dimension of the result.
        source: Name of the source tensor, or `ZEROS`.
        lows: First element in the source.
        dims: For each dimension of the result, the dimension of the source along which it runs; -1 for none.
        steps: For each dimension of the result, the distance in the source between two elements.
    """

    at: Shape
    sizes: Shape
    source: str
    lows: Shape
    dims: Shape
    steps: Shape


@dataclass(frozen=True)
class Arrangement:
    """The tiles of a tensor that is not stored in this form.

    Attributes:
        shape: Shape of the result.
        tiles: Tiles that cover the shape exactly once.
    """

    shape: Shape
    tiles: tuple[Tile, ...]

    def whole(self, shape_of: Callable[[str], Shape]) -> str | None:
        """Return the name of the source tensor if the result is identical to it, otherwise None.

        Args:
            shape_of: Returns the shape of a source tensor.
        """
        if len(self.tiles) != 1 or self.tiles[0].source == ZEROS:
            return None
        tile = self.tiles[0]
        same = tile.sizes == self.shape == shape_of(tile.source) and tile.dims == (*range(len(self.shape)),)
        return tile.source if same and set(tile.steps) <= {1} else None

    def sources(self) -> list[str]:
        """Return the names of the source tensors, without repetition."""
        return [name for name in dict.fromkeys(tile.source for tile in self.tiles) if name != ZEROS]


def source(name: str, shape: Sequence[int]) -> Arrangement:
    """Return the arrangement of one source tensor, unchanged."""
    shape = tuple(shape)
    rank = len(shape)
    tile = Tile((0,) * rank, shape, name, (0,) * rank, tuple(range(rank)), (1,) * rank)
    return Arrangement(shape, (tile,))


def zeros(shape: Sequence[int]) -> Arrangement:
    """Return an arrangement filled with zeros."""
    shape = tuple(shape)
    rank = len(shape)
    return Arrangement(shape, (Tile((0,) * rank, shape, ZEROS, (), (-1,) * rank, (1,) * rank),))


def sliced(values: Arrangement, dim: int, low: int, count: int, step: int = 1) -> Arrangement:
    """Take `count` elements along `dim`, starting at `low`, every `step`-th one."""
    dim %= len(values.shape)
    if low < 0 or count < 0 or (count and low + (count - 1) * step >= values.shape[dim]):
        raise CheckpointError(f"cannot take {count} elements from {low} on of shape {list(values.shape)}")
    tiles = []
    for tile in values.tiles:
        begin, size = tile.at[dim], tile.sizes[dim]
        first = max(0, -((low - begin) // step))
        last = min(count - 1, (begin + size - 1 - low) // step)
        if first > last:
            continue
        lows, steps = list(tile.lows), list(tile.steps)
        if tile.dims[dim] >= 0:
            lows[tile.dims[dim]] += (low + first * step - begin) * steps[dim]
            steps[dim] *= step
        tiles.append(
            replace(
                tile,
                at=_put(tile.at, dim, first),
                sizes=_put(tile.sizes, dim, last - first + 1),
                lows=tuple(lows),
                steps=tuple(steps),
            )
        )
    return Arrangement(_put(values.shape, dim, count), tuple(tiles))


def selected(values: Arrangement, dim: int, index: int) -> Arrangement:
    """Take one element along `dim` and remove the dimension."""
    dim %= len(values.shape)
    one = sliced(values, dim, index, 1)

    def without(sizes: Shape) -> Shape:
        return sizes[:dim] + sizes[dim + 1 :]

    tiles = (
        replace(
            tile,
            at=without(tile.at),
            sizes=without(tile.sizes),
            dims=without(tile.dims),
            steps=without(tile.steps),
        )
        for tile in one.tiles
    )
    return Arrangement(without(one.shape), tuple(tiles))


def chunks(values: Arrangement, dim: int, count: int) -> list[Arrangement]:
    """Cut along `dim` into `count` parts. The last part may be smaller."""
    dim %= len(values.shape)
    length = values.shape[dim]
    size = -(-length // count)
    starts = range(0, length, size) if size else ()
    return [sliced(values, dim, low, min(size, length - low)) for low in starts]


def split(values: Arrangement, dim: int, sizes: Sequence[int]) -> list[Arrangement]:
    """Cut along `dim` into parts of these sizes."""
    parts, low = [], 0
    for size in sizes:
        parts.append(sliced(values, dim, low, size))
        low += size
    if low != values.shape[dim]:
        raise CheckpointError(f"parts of {list(sizes)} do not fit the shape {list(values.shape)}")
    return parts


def concatenated(parts: Sequence[Arrangement], dim: int) -> Arrangement:
    """Concatenate along `dim`."""
    first = parts[0]
    dim %= len(first.shape)
    tiles: list[Tile] = []
    length = 0
    for part in parts:
        if _put(part.shape, dim, 0) != _put(first.shape, dim, 0):
            raise CheckpointError(f"shapes {list(first.shape)} and {list(part.shape)} do not fit each other")
        tiles += (replace(tile, at=_put(tile.at, dim, tile.at[dim] + length)) for tile in part.tiles)
        length += part.shape[dim]
    if len(tiles) > _MAX_TILES:
        raise CheckpointError(f"consists of {len(tiles):,} regions, which is not supported")
    return Arrangement(_put(first.shape, dim, length), tuple(tiles))


def stacked(parts: Sequence[Arrangement], dim: int) -> Arrangement:
    """Stack along a new dimension."""
    dim %= len(parts[0].shape) + 1

    def grown(sizes: Shape, value: int) -> Shape:
        return (*sizes[:dim], value, *sizes[dim:])

    return concatenated(
        [
            Arrangement(
                grown(part.shape, 1),
                tuple(
                    replace(
                        tile,
                        at=grown(tile.at, 0),
                        sizes=grown(tile.sizes, 1),
                        dims=grown(tile.dims, -1),
                        steps=grown(tile.steps, 1),
                    )
                    for tile in part.tiles
                ),
            )
            for part in parts
        ],
        dim,
    )


def transposed(values: Arrangement, first: int, second: int) -> Arrangement:
    """Exchange two dimensions."""
    order = list(range(len(values.shape)))
    order[first], order[second] = order[second], order[first]

    def turned(sizes: Shape) -> Shape:
        return tuple(sizes[dim] for dim in order)

    tiles = (
        replace(
            tile,
            at=turned(tile.at),
            sizes=turned(tile.sizes),
            dims=turned(tile.dims),
            steps=turned(tile.steps),
        )
        for tile in values.tiles
    )
    return Arrangement(turned(values.shape), tuple(tiles))


def regrouped(values: Arrangement, dim: int, outer: int) -> Arrangement:
    """Take the elements along `dim` as a matrix with `outer` rows, and transpose this matrix.

    With two rows, the elements of the first half and of the second half alternate afterwards.
    """
    length = values.shape[dim]
    if outer < 1 or length % outer:
        raise CheckpointError(f"{length} elements do not divide into {outer} groups")
    inner = length // outer
    if 1 in (inner, outer):
        return values
    if inner > _MAX_TILES:
        raise CheckpointError(f"consists of {inner:,} regions, which is not supported")
    return concatenated([sliced(values, dim, i, outer, inner) for i in range(inner)], dim)


def arranged(name: str, values: Arrangement, tensors: Mapping[str, Tensor]) -> Tensor:
    """Make the tensor that an arrangement describes.

    Args:
        name: Name of the new tensor, used in error messages.
        values: The arrangement.
        tensors: The source tensors by name.

    Raises:
        CheckpointError: The source tensors have several dtypes.
    """
    if (same := values.whole(lambda source: tensors[source].shape)) is not None:
        return tensors[same]
    dtypes = {tensors[part].dtype for part in values.sources()}
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtypes))
        raise CheckpointError(f"{name}: consists of tensors of several dtypes ({names}); convert them to one")
    dtype = dtypes.pop()
    boxes: list[Box] = []
    for tile in values.tiles:
        if tile.source == ZEROS:
            empty = View(Memory(bytes(itemsize(dtype))), 0, (0,) * len(tile.sizes))
            boxes.append(Box(tile.at, tile.sizes, empty))
        else:
            boxes += _boxes(tile, tensors[tile.source])
    return Tensor(name, dtype, values.shape, boxes)


def _boxes(tile: Tile, tensor: Tensor) -> list[Box]:
    """Return the parts of a tile that lie in each piece of its source tensor."""
    extents = [1] * len(tensor.shape)
    for dim, size, step in zip(tile.dims, tile.sizes, tile.steps, strict=True):
        if dim >= 0:
            extents[dim] = (size - 1) * step + 1
    found = []
    for box in tensor.find_overlapping_boxes(tile.lows, tuple(extents)):
        along = set(tile.dims)
        outside = any(
            not offset <= low < offset + size
            for dim, (low, offset, size) in enumerate(zip(tile.lows, box.offsets, box.sizes, strict=True))
            if dim not in along
        )
        if outside:
            continue
        at, sizes, begin = [], [], list(tile.lows)
        for start, count, dim, step in zip(tile.at, tile.sizes, tile.dims, tile.steps, strict=True):
            first, last = 0, count - 1
            if dim >= 0:
                offset, size = box.offsets[dim], box.sizes[dim]
                first = max(0, -((tile.lows[dim] - offset) // step))
                last = min(last, (offset + size - 1 - tile.lows[dim]) // step)
                begin[dim] += first * step
            at.append(start + first)
            sizes.append(last - first + 1)
        if min(sizes, default=1) < 1:
            continue
        inside = tuple(low - offset for low, offset in zip(begin, box.offsets, strict=True))
        located = box.located
        view = _view(located, inside, tile) if located else _later(box, inside, tile)
        found.append(Box(tuple(at), tuple(sizes), view))
    return found


def _later(box: Box, inside: Shape, tile: Tile) -> Callable[[], View]:
    return lambda: _view(box.view, inside, tile)


def _view(held: View, inside: Shape, tile: Tile) -> View:
    """Return the view of a tile that begins at the element `inside` of a piece."""
    begin = held.offset + sum(i * stride for i, stride in zip(inside, held.strides, strict=True))
    strides = tuple(
        held.strides[dim] * step if dim >= 0 else 0 for dim, step in zip(tile.dims, tile.steps, strict=True)
    )
    return View(held.source, begin, strides)


def _put(sizes: Shape, dim: int, value: int) -> Shape:
    return (*sizes[:dim], value, *sizes[dim + 1 :])
