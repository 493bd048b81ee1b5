"""Compare what several files of a run hold alike, by samples of the values.

Below stage 3 the model states hold every weight in the compute dtype: after each step, the rounded master. A
sample of values from every rank shows whether the files were saved together and are in the right order.
"""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import CheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import FileSpan, Slice
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.dtypes import get_itemsize, to_numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from portable.converters.formats.deepspeed.flat_layout import EqualSlices, Flat, FlatPiece, ParameterShare
    from portable.converters.storage.byte_sources import Source
    from portable.converters.tensors.tensor import Array, Tensor

# Elements at the start, in the middle and at the end of each tensor, about.
_SAMPLE = 4096
# Sampled from each rank: about this many parameters, and elements of each.
_FRAGMENTS = 16
_ELEMENTS = 64


def check_copies(copies: Sequence[Tensor], location: str, why: str = "files of two runs or steps") -> None:
    """CheckpointError, with a reason, if the ranks' copies of one tensor differ."""
    first, *others = copies
    sample = [part.tobytes() for part in _sample(first)]
    for other in others:
        alike = (other.shape, other.dtype) == (first.shape, first.dtype)
        if not alike or [part.tobytes() for part in _sample(other)] != sample:
            raise CheckpointError(f"{location}: the ranks' copies of it differ; {why}")


def rounds_to_copy(master: Tensor, copy: Tensor) -> bool:
    """Whether a master, rounded to the dtype of its copy of the same shape, equals it; NaN equals NaN."""
    for ours, theirs in zip(_sample(master), _sample(copy), strict=True):
        cast = round_to_dtype(ours, copy.dtype)
        if not np.all((cast == theirs) | ((cast != cast) & (theirs != theirs))):
            return False
    return True


def _sample(tensor: Tensor) -> list[Array]:
    if not tensor.shape:
        return [tensor.read()]
    rows = tensor.shape[0]
    count = max(1, _SAMPLE * rows // max(1, tensor.numel))
    starts = sorted({0, max(0, rows // 2 - count // 2), max(0, rows - count)})
    return [tensor.read(slice(start, start + count)) for start in starts]


def check_against_module(
    layout: EqualSlices,
    share: ParameterShare,
    flat: Flat,
    weights: Mapping[str, Any],
    location: str,
    *,
    elsewhere: Collection[str] = (),
    zenflow: bool = False,
    ranks: Sequence[int] | None = None,
) -> int:
    """Compare shapes and a sample of values; returns how many were compared.

    Args:
        weights: the pickled weights, by their names in the whole model.
        elsewhere: names that may be missing in `weights`.
        zenflow: masters are newer than the weights, so values are not compared.
        ranks: positions of the ranks whose slices are compared; None for all.

    Raises:
        CheckpointError: shape, position in the flat buffer or values differ.
    """
    stored: dict[str, StoredTensor] = {}
    for name, shape in layout.shapes.items():
        whole = share.names[name]
        value = weights.get(whole)
        if value is None and whole in elsewhere:
            continue
        if not isinstance(value, StoredTensor) or value.shape != shape:
            raise CheckpointError(
                f"{location}: {whole!r} is missing or not of the recorded shape {list(shape)}"
            )
        stored[name] = value
    _check_positions(layout, stored, location)
    if zenflow:
        return 0
    compared = 0
    for rank in range(layout.world) if ranks is None else ranks:
        fragments = [fragment for fragment in layout.find_fragments(rank).items() if fragment[0] in stored]
        every = max(1, len(fragments) // _FRAGMENTS)
        for name, (start, count) in fragments[::every]:
            within = rank * layout.slice + start - layout.starts[name]
            same = rounds_to(flat[rank], start, stored[name], count, within)
            if same is None:
                continue
            if not same:
                raise CheckpointError(
                    f"{location}: {share.names[name]!r} differs from rank {share.ranks[rank]}'s optimizer "
                    "states; the files are from different steps or runs, or damaged"
                )
            compared += 1
    return compared


def rounds_to(
    master: FlatPiece, start: int, weight: StoredTensor, count: int, within: int = 0
) -> bool | None:
    """Whether elements of a master, from `start`, round to those of a weight, from `within`.

    Compares a sample; None where they cannot be compared.
    """
    count = min(count, _ELEMENTS)
    if not weight.is_contiguous or not prod(weight.shape):
        return None
    ours = _read_sample(master.source, master.dtype, start, count)
    theirs = _read_sample(weight.to_view().source, weight.dtype, weight.offset + within, count)
    if ours is None or theirs is None:
        return None
    if (master.dtype, weight.dtype) == ("F32", "BF16") and _to_bfloat16(ours) == theirs:
        return True
    left = np.frombuffer(ours, to_numpy_dtype(master.dtype))
    right = np.frombuffer(theirs, to_numpy_dtype(weight.dtype))
    with np.errstate(all="ignore"):
        same = (left.astype(right.dtype) == right) | ((left != left) & (right != right))
    return bool(same.all())


def _check_positions(layout: EqualSlices, stored: dict[str, StoredTensor], location: str) -> None:
    """The weights are views of one flat buffer with the layout of the masters, unless they were copied."""
    tensors = list(stored.values())
    if len(tensors) < 2 or len({tensor.storage.key for tensor in tensors}) != 1:
        return
    for name, tensor in stored.items():
        if tensor.offset - tensors[0].offset != layout.starts[name] - next(iter(layout.starts.values())):
            raise CheckpointError(
                f"{location}: {name!r} is not at the position in the flat buffer that param_shapes gives"
            )


def _to_bfloat16(data: bytes) -> bytes:
    """Round finite fp32 elements to bfloat16 without NumPy, whose import takes longer than this."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    # Adding this before the lower half is cut off rounds to nearest, and ties to even.
    return struct.pack(
        f"<{len(words)}H", *(word + 0x7FFF + (word >> 16 & 1) >> 16 & 0xFFFF for word in words)
    )


def _read_sample(source: Source, dtype: str, start: int, count: int) -> bytes | None:
    """Read a few elements without a checksum, because a wrong value is refused anyway."""
    size = get_itemsize(dtype)
    offset = start * size
    while isinstance(source, Slice):
        offset, source = offset + source.offset, source.source
    if not isinstance(source, FileSpan) or dtype[0] not in "FB" or dtype == "BOOL":
        return None
    return source.file.read(source.offset + offset, count * size)
