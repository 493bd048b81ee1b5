"""Unpickle DTensors and ShardedTensors as inert records, and locate the parts that they contain.

The pickle of a DTensor contains this rank's part, the mesh, and one placement per mesh dimension.
The position of the part in the complete tensor follows from the placements and the rank's position
in the mesh. The pickle of a ShardedTensor records the offsets.

Source: `_compute_local_shape_and_global_offset` in torch/distributed/tensor/_utils.py,
placement_types.py, torch/distributed/device_mesh.py, _mesh_layout.py,
torch/distributed/_shard/sharded_tensor/api.py.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.pickle_reader import (
    PickledGlobal,
    PickledInstance,
    build_getattr_standin,
    build_inert_members,
    format_untrusted_value,
)
from portable.converters.containers.torchzip import MEMORY_FORMATS, TORCH_STANDINS, StoredTensor, TorchZip
from portable.converters.containers.untrusted_values import get_attributes_or_empty
from portable.converters.errors import CheckpointError, DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.formats.torch_save.optimizer import TensorLeaf, to_lazy_tensor
from portable.converters.limits import MAX_COUNT
from portable.converters.tensors.dtypes import FROM_TORCH
from portable.converters.tensors.tensor import is_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.containers.pickle_reader import Standin
    from portable.converters.storage.byte_sources import CheckpointFile

Dims = tuple[int, ...]

_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_SHARDED_TENSOR = "ShardedTensor"


class ShardedRecord:
    """One rank's record of a sharded tensor.

    `locate_rank_parts` parses the state.

    Args:
        kind: Name of the tensor's class, such as `DTensor`. Stored as the attribute `class_name`.
        dtype: Safetensors dtype.
        shape: Full, unsharded shape.
        state: Pickled state of the tensor object, which contains this rank's parts. If the record
            does not come from a pickle, this is a `PlacedPart` instead.
    """

    __slots__ = ("class_name", "dtype", "shape", "state")

    def __init__(self, kind: str, dtype: str, shape: Dims, state: Any) -> None:
        self.class_name = kind
        self.dtype = dtype
        self.shape = shape
        self.state = state


class PlacedPart(NamedTuple):
    """Part of a sharded tensor, with its position.

    Attributes:
        offsets: Start index of the part along each dimension.
        part: Elements of the part.
    """

    offsets: Dims
    part: TensorLeaf


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Record a pickled DTensor or ShardedTensor instead of rebuilding it.

    This function replaces `torch._tensor._rebuild_from_type_v2` during unpickling. Any other tensor
    that torch pickles as a wrapper subclass is also recorded, and `locate_rank_parts` rejects it
    later. All other tensors are rebuilt as usual.

    Returns:
        A `ShardedRecord` for a DTensor, a ShardedTensor or another wrapper subclass. Otherwise, the
        rebuilt tensor.

    Raises:
        TypeError: If the arguments of a wrapper subclass do not have the expected form, or if they
            do not contain a valid dtype and shape.
    """
    if not isinstance(function, PickledGlobal) or function.key != _WRAPPER:
        plain = TORCH_STANDINS["torch._tensor._rebuild_from_type_v2"]
        assert plain is not None
        return plain(function, kind, args, state)
    if not isinstance(kind, PickledGlobal) or type(args) is not tuple or len(args) < 3:
        raise TypeError("the pickled arguments do not describe a sharded tensor")
    dtype, shape = args[1], args[2]
    name = FROM_TORCH.get(dtype.key.removeprefix("torch.")) if isinstance(dtype, PickledGlobal) else None
    if name is None or not is_shape(shape):
        raise TypeError("the pickled arguments do not contain a valid dtype and shape")
    return ShardedRecord(kind.key.rpartition(".")[2], name, tuple(shape), state)


_MODULE = "torch.distributed._shard.sharded_tensor"
_MEMBERS = {
    f"{_MODULE}.api.{_SHARDED_TENSOR}": ("ProcessGroupState",),
    f"{_MODULE}.metadata.MEM_FORMAT_ENCODING": MEMORY_FORMATS,
}
# In addition, all classes of torch.distributed become inert records.
STANDINS: Mapping[str, Standin | None] = {
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    _WRAPPER: None,
    "builtins.getattr": build_getattr_standin(build_inert_members(_MEMBERS)),
}
PREFIXES = ("torch.distributed.",)


def load_rank_file(file: CheckpointFile) -> Any:
    """Load the file that one rank saved, without running code in its pickle.

    Tensors become `StoredTensor`s or `ShardedRecord`s.

    Raises:
        CheckpointError: If the file is damaged, or if it was renamed, because a renamed file may
            belong to another rank.
    """
    archive = TorchZip(file)
    archive.check_not_renamed()
    return archive.load_object(STANDINS, PREFIXES)


def locate_rank_parts(value: ShardedRecord, rank: int, location: str) -> list[PlacedPart]:
    """Locate the parts of a sharded tensor that a rank's file contains.

    If several ranks save replicas of the same part, each replica gets the same position in the
    tensor.

    Args:
        value: Record of the tensor.
        rank: Rank of the file.
        location: Name of the tensor, used in error messages.

    Returns:
        The parts with their positions. A DTensor has one part, and a ShardedTensor may have
        several.

    Raises:
        CheckpointError: If the record is damaged or was written by a different rank, or if the
            dtype or shape of a part contradicts the record. Also raised if the tensor is neither a
            DTensor nor a ShardedTensor, or if a placement is not supported. See
            `_compute_local_extent`.
    """
    if isinstance(value.state, PlacedPart):
        return [value.state]
    if value.class_name == _SHARDED_TENSOR:
        return _parse_recorded_parts(value, rank, location)
    if value.class_name != "DTensor":
        raise UnsupportedCheckpointError(
            f"{location}: tensors of type {value.class_name[:60]} are not supported"
        )
    state = value.state[1] if type(value.state) is tuple and len(value.state) == 2 else value.state
    spec = state.get("_spec") if isinstance(state, dict) else None
    local = state.get("_local_tensor") if isinstance(state, dict) else None
    placements, mesh = (
        get_attributes_or_empty(spec).get("placements"),
        get_attributes_or_empty(spec).get("mesh"),
    )
    if not isinstance(local, StoredTensor) or not isinstance(placements, (tuple, list)):
        raise DamagedCheckpointError(f"{location}: damaged: the DTensor has no local tensor or no placements")
    writer = get_attributes_or_empty(mesh).get("_rank")
    if type(writer) is int and writer != rank:
        raise DamagedCheckpointError(
            f"{location}: is in the file of rank {rank}, but was written by rank {writer}"
        )
    position = _parse_mesh_position(mesh, rank, location)
    if len(placements) != len(position.sizes):
        raise DamagedCheckpointError(
            f"{location}: damaged: the numbers of placements ({len(placements)}) and mesh dimensions "
            f"({len(position.sizes)}) of the DTensor differ"
        )
    extent = _compute_local_extent(value.shape, position, placements, location)
    if local.shape != extent.sizes or local.dtype != value.dtype:
        raise DamagedCheckpointError(
            f"{location}: the shard of rank {rank} has the dtype {local.dtype} and the shape "
            f"{list(local.shape)}, but the DTensor requires the dtype {value.dtype} and the shape "
            f"{list(extent.sizes)}"
        )
    return [PlacedPart(extent.offsets, local)]


class _MeshPosition(NamedTuple):
    """Position of a rank in a device mesh.

    Attributes:
        sizes: Size of each dimension of the mesh.
        coordinates: Index of the rank along each dimension.
    """

    sizes: Dims
    coordinates: Dims


class Extent(NamedTuple):
    """Offsets and sizes of a part within its tensor.

    Attributes:
        offsets: Start index of the part along each dimension.
        sizes: Number of elements along each dimension.
    """

    offsets: Dims
    sizes: Dims


def _parse_mesh_position(mesh: Any, rank: int, location: str) -> _MeshPosition:
    """Find the position of a rank in a pickled device mesh.

    Raises:
        CheckpointError: If the mesh is damaged, has an unsupported layout, contains any rank
            twice, or does not contain this rank.
    """
    fields = get_attributes_or_empty(mesh)
    mesh_tensor = fields.get("mesh", fields.get("_rank_map"))  # before and since torch 2.10
    if not isinstance(mesh_tensor, StoredTensor) or not 0 < prod(mesh_tensor.shape) <= MAX_COUNT:
        raise CheckpointError(
            f"{location}: the DTensor has no readable device mesh, because the file is damaged or was "
            "written by a newer version of torch; copy the checkpoint again, or update portable-trainer"
        )
    ranks = to_lazy_tensor(mesh_tensor, f"{location}: mesh").read()
    position = (ranks == rank).nonzero()
    if (
        ranks.dtype.kind not in "iu"
        or len({*ranks.reshape(-1).tolist()}) != ranks.size
        or position[0].size != 1
    ):
        raise DamagedCheckpointError(
            f"{location}: damaged: the device mesh contains a rank twice or does not contain rank {rank}"
        )
    if "mesh" in fields:
        return _MeshPosition(ranks.shape, tuple(int(axis[0]) for axis in position))
    cuts = _parse_mesh_layout(fields.get("_layout"), ranks.size) if ranks.ndim == 1 else None
    if cuts is None:
        raise CheckpointError(
            f"{location}: the device mesh has an unsupported layout, because the file is damaged or was "
            "written by a newer version of torch; copy the checkpoint again, or update portable-trainer"
        )
    coordinates = []
    for dimension in cuts:
        coordinate = 0
        for size, stride in dimension:
            coordinate = coordinate * size + int(position[0][0]) // stride % size
        coordinates.append(coordinate)
    return _MeshPosition(tuple(prod(size for size, _ in dimension) for dimension in cuts), tuple(coordinates))


def _parse_mesh_layout(layout: Any, num_ranks: int) -> list[list[tuple[int, int]]] | None:
    """Parse the layout of a device mesh, which maps a flat list of ranks to mesh coordinates.

    Each mesh dimension has a size and a stride. The rank at index `i` of the list has the
    coordinate `i // stride % size` in this dimension. For example, a mesh of 2 x 4 ranks has the
    sizes 2 and 4, and the strides 4 and 1. A dimension that was flattened from several dimensions
    has several pairs of size and stride.

    The mesh may be a slice of a larger mesh. The list then contains the ranks of the larger mesh,
    and the layout describes one of its slices. All slices have the same layout.

    Args:
        layout: Pickled layout. torch 2.10 records the sizes and strides of all dimensions together.
            Later versions have one record per dimension.
        num_ranks: Length of the list.

    Returns:
        For each mesh dimension, its pairs of size and stride, outermost first. Pairs of size 1 are
        omitted. None if the layout is malformed, or if it does not split the list into parts of
        equal size.
    """
    fields = get_attributes_or_empty(layout)
    axes = fields.get("axes")
    records = [get_attributes_or_empty(axis) for axis in axes] if type(axes) is tuple else [fields]
    shapes, strides = ([record.get(name) for record in records] for name in ("shape", "stride"))
    if type(axes) is not tuple:
        shapes, strides = _to_list(shapes[0]), _to_list(strides[0])
    if [len(_to_list(shape)) for shape in shapes] != [len(_to_list(stride)) for stride in strides]:
        return None
    cuts = [
        [(size, stride) for size, stride in zip(_to_list(shape), _to_list(stride), strict=True) if size != 1]
        for shape, stride in zip(shapes, strides, strict=True)
    ]
    all_cuts = [cut for dimension in cuts for cut in dimension]
    if not all(type(number) is int and 0 < number <= num_ranks for cut in all_cuts for number in cut):
        return None
    inner = 1
    for size, stride in sorted(all_cuts, key=lambda cut: cut[1]):
        if stride % inner or num_ranks % (size * stride):
            return None
        inner = size * stride
    return cuts


def _to_list(value: Any) -> list[Any]:
    """Convert a tuple to a list, and a single number to a list with one element."""
    return list(value) if type(value) in (tuple, list) else [value]


def _compute_local_extent(
    shape: Dims, position: _MeshPosition, placements: Sequence[Any], location: str
) -> Extent:
    """Compute the extent of a rank's part from its placements.

    The supported placements are `Replicate`, `Shard` and `_StridedShard`. Shards are applied in the
    order of the mesh dimensions. Each one divides the part that the previous shards produced, as
    `torch.chunk` does, so the last parts may be smaller or empty. Strided shards (FSDP with tensor
    parallelism) are an exception: they are applied after all others.

    A tensor dimension may have at most one strided shard. Its `split_factor` must equal the product
    of the sizes of the later mesh dimensions that shard the same tensor dimension.

    Raises:
        CheckpointError: If a placement is not supported.
    """
    sizes = position.sizes
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        kind = placement.key.rpartition(".")[2] if isinstance(placement, PickledInstance) else ""
        if kind == "Replicate":
            continue
        dim = get_attributes_or_empty(placement).get("dim")
        if (
            kind not in ("Shard", "_StridedShard")
            or type(dim) is not int
            or not -len(shape) <= dim < len(shape)
        ):
            raise UnsupportedCheckpointError(
                f"{location}: the placement {kind[:60] or 'of a DTensor'} is not supported"
            )
        dim %= len(shape)
        if kind == "Shard":
            plain.append((axis, dim))
            continue
        later = [
            i for i in range(axis + 1, len(placements)) if _is_shard_of_dim(placements[i], dim, len(shape))
        ]
        if get_attributes_or_empty(placement).get("split_factor") != prod(sizes[i] for i in later):
            raise UnsupportedCheckpointError(
                f"{location}: the placement _StridedShard is not supported on this device mesh"
            )
        strided.append((axis, dim))
    if len({dim for _, dim in strided}) != len(strided):
        raise UnsupportedCheckpointError(
            f"{location}: several _StridedShard placements of one dimension are not supported"
        )
    offsets, remaining = [0] * len(shape), list(shape)
    for axis, dim in [*plain, *strided]:
        step = -(-remaining[dim] // sizes[axis])
        low = min(remaining[dim], step * position.coordinates[axis])
        offsets[dim] += low
        remaining[dim] = min(step, remaining[dim] - low)
    return Extent(tuple(offsets), tuple(remaining))


def _is_shard_of_dim(placement: Any, dim: int, dims: int) -> bool:
    """Return whether a placement shards a given dimension of a tensor.

    Args:
        placement: Pickled placement of a DTensor, such as `Shard`. Its dimension may be negative.
        dim: Nonnegative index of the dimension.
        dims: Number of dimensions of the tensor.
    """
    placement_dim = get_attributes_or_empty(placement).get("dim")
    return type(placement_dim) is int and -dims <= placement_dim < dims and placement_dim % dims == dim


def compute_rank_extent(
    shape: Dims,
    mesh_sizes: Dims,
    mesh_ranks: Dims,
    placements: Sequence[Mapping[str, Any]],
    rank: int,
    location: str,
) -> Extent:
    """Compute the extent of a rank's part from placements that are stored as dicts.

    Args:
        shape: Shape of the tensor.
        mesh_sizes: Size of each dimension of the device mesh.
        mesh_ranks: Rank at each position of the mesh, flattened.
        placements: For each mesh dimension, a dict with `type` (`Shard`, `StridedShard`, or
            `Replicate`), `dim`, and `split_factor`.
        rank: Rank of the part.
        location: Tensor and file, used in error messages.

    Returns:
        Extent of the part.

    Raises:
        CheckpointError: If the rank is not in the mesh, if the number of placements differs
            from the number of mesh dimensions, or if a placement is not supported.
    """
    if rank not in mesh_ranks or len(placements) != len(mesh_sizes):
        raise DamagedCheckpointError(
            f"{location}: damaged: the device mesh does not contain rank {rank}, or its dimensions do not "
            "match the placements"
        )
    position = mesh_ranks.index(rank)
    coordinates = []
    for size in reversed(mesh_sizes):
        coordinates.append(position % size)
        position //= size
    records = []
    for placement in placements:
        kind = placement.get("type")
        record = PickledInstance("_StridedShard" if kind == "StridedShard" else f"{kind}"[:60], ())
        record.state = dict(placement)
        records.append(record)
    return _compute_local_extent(
        shape, _MeshPosition(mesh_sizes, tuple(reversed(coordinates))), records, location
    )


def _parse_recorded_parts(value: ShardedRecord, rank: int, location: str) -> list[PlacedPart]:
    """Parse the parts of a ShardedTensor and their recorded positions.

    Raises:
        CheckpointError: If the record is damaged or was written by a different rank.
    """
    state = value.state
    if type(state) is not tuple or len(state) < 3 or not isinstance(state[0], list):
        raise DamagedCheckpointError(f"{location}: damaged: the ShardedTensor has no list of shards")
    group = get_attributes_or_empty(state[2])
    if group.get("global_rank") != rank:
        raise DamagedCheckpointError(
            f"{location}: is in the file of rank {rank}, but was written by rank "
            f"{format_untrusted_value(group.get('global_rank'))}"
        )
    parts: list[PlacedPart] = []
    for part in state[0]:
        stored, metadata = (
            get_attributes_or_empty(part).get("tensor"),
            get_attributes_or_empty(get_attributes_or_empty(part).get("metadata")),
        )
        offsets, sizes = metadata.get("shard_offsets"), metadata.get("shard_sizes")
        if not isinstance(stored, StoredTensor) or not is_shape(offsets) or not is_shape(sizes):
            raise DamagedCheckpointError(
                f"{location}: damaged: a shard of the ShardedTensor has no valid tensor, offsets or sizes"
            )
        if stored.shape != tuple(sizes) or stored.dtype != value.dtype or len(offsets) != len(value.shape):
            raise DamagedCheckpointError(
                f"{location}: a shard with the dtype {stored.dtype}, the shape {list(stored.shape)} and the "
                f"offsets {list(offsets)} contradicts its metadata (dtype {value.dtype}, shape "
                f"{list(sizes)}) or the shape {list(value.shape)} of the complete tensor"
            )
        parts.append(PlacedPart(tuple(offsets), stored))
    return parts
