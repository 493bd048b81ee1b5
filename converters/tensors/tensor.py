"""A tensor stored in pieces, read slice by slice."""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from converters.errors import CheckpointError
from converters.storage.bytes import FileSpan, Joined, Slice, Source, Touched
from converters.tensors.dtypes import numpy_dtype
from converters.tensors.tiling import check_boxes_tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeGuard

Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]

# Non-contiguous pieces are gathered through a buffer of this size.
SCRATCH_BYTES = 4 << 20
# torch's own limit; a header with more is damaged.
_MAX_BYTES = (1 << 63) - 1
MAX_DIMS = 64
_local = threading.local()


class View(NamedTuple):
    """Where an n-dimensional piece lies in a source: a torch tensor's view of its storage, in bytes."""

    source: Source
    offset: int
    strides: Shape


class Box:
    """A piece of a tensor: the elements [offset, offset + size) along every dimension.

    `view` is a `View` whose shape is `sizes`, or a function that returns it, called at the first read.
    """

    __slots__ = ("_found", "_view", "offsets", "sizes")

    def __init__(self, offsets: Shape, sizes: Shape, view: View | Callable[[], View]) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self._view = view
        self._found: View | None = None

    @property
    def view(self) -> View:
        if isinstance(self._view, View):
            return self._view
        found = self._found  # another thread may call `release` in between
        if found is None:
            found = self._found = self._view()
        return found

    @property
    def located(self) -> View | None:
        """The view, if it is known without calling the function."""
        return self._view if isinstance(self._view, View) else self._found

    def release(self) -> None:
        """Drop what the function returned; the next read calls it again."""
        self._found = None


class Tensor:
    """One parameter, buffer or optimizer state: dtype, shape, and the file spans that tile it.

    Attributes:
        name: for error messages.
        dtype: the element type by its safetensors name (`"F32"`, `"BF16"`, `"I64"`, `"BOOL"`, ...).
        shape: the full shape, whatever world size wrote it; `()` for a scalar.

    Raises:
        CheckpointError: the pieces leave a gap, overlap or exceed the shape, or the dtype is unknown.
    """

    __slots__ = ("_boxes", "_reach", "_starts", "_whole", "dtype", "name", "shape")
    _boxes: list[Box] | None
    _whole: tuple[Source, int]

    def __init__(self, name: str, dtype: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        shape = possible_shape(name, dtype, shape)
        check_boxes_tile(name, shape, [(box.offsets, box.sizes) for box in boxes])
        self._place(name, dtype, shape, boxes)

    def _place(self, name: str, dtype: str, shape: Shape, boxes: Sequence[Box]) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        held = sorted((box for box in boxes if prod(box.sizes)), key=lambda box: box.offsets)
        self._boxes = held
        # For finding the boxes that meet a region along dim 0: the start of each, and the largest end so far.
        self._starts = [box.offsets[0] for box in held] if self.shape else []
        ends = (box.offsets[0] + box.sizes[0] for box in held) if self.shape else ()
        self._reach = list(accumulate(ends, max))

    @classmethod
    def contiguous(
        cls, name: str, dtype: str, shape: Sequence[int], source: Source, offset: int = 0
    ) -> Tensor:
        """A tensor stored whole and row-major in `source`, from byte `offset`."""
        # Its one box is made when it is asked for: a checkpoint may have 100,000 of them.
        made = cls.__new__(cls)
        made.name, made.dtype, made.shape = name, dtype, possible_shape(name, dtype, shape)
        made._boxes, made._whole = None, (source, offset)
        return made

    @property
    def boxes(self) -> Sequence[Box]:
        """The pieces, which tile the shape exactly once (checked on construction)."""
        if self._boxes is None:
            source, offset = self._whole
            view = View(source, offset, row_major(self.shape, numpy_dtype(self.dtype).itemsize))
            self._boxes = [] if 0 in self.shape else [Box((0,) * len(self.shape), self.shape, view)]
        return self._boxes

    @property
    def pieces(self) -> int:
        """Number of boxes."""
        return int(0 not in self.shape) if self._boxes is None else len(self._boxes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in its own dtype."""
        return self.numel * numpy_dtype(self.dtype).itemsize

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def read(self, index: tuple[slice, ...] | slice | None = None, out: Array | None = None) -> Array:
        """Read the tensor, or only the part `array[index]` of it.

        Args:
            index: slices of step 1, at most one per dimension; None reads everything.
            out: a contiguous array to fill, of the shape of the result and the tensor's dtype; for dtypes
                that numpy lacks (BF16, F8_*) an integer array of the same width receives the bits.

        Returns:
            `out`, or a new array, 0-d for a scalar; BF16 and F8_* have a dtype of `ml_dtypes`.

        Raises:
            CheckpointError: a file is missing, short or damaged; stored CRCs of what is read are checked.
            ValueError: `index` or `out` does not fit the tensor.
        """
        lows, sizes = self._region(index)
        kind = numpy_dtype(self.dtype)
        if out is None:
            out = np.empty(sizes, kind)
        elif out.shape != sizes:
            raise ValueError(f"{self.name}: out has shape {out.shape}, the slice has {sizes}")
        elif out.dtype != kind and not (
            kind.kind == "V" and out.dtype.kind in "iu" and out.dtype.itemsize == kind.itemsize
        ):
            raise ValueError(f"{self.name}: out has dtype {out.dtype}, the tensor {kind}")
        elif not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(f"{self.name}: out must be contiguous and writeable")
        touched: Touched = set()
        self.fill(out.view(kind), lows, touched)
        for span in touched:
            span.verify()
        return out

    def fill(self, out: Array, lows: Shape, touched: Touched) -> None:
        """Fill `out` with the region that starts at `lows`; the caller must verify the spans in `touched`."""
        if out.size == 0:
            return
        for box in self.overlapping(lows, out.shape):
            target, start = [], []
            for low, size, offset, length in zip(lows, out.shape, box.offsets, box.sizes, strict=True):
                first, last = max(low, offset), min(low + size, offset + length)
                if first >= last:
                    break
                target.append(slice(first - low, last - low))
                start.append(first - offset)
            else:
                view = box.view
                at = view.offset + sum(i * stride for i, stride in zip(start, view.strides, strict=True))
                part = out[tuple(target)] if target else out
                _gather(part, view.source, at, view.strides, touched)

    def blocks(self, nbytes: int, touched: Touched) -> Iterator[Array]:
        """The elements in row-major order, in flat blocks of at most `nbytes`, each valid until the next.

        The caller must verify the spans in `touched` before it trusts the bytes.
        """
        kind = numpy_dtype(self.dtype)
        step, inner = max(1, nbytes // kind.itemsize), 1
        for size in reversed(self.shape):  # as many whole rows as fit
            if inner * size > step:
                break
            inner *= max(1, size)
        step -= step % inner
        buffer, run = np.empty(min(step, self.numel), kind), self.run() if self.numel else None
        for start in range(0, self.numel, step):
            block = buffer[: self.numel - start]
            if run is None:
                self.fill_flat(block, start, touched)
            else:
                run.read_into(block.view(np.uint8).data, start * kind.itemsize, touched)
            yield block

    def fill_flat(self, out: Array, start: int, touched: Touched, prefix: Shape = ()) -> None:
        """Fill the flat `out` from element `start` of the rows below `prefix`, in row-major order."""
        rest = self.shape[len(prefix) :]
        if not rest:
            self.fill(out.reshape((1,) * len(prefix)), prefix, touched)
            return
        inner = prod(rest[1:])
        while out.size:
            row, offset = divmod(start, inner)
            if offset or out.size < inner:
                count = min(inner - offset, out.size)
                self.fill_flat(out[:count], offset, touched, (*prefix, row))
            else:
                rows = out.size // inner
                count = rows * inner
                shape = ((1,) * len(prefix)) + (rows, *rest[1:])
                self.fill(out[:count].reshape(shape), (*prefix, row, *[0] * (len(rest) - 1)), touched)
            start, out = start + count, out[count:]

    def verified_blocks(self, nbytes: int) -> Iterator[Array]:
        """`blocks`, with all stored CRCs checked after the last."""
        touched: Touched = set()
        yield from self.blocks(nbytes, touched)
        for span in touched:
            span.verify()

    def release(self) -> None:
        """Free what reading has cached, once the tensor has been written."""
        for box in self._boxes or ():
            box.release()

    def whole_span(self, *, located: bool = False) -> FileSpan | None:
        """The row-major bytes of the tensor, if they are contiguous in one file and need no CRC check.

        Args:
            located: None, too, if a file would have to be read to know it.
        """
        if len(self.boxes) != 1 or self.boxes[0].sizes != self.shape:
            return None
        view = self.boxes[0].located if located else self.boxes[0].view
        if view is None:
            return None
        span = view.source
        if not isinstance(span, FileSpan) or not span.resolved:
            return None
        if view.strides != row_major(self.shape, numpy_dtype(self.dtype).itemsize):
            return None
        return span.file.span(span.offset + view.offset, self.nbytes)

    def run(self) -> Source | None:
        """All bytes as one row-major source, if every piece is row-major and cut along dim 0 only."""
        strides = row_major(self.shape, numpy_dtype(self.dtype).itemsize)
        parts = []
        for box in self.boxes:
            if box.sizes[1:] != self.shape[1:]:
                return None
            view = box.view
            nbytes = box.sizes[0] * strides[0] if strides else numpy_dtype(self.dtype).itemsize
            differ = any(
                size > 1 and ours != theirs
                for size, ours, theirs in zip(box.sizes, strides, view.strides, strict=True)
            )
            if differ or view.offset + nbytes > view.source.nbytes:
                return None
            parts.append(Slice(view.source, view.offset, nbytes))
        return parts[0] if len(parts) == 1 else Joined(parts)

    def _region(self, index: tuple[slice, ...] | slice | None) -> tuple[Shape, Shape]:
        slices = () if index is None else (index,) if isinstance(index, slice) else tuple(index)
        if len(slices) > len(self.shape):
            raise ValueError(f"{self.name}: {len(slices)} slices for {len(self.shape)} dimensions")
        lows, sizes = [], []
        for dim, length in enumerate(self.shape):
            part = slices[dim] if dim < len(slices) else slice(None)
            if not isinstance(part, slice) or part.step not in (None, 1):
                raise ValueError(f"{self.name}: only slices of step 1 can be read, not {part!r}")
            start, stop, _ = part.indices(length)
            lows.append(start)
            sizes.append(max(0, stop - start))
        return tuple(lows), tuple(sizes)

    def overlapping(self, lows: Shape, sizes: Shape) -> Sequence[Box]:
        """The boxes that may meet the region, judged along dim 0."""
        boxes = self.boxes
        if not lows or len(boxes) <= 1:
            return boxes
        first = bisect_right(self._reach, lows[0])
        last = bisect_right(self._starts, lows[0] + sizes[0] - 1)
        return boxes[first:last]


def is_shape(value: Any) -> TypeGuard[Sequence[int]]:
    """Whether a value of a file is a shape, or the offsets in one. Checked before any product is taken."""
    return (
        type(value) in (tuple, list)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )


def possible_shape(name: str, dtype: str, shape: Sequence[int]) -> Shape:
    """`shape` as a tuple; CheckpointError if no tensor can have it. Checked before any product is taken."""
    shape = tuple(shape)
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{name}: impossible shape, of {len(shape)} dimensions")
    if shape and not 0 <= min(shape) <= max(shape) <= _MAX_BYTES:
        raise CheckpointError(f"{name}: impossible shape, a size is negative or beyond 2**63")
    if prod(shape) * numpy_dtype(dtype).itemsize > _MAX_BYTES:
        raise CheckpointError(f"{name}: impossible shape {list(shape)}")
    return shape


def row_major(shape: Sequence[int], itemsize: int) -> Shape:
    """Byte strides of a contiguous array of `shape`."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _gather(out: Array, source: Source, at: int, strides: Shape, touched: Touched) -> None:
    """Copy a strided region of `source` into `out`, in bounded memory.

    Args:
        out: of any memory layout.
        source: the bytes to read.
        at: byte offset of the region's first element.
        strides: of the region in `source`, in bytes.
        touched: receives the files that are read.
    """
    width = out.itemsize
    dims = [dim for dim, size in enumerate(out.shape) if size != 1]
    if len(dims) < out.ndim:
        out = out[tuple(slice(None) if size != 1 else 0 for size in out.shape)] if dims else out.reshape(())
        strides = tuple(strides[dim] for dim in dims)
    if out.flags.c_contiguous and strides == row_major(out.shape, width):
        source.read_into(out.reshape(-1).view(np.uint8).data, at, touched)
        return
    held: Callable[[int, Touched], memoryview] | None = getattr(source, "held", None)
    if held is not None:  # its bytes are in memory: compressed ones
        whole = held(out.nbytes, touched)
        out[...] = np.ndarray(out.shape, out.dtype, buffer=whole, offset=at, strides=strides)
        return
    span = width + sum((size - 1) * stride for size, stride in zip(out.shape, strides, strict=True))
    if span <= SCRATCH_BYTES:
        scratch = _scratch()[:span]
        source.read_into(scratch, at, touched)
        out[...] = np.ndarray(out.shape, out.dtype, buffer=scratch, strides=strides)
        return
    dim = max(range(out.ndim), key=lambda d: (strides[d], out.shape[d]))
    step, rest = strides[dim], span - (out.shape[dim] - 1) * strides[dim]
    # Read long rows that are far apart one by one, others as many at a time as the scratch buffer holds.
    sparse = step > 2 * rest and rest >= 1 << 15
    count = 1 if sparse or rest + step > SCRATCH_BYTES else 1 + (SCRATCH_BYTES - rest) // max(1, step)
    before = (slice(None),) * dim
    for row in range(0, out.shape[dim], count):
        rows = (*before, slice(row, row + count))
        _gather(out[rows], source, at + row * step, strides, touched)


def _scratch() -> memoryview:
    buffer: memoryview | None = getattr(_local, "scratch", None)
    if buffer is None or len(buffer) < SCRATCH_BYTES:
        buffer = _local.scratch = np.empty(SCRATCH_BYTES, np.uint8).data  # pages that are used take memory
    return buffer
