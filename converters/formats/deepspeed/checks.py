"""Verify that files belong to the same save, by comparing samples of tensors that they share.

Below stage 3, the model states contain every weight in the compute dtype. After each step, such a
weight equals its fp32 master weight rounded to the compute dtype. Comparing a sample of values from
every rank therefore shows whether the files were saved together and are in the right order.
"""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import CheckpointError, DamagedCheckpointError, MixedCheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import FileSpan, SourceSlice
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.dtypes import get_itemsize, to_numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from portable.converters.formats.deepspeed.flat_layout import (
        Flat,
        FlatPiece,
        GroupOnRanks,
        Stage12GroupLayout,
    )
    from portable.converters.storage.byte_sources import ByteSource
    from portable.converters.tensors.tensor import Array, Tensor

_SAMPLE_ELEMENTS = 4096
"""Approximate number of elements to compare at the start, in the middle and at the end of each tensor."""
_MAX_FRAGMENTS = 16
"""Approximate number of parameters to compare on each rank."""
_MAX_ELEMENTS = 64
"""Number of elements to compare of each parameter."""


def check_equal_copies(
    copies: Sequence[Tensor], location: str, cause: str = "files of two runs or steps"
) -> None:
    """Check that the ranks' copies of a tensor are equal, by comparing samples.

    Args:
        copies: Tensor of each rank.
        location: Tensor and file, used in the error message.
        cause: Probable cause of a difference, used in the error message.

    Raises:
        CheckpointError: If the dtypes, the shapes or a sample of the values differ.
    """
    first, *others = copies
    sample = [part.tobytes() for part in _read_sample_rows(first)]
    for other in others:
        has_same_type = (other.shape, other.dtype) == (first.shape, first.dtype)
        if not has_same_type or [part.tobytes() for part in _read_sample_rows(other)] != sample:
            raise CheckpointError(f"{location}: the copies of the ranks differ; {cause}")


def has_equal_rounded_sample(master: Tensor, copy: Tensor) -> bool:
    """Return whether a sample of a master weight, rounded to the dtype of a copy, equals the copy.

    NaN equals NaN. Both tensors must have the same shape.
    """
    for ours, theirs in zip(_read_sample_rows(master), _read_sample_rows(copy), strict=True):
        cast = round_to_dtype(ours, copy.dtype)
        if not np.all((cast == theirs) | ((cast != cast) & (theirs != theirs))):
            return False
    return True


def _read_sample_rows(tensor: Tensor) -> list[Array]:
    """Read a few rows at the start, in the middle and at the end of a tensor."""
    if not tensor.shape:
        return [tensor.read()]
    rows = tensor.shape[0]
    count = max(1, _SAMPLE_ELEMENTS * rows // max(1, tensor.numel))
    starts = sorted({0, max(0, rows // 2 - count // 2), max(0, rows - count)})
    return [tensor.read(slice(start, start + count)) for start in starts]


def compare_with_module_weights(
    layout: Stage12GroupLayout,
    share: GroupOnRanks,
    flat: Flat,
    module_weights: Mapping[str, Any],
    location: str,
    *,
    optional_names: Collection[str] = (),
    zenflow: bool = False,
    sampled_ranks: Sequence[int] | None = None,
) -> int:
    """Compare the master weights of a group with the weights in the model states.

    The shapes, the positions in the flat buffer, and a sample of the values are compared.

    Args:
        layout: Layout of the group.
        share: Group and ranks of the masters.
        flat: Flat masters of these ranks.
        module_weights: Pickled weights, keyed by their names in the complete model.
        location: Path of the model states, used in error messages.
        optional_names: Names that `module_weights` need not contain.
        zenflow: Whether to skip the values, because ZenFlow's masters are newer than the weights.
        sampled_ranks: Positions of the ranks whose slices are compared. If None, all ranks are
            compared.

    Returns:
        Number of compared samples.

    Raises:
        CheckpointError: If a shape, a position in the flat buffer or a value differs.
    """
    stored: dict[str, StoredTensor] = {}
    for name, shape in layout.shapes.items():
        complete_name = share.complete_names[name]
        value = module_weights.get(complete_name)
        if value is None and complete_name in optional_names:
            continue
        if not isinstance(value, StoredTensor) or value.shape != shape:
            raise DamagedCheckpointError(
                f"{location}: {complete_name!r} is missing or does not have the recorded shape {list(shape)}"
            )
        stored[name] = value
    _check_buffer_positions(layout, stored, location)
    if zenflow:
        return 0
    compared = 0
    for rank in range(layout.world_size) if sampled_ranks is None else sampled_ranks:
        fragments = [fragment for fragment in layout.compute_fragments(rank).items() if fragment[0] in stored]
        stride = max(1, len(fragments) // _MAX_FRAGMENTS)
        for name, (start, count) in fragments[::stride]:
            weight_start = rank * layout.slice_numel + start - layout.starts[name]
            same = sample_rounds_to_weight(flat[rank], start, stored[name], count, weight_start)
            if same is None:
                continue
            if not same:
                raise MixedCheckpointError(
                    f"{location}: {share.complete_names[name]!r} differs from rank {share.ranks[rank]}'s "
                    "optimizer states"
                )
            compared += 1
    return compared


def sample_rounds_to_weight(
    master: FlatPiece, master_start: int, weight: StoredTensor, count: int, weight_start: int = 0
) -> bool | None:
    """Return whether a sample of a master weight, after rounding, equals the weight in the compute dtype.

    Args:
        master: Flat master.
        master_start: First element of the parameter in `master`.
        weight: Weight in the compute dtype.
        count: Maximum number of elements to compare.
        weight_start: First element in `weight`.

    Returns:
        Whether the elements are equal, or None if the tensors cannot be compared in this way.
    """
    count = min(count, _MAX_ELEMENTS)
    if not weight.is_contiguous or not prod(weight.shape):
        return None
    master_bytes = _read_unverified_elements(master.source, master.dtype, master_start, count)
    weight_bytes = _read_unverified_elements(
        weight.to_byte_view().source, weight.dtype, weight.offset + weight_start, count
    )
    if master_bytes is None or weight_bytes is None:
        return None
    if (master.dtype, weight.dtype) == ("F32", "BF16") and _round_to_bfloat16(master_bytes) == weight_bytes:
        return True
    master_values = np.frombuffer(master_bytes, to_numpy_dtype(master.dtype))
    weight_values = np.frombuffer(weight_bytes, to_numpy_dtype(weight.dtype))
    with np.errstate(all="ignore"):
        same = (master_values.astype(weight_values.dtype) == weight_values) | (
            (master_values != master_values) & (weight_values != weight_values)
        )
    return bool(same.all())


def _check_buffer_positions(
    layout: Stage12GroupLayout, stored: dict[str, StoredTensor], location: str
) -> None:
    """Check that views of a flat buffer have the same positions in it as the masters.

    Weights that were copied have separate storages and are not checked.

    Raises:
        CheckpointError: If a position differs.
    """
    tensors = list(stored.values())
    if len(tensors) < 2 or len({tensor.storage.key for tensor in tensors}) != 1:
        return
    for name, tensor in stored.items():
        if tensor.offset - tensors[0].offset != layout.starts[name] - next(iter(layout.starts.values())):
            raise DamagedCheckpointError(
                f"{location}: the position of {name!r} in the flat buffer contradicts param_shapes"
            )


def _round_to_bfloat16(data: bytes) -> bytes:
    """Round finite fp32 elements to bfloat16 without NumPy, which takes longer to import."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    # Adding this number before the lower half is removed rounds to nearest, ties to even.
    return struct.pack(
        f"<{len(words)}H", *(word + 0x7FFF + (word >> 16 & 1) >> 16 & 0xFFFF for word in words)
    )


def _read_unverified_elements(source: ByteSource, dtype: str, start: int, count: int) -> bytes | None:
    """Read a few elements without verifying a checksum, because wrong values are rejected anyway.

    Returns:
        The bytes, or None if the elements are not in a file or are not floating-point numbers.
    """
    size = get_itemsize(dtype)
    offset = start * size
    while isinstance(source, SourceSlice):
        offset, source = offset + source.offset, source.source
    if not isinstance(source, FileSpan) or dtype[0] not in "FB" or dtype == "BOOL":
        return None
    return source.file.read_bytes(source.offset + offset, count * size)
