"""Represent tensors that are stored in one or more pieces, and read slices of them on demand."""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import DamagedCheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import (
    ByteSource,
    ConcatenatedSources,
    FileSpan,
    SourceSlice,
    UnverifiedSpans,
)
from portable.converters.tensors.dtypes import get_itemsize, to_numpy_dtype, unpack_numbers
from portable.converters.tensors.tiling import check_boxes_cover_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeGuard

    Array = np.ndarray[Any, np.dtype[Any]]

Shape = tuple[int, ...]

# Size in bytes of the scratch buffer that each thread uses to copy non-contiguous regions.
SCRATCH_BYTES = 4 << 20
# PyTorch's limits on a tensor's size in bytes and on its number of dimensions. If a tensor in a file exceeds
# these limits, the file must be damaged, because PyTorch could not have written it.
_MAX_BYTES = (1 << 63) - 1
MAX_DIMS = 64
_thread_local = threading.local()


class View(NamedTuple):
    """Strided view of a byte source, similar to a `torch.Tensor`'s view of its storage.

    Attributes:
        source: Source that contains the elements.
        offset: Byte offset of the first element in `source`.
        strides: Stride of each dimension, in bytes.
    """

    source: ByteSource
    offset: int
    strides: Shape


class _Region(NamedTuple):
    """Start index and size of a tensor region along each dimension."""

    starts: Shape
    sizes: Shape


class Box:
    """Rectangular piece of a tensor, which covers the range [offset, offset + size) along each dimension.

    Args:
        offsets: Start index along each dimension of the tensor.
        sizes: Size along each dimension.
        view: `View` of the elements with shape `sizes`, or a function that returns one and is called on
            the first read.

    Attributes:
        offsets: Start index along each dimension of the tensor.
        sizes: Size along each dimension.
    """

    __slots__ = ("_cached_view", "_view_or_loader", "offsets", "sizes")

    def __init__(self, offsets: Shape, sizes: Shape, view: View | Callable[[], View]) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self._view_or_loader = view
        self._cached_view: View | None = None

    @property
    def view(self) -> View:
        """`View` of the elements.

        If the constructor received a function instead of a `View`, the function is called on the
        first access, and its result is cached until `release` is called.
        """
        if isinstance(self._view_or_loader, View):
            return self._view_or_loader
        # Use a local variable because another thread may call `release` before the view is returned.
        view = self._cached_view
        if view is None:
            view = self._cached_view = self._view_or_loader()
        return view

    @property
    def available_view(self) -> View | None:
        """`View` of the box's elements, or None if the view has not been computed yet.

        A box can be created with a function that computes its view on the first read. This property
        does not call the function. It only returns the result of an earlier call.
        """
        return self._view_or_loader if isinstance(self._view_or_loader, View) else self._cached_view

    def release(self) -> None:
        """Drop the cached view, so that the next read builds it again.

        The function that was passed to the constructor builds the view. Has no effect if a `View`
        was passed instead.
        """
        self._cached_view = None


class Tensor:
    """Model parameter, buffer, or optimizer state that is read on demand, one slice at a time.

    The tensor is stored as one or more boxes, for example one box per rank in a sharded checkpoint. Reading
    a slice loads only the parts of the boxes that overlap with it.

    Example:
        >>> from portable.converters import open_checkpoint
        >>> weight = open_checkpoint("runs/quickstart").tensors["model.embed_tokens.weight"]
        >>> first_rows = weight.read(slice(0, 16))

    Args:
        name: Name of the tensor, used in error messages.
        dtype: Safetensors dtype, such as `"F32"`, `"BF16"`, `"I64"`, or `"BOOL"`.
        shape: Full, unsharded shape of the tensor, or `()` for a scalar.
        boxes: Pieces of the tensor. Together, they must cover each element exactly once.

    Raises:
        CheckpointError: If the boxes leave gaps, overlap, or extend beyond the shape, or if the shape or the
            dtype is invalid.

    Attributes:
        name: Name of the tensor, used in error messages.
        dtype: Safetensors dtype, such as `"F32"`.
        shape: Full, unsharded shape of the tensor.
    """

    __slots__ = ("_boxes", "_contiguous_source", "_dim0_max_stops", "_dim0_starts", "dtype", "name", "shape")
    # None for a contiguous tensor until `boxes` is first accessed.
    _boxes: list[Box] | None
    # Source and byte offset, set only for a contiguous tensor.
    _contiguous_source: tuple[ByteSource, int]

    def __init__(self, name: str, dtype: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        shape = check_shape(name, dtype, shape)
        check_boxes_cover_once(name, shape, [(box.offsets, box.sizes) for box in boxes])
        self._set_fields(name, dtype, shape, boxes)

    def _set_fields(self, name: str, dtype: str, shape: Shape, boxes: Sequence[Box]) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        nonempty_boxes = sorted((box for box in boxes if prod(box.sizes)), key=lambda box: box.offsets)
        self._boxes = nonempty_boxes
        # Start of each box along dimension 0, and the running maximum of the stops. Both lists are sorted, so
        # `find_overlapping_boxes` can bisect them.
        self._dim0_starts = [box.offsets[0] for box in nonempty_boxes] if self.shape else []
        stops = (box.offsets[0] + box.sizes[0] for box in nonempty_boxes) if self.shape else ()
        self._dim0_max_stops = list(accumulate(stops, max))

    @classmethod
    def from_source(
        cls, name: str, dtype: str, shape: Sequence[int], source: ByteSource, offset: int = 0
    ) -> Tensor:
        """Create a tensor whose elements are contiguous in a single source, in row-major order.

        Args:
            name: Name of the tensor, used in error messages.
            dtype: Safetensors dtype, such as `"F32"`.
            shape: Shape of the tensor.
            source: Source that contains the elements.
            offset: Byte offset of the first element in `source`.

        Returns:
            The new tensor.

        Raises:
            CheckpointError: If the shape or the dtype is invalid.
        """
        # Delay creating the box until it is accessed, because a checkpoint may contain 100,000 tensors.
        tensor = cls.__new__(cls)
        tensor.name, tensor.dtype, tensor.shape = name, dtype, check_shape(name, dtype, shape)
        tensor._boxes, tensor._contiguous_source = None, (source, offset)
        return tensor

    @property
    def boxes(self) -> Sequence[Box]:
        """Pieces of the tensor. Together, they cover each element exactly once. Empty for an empty tensor."""
        if self._boxes is None:
            source, offset = self._contiguous_source
            view = View(source, offset, compute_row_major_strides(self.shape, get_itemsize(self.dtype)))
            self._boxes = [] if 0 in self.shape else [Box((0,) * len(self.shape), self.shape, view)]
        return self._boxes

    @property
    def pieces(self) -> int:
        """Number of boxes (stored pieces) of the tensor, or 0 if the tensor is empty."""
        return int(0 not in self.shape) if self._boxes is None else len(self._boxes)

    @property
    def numel(self) -> int:
        """Number of elements in the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Total size in bytes of the elements in their stored dtype."""
        return self.numel * get_itemsize(self.dtype)

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def read(self, index: tuple[slice, ...] | slice | None = None, out: Array | None = None) -> Array:
        """Read the tensor or a slice of it.

        If the checkpoint contains CRCs for the data, they are verified.

        Args:
            index: Slice or tuple of slices, as in `array[index]`. Each slice must have a step of 1, and there
                can be at most one slice per dimension. If None, the entire tensor is read.
            out: Contiguous array to read into, with the shape of the result and the tensor's dtype. For
                dtypes that NumPy does not support natively (`BF16` and the 8-bit floats), it may also be an
                integer array with the same item size. The array then receives the raw bits of the elements.

        Returns:
            `out` if it was passed, otherwise a new array. The array is 0-D for a scalar. For `BF16` and the
            8-bit floats, the dtype of a new array comes from the `ml_dtypes` package.

        Raises:
            CheckpointError: If a file is missing, truncated, or damaged.
            ValueError: If `index` or `out` is not compatible with the tensor.
        """
        starts, sizes = self._resolve_index(index)
        dtype = to_numpy_dtype(self.dtype)
        if out is None:
            out = np.empty(sizes, dtype)
        elif out.shape != sizes:
            raise ValueError(
                f"{self.name}: out has shape {out.shape}, but the slice has shape {sizes}; "
                "pass an array with the same shape as the slice"
            )
        elif out.dtype != dtype and not (
            dtype.kind == "V" and out.dtype.kind in "iu" and out.dtype.itemsize == dtype.itemsize
        ):
            raise ValueError(
                f"{self.name}: out has dtype {out.dtype}, but the tensor has dtype {dtype}; "
                "pass an array with the same dtype as the tensor"
            )
        elif not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(
                f"{self.name}: out is not contiguous or not writable; pass a contiguous, writable array"
            )
        unverified_spans: UnverifiedSpans = set()
        self.fill(out.view(dtype), starts, unverified_spans)
        for span in unverified_spans:
            span.verify_crc()
        return out

    def fill(self, out: Array, starts: Shape, unverified_spans: UnverifiedSpans) -> None:
        """Read a region of the tensor into an array without verifying the stored CRCs.

        Args:
            out: Array to read into, with the shape of the region and the tensor's NumPy dtype. It may have
                any memory layout.
            starts: Start index of the region along each dimension.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet. Call
                `FileSpan.verify_crc` on each span before using the data.
        """
        if out.size == 0:
            return
        for box in self.find_overlapping_boxes(starts, out.shape):
            out_slices, box_starts = [], []
            for start, size, box_offset, box_size in zip(
                starts, out.shape, box.offsets, box.sizes, strict=True
            ):
                first, stop = max(start, box_offset), min(start + size, box_offset + box_size)
                if first >= stop:
                    break
                out_slices.append(slice(first - start, stop - start))
                box_starts.append(first - box_offset)
            else:
                view = box.view
                offset = view.offset + sum(
                    i * stride for i, stride in zip(box_starts, view.strides, strict=True)
                )
                overlap = out[tuple(out_slices)] if out_slices else out
                _copy_region(overlap, view.source, offset, view.strides, unverified_spans)

    def iter_blocks(self, nbytes: int, unverified_spans: UnverifiedSpans) -> Iterator[Array]:
        """Iterate over blocks of elements in row-major order without verifying the stored CRCs.

        All blocks share the same buffer, so each block is valid only until the next block is requested.

        Args:
            nbytes: Maximum block size in bytes. Each block contains at least one element.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet. Call
                `FileSpan.verify_crc` on each span before using the data.

        Yields:
            Blocks of elements as 1-D arrays.
        """
        dtype = to_numpy_dtype(self.dtype)
        block_numel, row_numel = max(1, nbytes // dtype.itemsize), 1
        # Each block consists of complete rows. A row is the largest block of trailing dimensions that fits.
        for size in reversed(self.shape):
            if row_numel * size > block_numel:
                break
            row_numel *= max(1, size)
        block_numel -= block_numel % row_numel
        buffer, source = (
            np.empty(min(block_numel, self.numel), dtype),
            self.find_run() if self.numel else None,
        )
        for start in range(0, self.numel, block_numel):
            block = buffer[: self.numel - start]
            if source is None:
                self.fill_flat(block, start, unverified_spans)
            else:
                source.read_into(block.view(np.uint8).data, start * dtype.itemsize, unverified_spans)
            yield block

    def tolist(self) -> Any:
        """Read the tensor as a Python number or nested lists of numbers, like `torch.Tensor.tolist`.

        A scalar is read without importing NumPy if Python supports its dtype.
        """
        if not self.shape:
            unverified_spans: UnverifiedSpans = set()
            data = b"".join(map(bytes, self.iter_byte_blocks(self.nbytes, unverified_spans)))
            for span in unverified_spans:
                span.verify_crc()
            if (numbers := unpack_numbers(self.dtype, data)) is not None:
                return numbers[0]
        return self.read().tolist()

    def iter_byte_blocks(self, nbytes: int, unverified_spans: UnverifiedSpans) -> Iterator[memoryview]:
        """Iterate over the bytes of the elements in row-major order, in blocks that share one buffer.

        Unlike `iter_blocks`, this method does not use NumPy if the tensor's elements are stored in order.

        Args:
            nbytes: Maximum block size in bytes. Each block contains at least one element.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet. Call
                `FileSpan.verify_crc` on each span before using the data.

        Yields:
            Blocks of bytes.
        """
        source = self.find_run() if self.numel else None
        if source is None:
            for block in self.iter_blocks(nbytes, unverified_spans):
                yield block.view(np.uint8).data
            return
        size = get_itemsize(self.dtype)
        buffer = memoryview(bytearray(min(max(1, nbytes // size) * size, self.nbytes)))
        for start in range(0, self.nbytes, len(buffer)):
            data = buffer[: self.nbytes - start]
            source.read_into(data, start, unverified_spans)
            yield data

    def fill_flat(
        self, out: Array, start: int, unverified_spans: UnverifiedSpans, prefix: Shape = ()
    ) -> None:
        """Read consecutive elements in row-major order into a 1-D array without verifying the stored CRCs.

        Args:
            out: Contiguous 1-D array to read into, with the tensor's NumPy dtype.
            start: Index of the first element to read in the flattened sub-tensor that `prefix` selects.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet. Call
                `FileSpan.verify_crc` on each span before using the data.
            prefix: Indices along the leading dimensions, which select a sub-tensor. By default, elements
                are read from the entire tensor.
        """
        trailing_shape = self.shape[len(prefix) :]
        if not trailing_shape:
            self.fill(out.reshape((1,) * len(prefix)), prefix, unverified_spans)
            return
        row_numel = prod(trailing_shape[1:])
        while out.size:
            row, offset = divmod(start, row_numel)
            if offset or out.size < row_numel:
                count = min(row_numel - offset, out.size)
                self.fill_flat(out[:count], offset, unverified_spans, (*prefix, row))
            else:
                num_rows = out.size // row_numel
                count = num_rows * row_numel
                shape = ((1,) * len(prefix)) + (num_rows, *trailing_shape[1:])
                self.fill(
                    out[:count].reshape(shape),
                    (*prefix, row, *[0] * (len(trailing_shape) - 1)),
                    unverified_spans,
                )
            start, out = start + count, out[count:]

    def iter_blocks_then_verify(self, nbytes: int) -> Iterator[Array]:
        """Iterate over the same blocks as `iter_blocks`, and verify the stored CRCs after the last block.

        Args:
            nbytes: Maximum block size in bytes. Each block contains at least one element.

        Yields:
            Blocks of elements as 1-D arrays. Each block is valid only until the next block is requested.

        Raises:
            CheckpointError: If a file is missing, truncated, or damaged. A CRC mismatch is only detected
                after the last block.
        """
        unverified_spans: UnverifiedSpans = set()
        yield from self.iter_blocks(nbytes, unverified_spans)
        for span in unverified_spans:
            span.verify_crc()

    # Alias, because the method had this name in earlier versions.
    iter_verified_blocks = iter_blocks_then_verify

    def release(self) -> None:
        """Release the data cached by previous reads. The tensor can still be read afterward."""
        for box in self._boxes or ():
            box.release()

    def find_span(self, *, located: bool = False) -> FileSpan | None:
        """Return the file span that contains exactly the tensor's elements, in row-major order.

        The bytes of the span can be copied directly from one file to another.

        Args:
            located: Whether to use only locations that are already known. The result is then None
                if a file would have to be read to locate the elements.

        Returns:
            The span, or None if the elements are not contiguous in one file or their CRC has not
            been verified yet.
        """
        if len(self.boxes) != 1 or self.boxes[0].sizes != self.shape:
            return None
        view = self.boxes[0].available_view if located else self.boxes[0].view
        if view is None:
            return None
        span = view.source
        if not isinstance(span, FileSpan) or not span.is_verified:
            return None
        if view.strides != compute_row_major_strides(self.shape, get_itemsize(self.dtype)):
            return None
        return span.file.get_span(span.offset + view.offset, self.nbytes)

    def find_run(self) -> ByteSource | None:
        """Find a byte source that contains exactly the tensor's elements, in row-major order.

        Returns:
            The source. None if the tensor is split along a dimension other than 0, if the elements
            of a box (a stored piece) are not in row-major order, or if the byte source of a box is
            too short.
        """
        strides = compute_row_major_strides(self.shape, get_itemsize(self.dtype))
        sources = []
        for box in self.boxes:
            if box.sizes[1:] != self.shape[1:]:
                return None
            view = box.view
            nbytes = box.sizes[0] * strides[0] if strides else get_itemsize(self.dtype)
            strides_differ = any(
                size > 1 and stride != box_stride
                for size, stride, box_stride in zip(box.sizes, strides, view.strides, strict=True)
            )
            if strides_differ or view.offset + nbytes > view.source.nbytes:
                return None
            sources.append(SourceSlice(view.source, view.offset, nbytes))
        return sources[0] if len(sources) == 1 else ConcatenatedSources(sources)

    def _resolve_index(self, index: tuple[slice, ...] | slice | None) -> _Region:
        """Convert an index to a start and a size along each dimension.

        Raises:
            ValueError: If there are too many slices, or if a slice has a step other than 1.
        """
        slices = () if index is None else (index,) if isinstance(index, slice) else tuple(index)
        if len(slices) > len(self.shape):
            raise ValueError(
                f"{self.name}: the index has more slices ({len(slices)}) than the tensor has dimensions "
                f"({len(self.shape)}); pass at most one slice per dimension"
            )
        starts, sizes = [], []
        for dim, length in enumerate(self.shape):
            dim_slice = slices[dim] if dim < len(slices) else slice(None)
            if not isinstance(dim_slice, slice) or dim_slice.step not in (None, 1):
                raise ValueError(
                    f"{self.name}: the index {dim_slice!r} is not supported; pass slices with a step of 1"
                )
            start, stop, _ = dim_slice.indices(length)
            starts.append(start)
            sizes.append(max(0, stop - start))
        return _Region(tuple(starts), tuple(sizes))

    def find_overlapping_boxes(self, starts: Shape, sizes: Shape) -> Sequence[Box]:
        """Return the boxes that may overlap a region. Only compares their extents along dimension 0."""
        boxes = self.boxes
        if not starts or len(boxes) <= 1:
            return boxes
        first = bisect_right(self._dim0_max_stops, starts[0])
        last = bisect_right(self._dim0_starts, starts[0] + sizes[0] - 1)
        return boxes[first:last]


def is_shape(value: Any) -> TypeGuard[Sequence[int]]:
    """Return whether a value read from a file is a valid shape, or valid offsets or strides.

    Call this function before multiplying the numbers. A damaged file may contain negative numbers, or
    numbers so large that computing their product would take a very long time.

    Args:
        value: Any value parsed from a file.

    Returns:
        True if the value is a list or tuple of at most `MAX_DIMS` integers in the range [0, 2**63).
    """
    return (
        type(value) in (tuple, list)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def check_shape(name: str, dtype: str, shape: Sequence[int]) -> Shape:
    """Check that a shape is within PyTorch's limits, and return it as a tuple.

    A damaged file may contain numbers so large that computing their product would take a very long
    time. Therefore, the number of dimensions and the sizes are checked before they are multiplied.

    Args:
        name: Name of the tensor, used in error messages.
        dtype: Safetensors dtype, such as `"F32"`.
        shape: Shape to check.

    Returns:
        The shape as a tuple.

    Raises:
        CheckpointError: If the shape has too many dimensions or a negative size, if the tensor is too
            large, or if the dtype is unknown.
    """
    shape = tuple(shape)
    if len(shape) > MAX_DIMS:
        raise DamagedCheckpointError(
            f"{name}: the shape has {len(shape)} dimensions, but PyTorch supports at most {MAX_DIMS}"
        )
    if shape and not 0 <= min(shape) <= max(shape) <= _MAX_BYTES:
        raise DamagedCheckpointError(
            f"{name}: the shape contains a size that is negative or larger than 2**63 - 1"
        )
    if prod(shape) * get_itemsize(dtype) > _MAX_BYTES:
        raise DamagedCheckpointError(
            f"{name}: a tensor with the shape {list(shape)} would have more than 2**63 - 1 bytes"
        )
    return shape


def compute_row_major_strides(shape: Sequence[int], itemsize: int) -> Shape:
    """Return the strides of a contiguous array in row-major order.

    Args:
        shape: Shape of the array.
        itemsize: Element size in bytes.

    Returns:
        Stride of each dimension, in bytes.
    """
    strides, stride = [], itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))


def _copy_region(
    out: Array, source: ByteSource, offset: int, strides: Shape, unverified_spans: UnverifiedSpans
) -> None:
    """Copy a strided region of a source into an array, using a bounded amount of memory.

    Args:
        out: Array to copy into, with the shape of the region and any memory layout.
        source: Source that contains the region.
        offset: Byte offset of the region's first element in `source`.
        strides: Strides of the region in `source`, in bytes.
        unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
    """
    itemsize = out.itemsize
    dims = [dim for dim, size in enumerate(out.shape) if size != 1]
    if len(dims) < out.ndim:
        out = out[tuple(slice(None) if size != 1 else 0 for size in out.shape)] if dims else out.reshape(())
        strides = tuple(strides[dim] for dim in dims)
    if out.flags.c_contiguous and strides == compute_row_major_strides(out.shape, itemsize):
        source.read_into(out.reshape(-1).view(np.uint8).data, offset, unverified_spans)
        return
    # A compressed source exposes its decompressed content as a buffer, so copy the region out of it directly.
    load_content: Callable[[int, UnverifiedSpans], memoryview] | None = getattr(source, "load_content", None)
    if load_content is not None:
        content = load_content(out.nbytes, unverified_spans)
        out[...] = np.ndarray(out.shape, out.dtype, buffer=content, offset=offset, strides=strides)
        return
    nbytes = itemsize + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
    if nbytes <= SCRATCH_BYTES:
        scratch = _get_scratch_buffer()[:nbytes]
        source.read_into(scratch, offset, unverified_spans)
        out[...] = np.ndarray(out.shape, out.dtype, buffer=scratch, strides=strides)
        return
    # The region does not fit in the scratch buffer, so split it along the dimension with the largest stride.
    # Below, a "row" is the part of the region at a single index along this dimension.
    dim = max(range(out.ndim), key=lambda d: (strides[d], out.shape[d]))
    stride, row_nbytes = strides[dim], nbytes - (out.shape[dim] - 1) * strides[dim]
    # If the rows are long and far apart, read them one at a time, because a larger read would mostly fetch
    # the gaps between them. Otherwise, fill the scratch buffer with several rows per read.
    sparse = stride > 2 * row_nbytes and row_nbytes >= 1 << 15
    rows_per_read = (
        1
        if sparse or row_nbytes + stride > SCRATCH_BYTES
        else 1 + (SCRATCH_BYTES - row_nbytes) // max(1, stride)
    )
    leading_slices = (slice(None),) * dim
    for row in range(0, out.shape[dim], rows_per_read):
        row_slices = (*leading_slices, slice(row, row + rows_per_read))
        _copy_region(out[row_slices], source, offset + row * stride, strides, unverified_spans)


def _get_scratch_buffer() -> memoryview:
    """Return the current thread's scratch buffer, which has at least `SCRATCH_BYTES` bytes.

    Allocated on the first call in each thread.
    """
    buffer: memoryview | None = getattr(_thread_local, "scratch", None)
    if buffer is None or len(buffer) < SCRATCH_BYTES:
        # np.empty only reserves address space. Physical memory is allocated when a page is first accessed.
        buffer = _thread_local.scratch = np.empty(SCRATCH_BYTES, np.uint8).data
    return buffer
