"""Merge the tensor-parallel shards of AutoTP, using the sharding that the checkpoint records.

The record is `universal_checkpoint_info` in the model states. It contains an affine map for each
parameter. The map defines which blocks of the complete parameter each rank has, and the position of
each block in the rank's shard.

Before DeepSpeed 0.19, the record contains two lists instead: the parameters that are replicated on
all ranks, and the parameters that are sharded along dim 1. Other parameters are sharded along dim
0.

Source: `collect_autotp_universal_checkpoint_info` in deepspeed/module_inject/layers.py,
deepspeed/checkpoint/affine.py, `merge_tp_slices` in ds_to_universal.py.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.containers.untrusted_values import get_list_or_empty, get_mapping_or_empty
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    OptimizerStateError,
    UnsupportedCheckpointError,
    prefix_checkpoint_errors,
)
from portable.converters.formats.deepspeed.checks import check_equal_copies
from portable.converters.formats.deepspeed.rank_files import NamedWeights, check_equal_records
from portable.converters.limits import MAX_SETTINGS
from portable.converters.tensors.tensor import Tensor, compute_row_major_strides, is_shape
from portable.converters.tensors.tensor_ops import build_region_box, concat_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.converters.checkpoint import Scalar
    from portable.converters.formats.deepspeed.zero_run import SavedRun
    from portable.converters.tensors.tensor import Box

INFO = "universal_checkpoint_info"
_MAP, _VERSION = "affine_map", 1
_REPLICATED, _ROWS = "tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns"
_SUB_PARAMS, _UNSUPPORTED = "parameter_with_sub_params", "autotp_unsupported_parameter_patterns"


class AutoTpLayout:
    """Sharding of each parameter over the tensor-parallel ranks.

    Use `merge_rank_parts` to merge the ranks' parts of a parameter or of its optimizer state.

    Args:
        info: `universal_checkpoint_info`, as unpickled.
        degree: Number of tensor-parallel ranks.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If the checkpoint does not describe the sharding, or if it contains an affine
            map with a version other than 1.
    """

    def __init__(self, info: Any, degree: int, location: str) -> None:
        self.location = location
        self.num_ranks = degree
        self.info = to_json_value(info, limit=MAX_SETTINGS)
        if not isinstance(self.info, dict) or not isinstance(self.info.get(_REPLICATED), list):
            raise UnsupportedCheckpointError(
                f"{location}: tensor-parallel checkpoints are only supported if {INFO} records how the "
                "parameters are sharded"
            )
        partition_map = self.info.get(_MAP)
        self.affine_maps = partition_map.get("params") if isinstance(partition_map, dict) else None
        if partition_map is not None and (
            not isinstance(self.affine_maps, dict) or partition_map.get("version") != _VERSION
        ):
            raise UnsupportedCheckpointError(
                f"{location}: {_MAP} of the tensor-parallel checkpoint does not have version {_VERSION}, the "
                "only supported version"
            )

    def merge_rank_parts(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Merge the tensor-parallel ranks' parts of a parameter or of its optimizer state.

        If the checkpoint contains affine maps, they determine the result. Otherwise, replicated
        parameters must be equal on all ranks, row-parallel parameters are concatenated along
        dimension 1, and other parameters along dimension 0.

        Args:
            name: Name of the parameter.
            parts: Part on each rank, in order. An optimizer state is sharded like its parameter.

        Raises:
            CheckpointError: If the parts do not match the sharding that the checkpoint records, if
                copies that should be equal differ between ranks, or if the sharding is not
                supported.
        """
        location = f"{self.location}: {name!r}"
        if any(part.dtype != parts[0].dtype for part in parts):
            raise DamagedCheckpointError(
                f"{location}: the tensor-parallel ranks store different element types"
            )
        key = f"^{re.escape(name)}$"
        if key in get_mapping_or_empty(self.info.get(_UNSUPPORTED)):
            raise UnsupportedCheckpointError(
                f"{location}: DeepSpeed records that it cannot merge the shards of this parameter"
            )
        if self.affine_maps is not None:
            if key not in self.affine_maps:
                raise UnsupportedCheckpointError(
                    f"{location}: {_MAP} does not record how this parameter is sharded"
                )
            return self._merge_by_affine_map(name, self.affine_maps[key], parts, location)
        sub_parameter_patterns = [
            get_mapping_or_empty(entry).get("patterns")
            for entry in get_list_or_empty(self.info.get(_SUB_PARAMS))
        ]
        if any(not isinstance(patterns, list) or key in patterns for patterns in sub_parameter_patterns):
            raise UnsupportedCheckpointError(
                f"{location}: tensor-parallel shards of sub-parameters are not supported"
            )
        if key in self.info[_REPLICATED]:
            check_equal_copies(parts, location)
            return parts[0]
        dim = int(key in get_list_or_empty(self.info.get(_ROWS)))
        sizes = [[size for d, size in enumerate(part.shape) if d != dim] for part in parts]
        if any(len(part.shape) <= dim for part in parts) or any(size != sizes[0] for size in sizes):
            raise DamagedCheckpointError(
                f"{location}: the shapes of the tensor-parallel shards do not fit together"
            )
        return concat_tensors(name, parts, dim)

    def _merge_by_affine_map(self, name: str, entry: Any, parts: Sequence[Tensor], location: str) -> Tensor:
        """Merge the ranks' parts of a parameter according to its affine map.

        The affine map records which blocks of the complete parameter each rank has, and the offset of
        each block in the rank's part. If several ranks have the same block, their copies must be equal.

        Args:
            name: Name of the parameter.
            entry: Affine map of the parameter, as an unchecked JSON value.
            parts: Part on each rank, in order.
            location: Path of the checkpoint and name of the parameter, used in error messages.

        Raises:
            CheckpointError: If the map is damaged, does not match the parts, or multiplies a block
                by a scale other than 1, or if copies differ.
        """
        damaged_error = CheckpointError(
            f"{location}: the entry in {_MAP} is damaged or not supported; convert a checkpoint without "
            f"{_MAP}"
        )
        ranks = {
            str(rank): value
            for rank, value in get_mapping_or_empty(get_mapping_or_empty(entry).get("ranks")).items()
        }
        shape = _require_sizes(get_mapping_or_empty(entry).get("logical_shape"), damaged_error)
        if ranks.keys() != {str(rank) for rank in range(self.num_ranks)}:
            raise damaged_error
        # Copies of each block on several ranks, keyed by offsets and sizes. The keys are text, because a file
        # could contain numbers whose hashes collide.
        copies: dict[str, list[Tensor]] = {}
        boxes: dict[str, Box] = {}
        for rank, part in enumerate(parts):
            rank_map = get_mapping_or_empty(ranks[str(rank)])
            if _require_sizes(rank_map.get("shard_shape"), damaged_error) != part.shape or len(
                part.shape
            ) != len(shape):
                raise DamagedCheckpointError(
                    f"{location}: the shape {list(part.shape)} on tensor-parallel rank {rank} contradicts "
                    f"{_MAP}"
                )
            for piece in map(get_mapping_or_empty, get_list_or_empty(rank_map.get("pieces"))):
                sizes = _require_sizes(piece.get("shape"), damaged_error)
                # Refuse scales, because the optimizer state would need a different scale.
                if len(sizes) != len(shape) or piece.get("scale", 1.0) != 1.0:
                    raise damaged_error
                if prod(sizes):
                    block_offsets = _compute_block_offsets(piece.get("source"), shape, damaged_error)
                    part_offsets = _compute_block_offsets(piece.get("dest"), part.shape, damaged_error)
                    if any(
                        n + size > limit
                        for n, size, limit in zip(part_offsets, sizes, part.shape, strict=True)
                    ):
                        raise damaged_error
                    box = boxes.setdefault(
                        repr((block_offsets, sizes)),
                        build_region_box(part, block_offsets, part_offsets, sizes),
                    )
                    origin = build_region_box(part, (0,) * len(sizes), part_offsets, sizes)
                    copy = Tensor(name, part.dtype, sizes, [origin])
                    copies.setdefault(repr((box.offsets, sizes)), []).append(copy)
        for replicas in copies.values():
            check_equal_copies(replicas, location)
        with prefix_checkpoint_errors(self.location):
            return Tensor(name, parts[0].dtype, shape, list(boxes.values()))


def merge_rank_weights(runs: Sequence[SavedRun], layout: AutoTpLayout) -> NamedWeights:
    """Merge the weights of all tensor-parallel ranks.

    Raises:
        CheckpointError: If the ranks have different parameters, ties, or buffers, if the files
            of a rank contradict each other, or if the parts of a parameter do not match the
            recorded sharding or cannot be merged.
    """
    ranks = [run.build_weights() for run in runs]
    first = ranks[0]
    for run, rank_weights in zip(runs, ranks, strict=True):
        check_equal_records(
            run.first_model_file.location,
            "the list of parameters",
            rank_weights.tensors.keys(),
            first.tensors.keys(),
        )
        check_equal_records(
            run.first_model_file.location, "the list of tied parameters", rank_weights.aliases, first.aliases
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in first.tensors.items():
        parts = [rank_weights.tensors[name] for rank_weights in ranks]
        if name in runs[0].first_model_file.buffers:
            check_equal_copies(parts, f"{layout.location}: {name!r}")
            tensors[name] = tensor
        else:
            tensors[name] = layout.merge_rank_parts(name, parts)
    return NamedWeights(tensors, first.aliases)


def merge_rank_optimizers(runs: Sequence[SavedRun], layout: AutoTpLayout) -> OptimizerState | None:
    """Merge the optimizers of all tensor-parallel ranks.

    State tensors with at least one dimension are sharded like their parameter. Scalars, such as
    step counts, must be equal on all ranks.

    Returns:
        The optimizer state, or None if the first rank has none.

    Raises:
        CheckpointError: If a rank has no optimizer state, or if the ranks have different
            parameters, settings or scalars.
    """
    ranks = [run.build_optimizer() for run in runs]
    first = ranks[0]
    if first is None:
        return None
    state: dict[str, dict[str, Tensor | Scalar]] = {}
    for run, rank_optimizer in zip(runs, ranks, strict=True):
        if rank_optimizer is None:
            raise OptimizerStateError(
                f"{run.first_model_file.location}: the optimizer state of this tensor-parallel rank is "
                "missing"
            )
        check_equal_records(
            run.first_model_file.location, "param_groups", rank_optimizer.param_groups, first.param_groups
        )
        check_equal_records(
            run.first_model_file.location,
            "the list of optimizer states",
            rank_optimizer.state.keys(),
            first.state.keys(),
        )
    for name, values in first.state.items():
        for state_name, value in values.items():
            parts = [
                rank_optimizer.state[name].get(state_name)
                for rank_optimizer in ranks
                if rank_optimizer is not None
            ]
            tensor_parts = [part for part in parts if isinstance(part, Tensor) and part.shape]
            if len(tensor_parts) == len(parts):
                merged: Tensor | Scalar = layout.merge_rank_parts(name, tensor_parts)
            elif tensor_parts:
                raise DamagedCheckpointError(
                    f"{layout.location}: {state_name} of {name!r} is a tensor on some ranks and a number on "
                    "other ranks"
                )
            else:
                numbers = [part.read().item() if isinstance(part, Tensor) else part for part in parts]
                check_equal_records(
                    layout.location, f"the optimizer state {state_name!r}", set(numbers), {numbers[0]}
                )
                merged = value
            state.setdefault(name, {})[state_name] = merged
    return OptimizerState(state, first.param_groups)


def _require_sizes(value: Any, error: CheckpointError) -> tuple[int, ...]:
    """Return a shape as a tuple. Raise `error` if the value is not a shape."""
    if not is_shape(value):
        raise error
    return tuple(value)


def _compute_block_offsets(
    offset_and_strides: Any, shape: tuple[int, ...], error: CheckpointError
) -> tuple[int, ...]:
    """Convert a block's flat offset in a row-major tensor to its start index in each dimension.

    Args:
        offset_and_strides: List of the flat offset and the strides of the block, in elements.
        shape: Shape of the tensor.
        error: Error to raise if `offset_and_strides` is invalid or the strides are not row-major.
    """
    if (
        not isinstance(offset_and_strides, list)
        or len(offset_and_strides) != 2
        or type(offset_and_strides[0]) is not int
        or offset_and_strides[0] < 0
    ):
        raise error
    strides = compute_row_major_strides(shape, 1)
    if _require_sizes(offset_and_strides[1], error) != strides:
        raise error
    remaining_offset, block_offsets = offset_and_strides[0], []
    for stride in strides:
        low, remaining_offset = divmod(remaining_offset, stride)
        block_offsets.append(low)
    return tuple(block_offsets)
