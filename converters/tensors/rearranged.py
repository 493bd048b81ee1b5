"""Tensors made of regions of other tensors, read lazily: parts, joints, transposes, reshapes.

A region of a tensor is a strided view of its row-major bytes; `source_of` gives those for a tensor in any
pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.numeric import np
from converters.tensors.by_rows import tensor_of
from converters.tensors.dtypes import itemsize, numpy_dtype
from converters.tensors.tensor import Box, Tensor, View, row_major

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.storage.bytes import Source, Touched
    from converters.tensors.tensor import Array, Shape

# Bytes of a transposed matrix that are gathered at once. The source is read once for each, so of each of its
# rows a page at the least, as long as the tile is not too large.
_TILE_BYTES, _AT_LEAST, _LARGEST_TILE = 2 << 20, 4096, 32 << 20


class _RowMajor:
    """The row-major bytes of a tensor whose pieces lie in any way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.nbytes

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        width = itemsize(self.tensor.dtype)
        low, start = divmod(at, width)
        stop = -(-(at + len(buffer)) // width)
        if start == 0 and len(buffer) % width == 0:
            self.tensor.fill_flat(np.frombuffer(buffer, numpy_dtype(self.tensor.dtype)), low, touched)
            return
        whole = np.empty(stop - low, numpy_dtype(self.tensor.dtype))
        self.tensor.fill_flat(whole, low, touched)
        buffer[:] = whole.view(np.uint8).data[start : start + len(buffer)]


def source_of(tensor: Tensor) -> Source:
    """The row-major bytes of a tensor in any pieces."""
    return tensor.run() or _RowMajor(tensor)


def region(tensor: Tensor, at: Sequence[int], lows: Sequence[int], sizes: Sequence[int]) -> Box:
    """A box at `at` with the region of `tensor` that begins at `lows`."""
    strides = row_major(tensor.shape, itemsize(tensor.dtype))
    begin = sum(low * stride for low, stride in zip(lows, strides, strict=True))
    return Box(tuple(at), tuple(sizes), lambda: View(source_of(tensor), begin, strides))


def part(tensor: Tensor, dim: int, low: int, count: int) -> Tensor:
    """The elements [low, low + count) along one dimension."""
    lows, sizes = [0] * len(tensor.shape), list(tensor.shape)
    lows[dim], sizes[dim] = low, count
    return Tensor(tensor.name, tensor.dtype, sizes, [region(tensor, [0] * len(sizes), lows, sizes)])


def joined(name: str, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors end to end along one dimension; the first decides the dtype, and the other sizes."""
    shape, boxes = list(tensors[0].shape), []
    shape[dim] = 0
    for tensor in tensors:
        at = [0] * len(shape)
        at[dim] = shape[dim]
        boxes.append(region(tensor, at, [0] * len(at), tensor.shape))
        shape[dim] += tensor.shape[dim]
    return Tensor(name, tensors[0].dtype, shape, boxes)


def transposed(tensor: Tensor) -> Tensor:
    """The transpose of a matrix."""
    length, columns = tensor.shape
    size = itemsize(tensor.dtype)
    row = max(1, length * size)
    step = max(1, _TILE_BYTES // row, min(_AT_LEAST // size, _LARGEST_TILE // row))

    def rows(matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        made = np.empty((count, length), numpy_dtype(tensor.dtype))
        below = np.empty((max(1, min(length, 1 << 8)), count), made.dtype)
        for low in range(0, length, len(below)):
            part = below[: min(len(below), length - low)]
            tensor.fill(part, (low, first), touched)
            made[:, low : low + len(part)] = part.T
        return made

    return tensor_of(tensor.name, tensor.dtype, (columns, length), rows, elements=step * length)


def permuted(tensor: Tensor, split: Sequence[int], order: Sequence[int]) -> Tensor:
    """`tensor.reshape(split).permute(order).reshape(tensor.shape)`.

    Rotary embeddings pair the rows of a head in two ways: with (heads, 2, half, ...) and (0, 2, 1, ...), the
    first half's rows alternate with the second's.
    """
    return reshaped(turned(reshaped(tensor, split), order), tensor.shape)


def selected(tensor: Tensor, dim: int, index: int) -> Tensor:
    """`tensor.select(dim, index)`: one layer of a stack."""

    def without(sizes: Sequence[int]) -> Shape:
        return (*sizes[:dim], *sizes[dim + 1 :])

    def cut(box: Box) -> Box:
        def view() -> View:
            held = box.view
            at = held.offset + (index - box.offsets[dim]) * held.strides[dim]
            return View(held.source, at, without(held.strides))

        return Box(without(box.offsets), without(box.sizes), view)

    boxes = [cut(box) for box in tensor.boxes if 0 <= index - box.offsets[dim] < box.sizes[dim]]
    return Tensor(tensor.name, tensor.dtype, without(tensor.shape), boxes)


def turned(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """`tensor.permute(order)`."""

    def along(values: Sequence[int]) -> Shape:
        return tuple(values[dim] for dim in order)

    def turn(box: Box) -> Box:
        def view() -> View:
            held = box.view
            return View(held.source, held.offset, along(held.strides))

        return Box(along(box.offsets), along(box.sizes), view)

    return Tensor(tensor.name, tensor.dtype, along(tensor.shape), [turn(box) for box in tensor.boxes])


def reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor.reshape(shape)`."""
    return Tensor.contiguous(tensor.name, tensor.dtype, shape, _RowMajor(tensor))
