"""Slice, concatenate, transpose, permute, and reshape tensors lazily.

The elements of a result are read from the source tensors when the result is read. Slices and
concatenations select regions of the sources, which are strided views of the sources' bytes.
This requires that the bytes of a source are in row-major order. Some sources are stored in
another order, for example because they are split along their columns. For such a source,
`get_row_major_source` rearranges the elements while they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.converters.lazy_numpy import np
from portable.converters.tensors.computed_rows import build_computed_tensor
from portable.converters.tensors.dtypes import get_itemsize, to_numpy_dtype
from portable.converters.tensors.tensor import Box, Tensor, View, compute_row_major_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.converters.storage.byte_sources import ByteSource, UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Shape

# Size in bytes of a tile (the part of a transposed matrix that is read at once), minimum number of bytes to
# read from each row of the source, and maximum size of a tile. Each tile reads the complete height of the
# source, so at least a page should be read from each row if the tile does not become too large.
_TILE_BYTES, _MIN_ROW_BYTES, _LARGEST_TILE = 2 << 20, 4096, 32 << 20


class _RowMajorSource:
    """Byte source that reads the elements of any tensor in row-major order."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.nbytes

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Read bytes into a buffer. See `ByteSource.read_into`."""
        width = get_itemsize(self.tensor.dtype)
        low, start = divmod(offset, width)
        stop = -(-(offset + len(buffer)) // width)
        if start == 0 and len(buffer) % width == 0:
            self.tensor.fill_flat(
                np.frombuffer(buffer, to_numpy_dtype(self.tensor.dtype)), low, unverified_spans
            )
            return
        elements = np.empty(stop - low, to_numpy_dtype(self.tensor.dtype))
        self.tensor.fill_flat(elements, low, unverified_spans)
        buffer[:] = elements.view(np.uint8).data[start : start + len(buffer)]


def get_row_major_source(tensor: Tensor) -> ByteSource:
    """Return a byte source that contains a tensor's elements in row-major order.

    If the stored bytes are already in order, returns the stored source. Otherwise, the elements are
    rearranged when they are read.
    """
    return tensor.find_run() or _RowMajorSource(tensor)


def build_region_box(
    tensor: Tensor, offsets: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> Box:
    """Build a box of a new tensor. The box reads its elements from a region of an existing tensor.

    Args:
        tensor: Existing tensor.
        offsets: Start index of the box along each dimension of the new tensor.
        starts: Start index of the region along each dimension of `tensor`.
        sizes: Size of the region along each dimension.
    """
    strides = compute_row_major_strides(tensor.shape, get_itemsize(tensor.dtype))
    begin = sum(low * stride for low, stride in zip(starts, strides, strict=True))
    return Box(tuple(offsets), tuple(sizes), lambda: View(get_row_major_source(tensor), begin, strides))


def slice_tensor(tensor: Tensor, dim: int, start: int, count: int) -> Tensor:
    """Return the elements [start, start + count) along one dimension, as a lazy tensor."""
    lows, sizes = [0] * len(tensor.shape), list(tensor.shape)
    lows[dim], sizes[dim] = start, count
    return Tensor(tensor.name, tensor.dtype, sizes, [build_region_box(tensor, [0] * len(sizes), lows, sizes)])


def concat_tensors(name: str, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors lazily along one dimension.

    Args:
        name: Name of the result.
        tensors: Tensors to concatenate. The first tensor determines the dtype and the sizes of the
            other dimensions.
        dim: Dimension along which to concatenate.
    """
    shape, boxes = list(tensors[0].shape), []
    shape[dim] = 0
    for tensor in tensors:
        offsets = [0] * len(shape)
        offsets[dim] = shape[dim]
        boxes.append(build_region_box(tensor, offsets, [0] * len(offsets), tensor.shape))
        shape[dim] += tensor.shape[dim]
    return Tensor(name, tensors[0].dtype, shape, boxes)


def transpose_matrix(tensor: Tensor) -> Tensor:
    """Transpose a matrix lazily. Each read transposes a few columns of the source."""
    length, columns = tensor.shape
    size = get_itemsize(tensor.dtype)
    row = max(1, length * size)
    step = max(1, _TILE_BYTES // row, min(_MIN_ROW_BYTES // size, _LARGEST_TILE // row))

    def transpose_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        transposed_rows = np.empty((num_rows, length), to_numpy_dtype(tensor.dtype))
        below = np.empty((max(1, min(length, 1 << 8)), num_rows), transposed_rows.dtype)
        for low in range(0, length, len(below)):
            part = below[: min(len(below), length - low)]
            tensor.fill(part, (low, first_row), unverified_spans)
            transposed_rows[:, low : low + len(part)] = part.T
        return transposed_rows

    return build_computed_tensor(
        tensor.name, tensor.dtype, (columns, length), transpose_rows, block_elements=step * length
    )


def permute_split_dims(tensor: Tensor, split: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return `tensor.reshape(split).permute(order).reshape(tensor.shape)` lazily.

    For example, this converts between the two layouts of rotary embeddings. If a head has the rows
    [a0, a1, b0, b1], the split (heads, 2, 2, columns) and the order (0, 2, 1, 3) result in
    [a0, b0, a1, b1].

    Args:
        tensor: Tensor to permute.
        split: Intermediate shape, in which dimensions are split.
        order: Permutation of the dimensions of `split`.
    """
    return reshape_tensor(permute_dims(reshape_tensor(tensor, split), order), tensor.shape)


def select_index(tensor: Tensor, dim: int, index: int) -> Tensor:
    """Return `tensor.select(dim, index)` lazily, for example one layer of a stack."""

    def drop_dim(sizes: Sequence[int]) -> Shape:
        return (*sizes[:dim], *sizes[dim + 1 :])

    def select_box(box: Box) -> Box:
        def build_view() -> View:
            box_view = box.view
            offset = box_view.offset + (index - box.offsets[dim]) * box_view.strides[dim]
            return View(box_view.source, offset, drop_dim(box_view.strides))

        return Box(drop_dim(box.offsets), drop_dim(box.sizes), build_view)

    boxes = [select_box(box) for box in tensor.boxes if 0 <= index - box.offsets[dim] < box.sizes[dim]]
    return Tensor(tensor.name, tensor.dtype, drop_dim(tensor.shape), boxes)


def permute_dims(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return `tensor.permute(order)` lazily, by permuting the strides."""

    def permute_values(values: Sequence[int]) -> Shape:
        return tuple(values[dim] for dim in order)

    def permute_box(box: Box) -> Box:
        def build_view() -> View:
            box_view = box.view
            return View(box_view.source, box_view.offset, permute_values(box_view.strides))

        return Box(permute_values(box.offsets), permute_values(box.sizes), build_view)

    return Tensor(
        tensor.name, tensor.dtype, permute_values(tensor.shape), [permute_box(box) for box in tensor.boxes]
    )


def reshape_tensor(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `tensor.reshape(shape)` lazily, in row-major order."""
    return Tensor.from_source(tensor.name, tensor.dtype, shape, _RowMajorSource(tensor))
