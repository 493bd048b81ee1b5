"""Verify that the files of a DeepSpeed checkpoint belong to the same save.

Some values are stored in two files, and samples of these values are compared. Below ZeRO stage 3,
the model states (`*_model_states.pt`) contain every weight in the compute dtype. The optimizer
files of the ranks contain the fp32 master weights. After each step, a weight equals its master
weight rounded to the compute dtype. A sample of values from every rank therefore shows whether the
files were saved together, and whether each file belongs to the rank in its name.
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
"""Approximate number of elements to compare at each of three positions (start, middle, end) of a
tensor.
"""
_MAX_FRAGMENTS = 16
"""Approximate number of parameters to compare on each rank."""
_MAX_ELEMENTS = 64
"""Maximum number of elements to compare in each parameter."""


def check_equal_copies(
    copies: Sequence[Tensor], location: str, cause: str = "the files are from two runs or steps"
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
            raise CheckpointError(
                f"{location}: the copies on different ranks differ, because {cause}; copy the checkpoint "
                "again, or export the model to safetensors with the program that wrote the checkpoint"
            )


def has_equal_rounded_sample(master: Tensor, copy: Tensor) -> bool:
    """Return whether a sample of a master weight, rounded to the copy's dtype, equals the copy.

    The sample consists of a few rows at the start, in the middle and at the end. The same rows of
    both tensors are compared. NaN counts as equal to NaN. Both tensors must have the same shape.
    """
    for ours, theirs in zip(_read_sample_rows(master), _read_sample_rows(copy), strict=True):
        cast = round_to_dtype(ours, copy.dtype)
        if not np.all((cast == theirs) | ((cast != cast) & (theirs != theirs))):
            return False
    return True


def _read_sample_rows(tensor: Tensor) -> list[Array]:
    """Read a few rows at the start, in the middle and at the end of a tensor.

    Up to about 4,096 elements are read at each position, but at least one row. The rows are slices
    along dimension 0. A tensor without dimensions is read completely.
    """
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
    """Compare a parameter group's fp32 master weights with the weights in the model states.

    The shapes of all parameters are compared, and their positions in the flat buffer if all weights
    share one storage. On each rank, the values of about 16 parameters are compared, with at most 64
    elements each.

    Args:
        layout: Layout of the group.
        share: Parameter group, with the ranks that store its master weights.
        flat: Flat buffer of the master weights, as one piece per rank.
        module_weights: Pickled weights, keyed by their names in the complete model.
        location: Path of the model states, used in error messages.
        optional_names: Names of parameters that may be missing in `module_weights`.
        zenflow: Whether the run used ZenFlow. If True, the values are not compared, because the
            master weights are newer than the weights in the model states.
        sampled_ranks: Indices in `flat` of the pieces whose values are compared. If None, the
            pieces of all ranks are compared.

    Returns:
        Number of comparisons of values, each for one parameter on one rank. 0 if the values cannot
        be compared, or if the run used ZenFlow.

    Raises:
        CheckpointError: If a weight is missing, or if a shape, a position in the flat buffer or a
            value differs.
    """
    stored: dict[str, StoredTensor] = {}
    for name, shape in layout.shapes.items():
        complete_name = share.complete_names[name]
        value = module_weights.get(complete_name)
        if value is None and complete_name in optional_names:
            continue
        if not isinstance(value, StoredTensor) or value.shape != shape:
            raise DamagedCheckpointError(
                f"{location}: the weight {complete_name!r} is missing or does not have the recorded shape "
                f"{list(shape)}"
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
                    f"{location}: the weight {share.complete_names[name]!r} differs from its fp32 master "
                    f"weight in the optimizer states of rank {share.ranks[rank]}"
                )
            compared += 1
    return compared


def sample_rounds_to_weight(
    master: FlatPiece, master_start: int, weight: StoredTensor, count: int, weight_start: int = 0
) -> bool | None:
    """Return whether some rounded fp32 master values equal the values of the weight.

    The master values are rounded to the dtype of the weight. The compared elements are consecutive.
    NaN counts as equal to NaN.

    Args:
        master: Flat buffer that contains the master weight.
        master_start: Index in `master` at which the comparison starts.
        weight: Weight in the compute dtype.
        count: Maximum number of elements to compare. In any case, at most 64 are compared.
        weight_start: Index in the flattened `weight` at which the comparison starts.

    Returns:
        Whether the elements are equal. None if they cannot be compared, for example because the
        weight is not contiguous.
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
    """Check that the weights have the same positions in their flat buffer as their fp32 masters.

    If the weights of a group are views of one flat buffer, they share one storage. Weights with
    separate storages, such as copies, are not checked.

    Args:
        layout: Layout of the master weights in the parameter group's flat buffer.
        stored: Weights of the group in the compute dtype, keyed by name.
        location: Path of the file with the weights, used in error messages.

    Raises:
        CheckpointError: If the position of a weight differs from the position of its master weight.
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
    """Round fp32 elements to bfloat16, to nearest with ties to even.

    Infinity is kept. A NaN may become infinity or zero. This function does not use NumPy, because
    importing NumPy is slow.

    Args:
        data: Little-endian fp32 elements.

    Returns:
        Little-endian bfloat16 elements.
    """
    words = struct.unpack(f"<{len(data) // 4}I", data)
    # The added number makes the truncation to the upper 16 bits round to nearest, with ties to even.
    return struct.pack(
        f"<{len(words)}H", *(word + 0x7FFF + (word >> 16 & 1) >> 16 & 0xFFFF for word in words)
    )


def _read_unverified_elements(source: ByteSource, dtype: str, start: int, count: int) -> bytes | None:
    """Read a few elements without verifying checksums.

    The caller compares the elements with a second copy, which reveals damaged values.

    Args:
        source: Bytes of the elements.
        dtype: Safetensors dtype of the elements.
        start: Index of the first element.
        count: Number of elements.

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
