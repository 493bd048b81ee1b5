"""The tensor parallel ranks of AutoTP, put together as the checkpoint itself says.

`universal_checkpoint_info` in the model states has an affine map for each parameter: which block of the whole
each rank holds, and where in its part. Before DeepSpeed 0.19 it lists instead the parameters that all ranks
hold and those that are cut along dimension 1; the others are cut along dimension 0.

Source: deepspeed/module_inject/layers.py (`collect_autotp_universal_checkpoint_info`),
deepspeed/checkpoint/affine.py, ds_to_universal.py (`merge_tp_slices`).
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.containers.untrusted_values import get_list, get_mapping
from portable.converters.errors import CheckpointError, prefix_errors
from portable.converters.formats.deepspeed.checks import check_copies
from portable.converters.formats.deepspeed.rank_files import Weights, check_same
from portable.converters.limits import MAX_SETTINGS
from portable.converters.tensors.tensor import Tensor, compute_row_major_strides, is_shape
from portable.converters.tensors.tensor_ops import concat_tensors, place_region

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
    """How the parameters are cut.

    Args:
        info: `universal_checkpoint_info`, as unpickled.
        degree: the number of tensor parallel ranks.

    Raises:
        CheckpointError: the checkpoint does not say, or in a newer form.
    """

    def __init__(self, info: Any, degree: int, location: str) -> None:
        self.where = location
        self.degree = degree
        self.info = to_json_value(info, limit=MAX_SETTINGS)
        if not isinstance(self.info, dict) or not isinstance(self.info.get(_REPLICATED), list):
            raise CheckpointError(
                f"{location}: tensor parallel ranks whose files do not say how the parameters are cut "
                f"({INFO}) are not supported"
            )
        partition_map = self.info.get(_MAP)
        self.maps = partition_map.get("params") if isinstance(partition_map, dict) else None
        if partition_map is not None and (
            not isinstance(self.maps, dict) or partition_map.get("version") != _VERSION
        ):
            raise CheckpointError(
                f"{location}: tensor parallel affine maps of another version are not supported"
            )

    def merge_parts(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """A parameter, or a state of its shape, from the parts of all ranks.

        Raises:
            CheckpointError: the parts are not what the checkpoint says, or ranks hold different copies.
        """
        location = f"{self.where}: {name!r}"
        if any(part.dtype != parts[0].dtype for part in parts):
            raise CheckpointError(f"{location}: the tensor parallel ranks hold different element types")
        key = f"^{re.escape(name)}$"
        if key in get_mapping(self.info.get(_UNSUPPORTED)):
            raise CheckpointError(f"{location}: is cut in a way that DeepSpeed itself cannot put together")
        if self.maps is not None:
            if key not in self.maps:
                raise CheckpointError(
                    f"{location}: the checkpoint does not say how it is cut (no affine map)"
                )
            return self._merge_by_map(name, self.maps[key], parts, location)
        otherwise = [get_mapping(entry).get("patterns") for entry in get_list(self.info.get(_SUB_PARAMS))]
        if any(not isinstance(patterns, list) or key in patterns for patterns in otherwise):
            raise CheckpointError(f"{location}: tensor parallel parts of sub-parameters are not supported")
        if key in self.info[_REPLICATED]:
            check_copies(parts, location)
            return parts[0]
        dim = int(key in get_list(self.info.get(_ROWS)))
        sizes = [[size for d, size in enumerate(part.shape) if d != dim] for part in parts]
        if any(len(part.shape) <= dim for part in parts) or any(size != sizes[0] for size in sizes):
            raise CheckpointError(f"{location}: the tensor parallel ranks hold parts that do not fit")
        return concat_tensors(name, parts, dim)

    def _merge_by_map(self, name: str, entry: Any, parts: Sequence[Tensor], location: str) -> Tensor:
        damaged = CheckpointError(f"{location}: its tensor parallel affine map is damaged, or not supported")
        ranks = {str(rank): value for rank, value in get_mapping(get_mapping(entry).get("ranks")).items()}
        shape = _read_sizes(get_mapping(entry).get("logical_shape"), damaged)
        if ranks.keys() != {str(rank) for rank in range(self.degree)}:
            raise damaged
        # Blocks that several ranks hold, by place. As text: numbers can be chosen to collide.
        copies: dict[str, list[Tensor]] = {}
        boxes: dict[str, Box] = {}
        for rank, part in enumerate(parts):
            about = get_mapping(ranks[str(rank)])
            if _read_sizes(about.get("shard_shape"), damaged) != part.shape or len(part.shape) != len(shape):
                raise CheckpointError(
                    f"{location}: tensor parallel rank {rank} holds {list(part.shape)}, its map says "
                    "otherwise"
                )
            for piece in map(get_mapping, get_list(about.get("pieces"))):
                sizes = _read_sizes(piece.get("shape"), damaged)
                # A scale of the optimizer's state would be another one.
                if len(sizes) != len(shape) or piece.get("scale", 1.0) != 1.0:
                    raise damaged
                if prod(sizes):
                    corner = _find_corner(piece.get("source"), shape, damaged)
                    low = _find_corner(piece.get("dest"), part.shape, damaged)
                    if any(n + size > limit for n, size, limit in zip(low, sizes, part.shape, strict=True)):
                        raise damaged
                    box = boxes.setdefault(repr((corner, sizes)), place_region(part, corner, low, sizes))
                    origin = place_region(part, (0,) * len(sizes), low, sizes)
                    copy = Tensor(name, part.dtype, sizes, [origin])
                    copies.setdefault(repr((box.offsets, sizes)), []).append(copy)
        for replicas in copies.values():
            check_copies(replicas, location)
        with prefix_errors(self.where):
            return Tensor(name, parts[0].dtype, shape, list(boxes.values()))


def merge_weights(runs: Sequence[SavedRun], layout: AutoTpLayout) -> Weights:
    """The whole model from the weights of all tensor parallel ranks; buffers must be the same on all."""
    ranks = [run.build_weights() for run in runs]
    first = ranks[0]
    for run, rank_weights in zip(runs, ranks, strict=True):
        check_same(run.model.where, "parameters", rank_weights.tensors.keys(), first.tensors.keys())
        check_same(run.model.where, "tied parameters", rank_weights.aliases, first.aliases)
    tensors: dict[str, Tensor] = {}
    for name, tensor in first.tensors.items():
        parts = [rank_weights.tensors[name] for rank_weights in ranks]
        if name in runs[0].model.buffers:
            check_copies(parts, f"{layout.where}: {name!r}")
            tensors[name] = tensor
        else:
            tensors[name] = layout.merge_parts(name, parts)
    return Weights(tensors, first.aliases)


def merge_optimizer(runs: Sequence[SavedRun], layout: AutoTpLayout) -> OptimizerState | None:
    """The optimizer of the whole model; a state with the shape of the parameter is cut as that is."""
    ranks = [run.build_optimizer() for run in runs]
    first = ranks[0]
    if first is None:
        return None
    state: dict[str, dict[str, Tensor | Scalar]] = {}
    for run, rank_optimizer in zip(runs, ranks, strict=True):
        if rank_optimizer is None:
            raise CheckpointError(f"{run.model.where}: this tensor parallel rank has no optimizer")
        check_same(run.model.where, "param_groups", rank_optimizer.param_groups, first.param_groups)
        check_same(run.model.where, "optimizer state", rank_optimizer.state.keys(), first.state.keys())
    for name, values in first.state.items():
        for state_name, value in values.items():
            parts = [
                rank_optimizer.state[name].get(state_name)
                for rank_optimizer in ranks
                if rank_optimizer is not None
            ]
            cut = [part for part in parts if isinstance(part, Tensor) and part.shape]
            if len(cut) == len(parts):
                merged: Tensor | Scalar = layout.merge_parts(name, cut)
            elif cut:
                raise CheckpointError(
                    f"{layout.where}: {state_name} of {name!r} is a number on some ranks only"
                )
            else:
                numbers = [part.read().item() if isinstance(part, Tensor) else part for part in parts]
                check_same(layout.where, f"optimizer state {state_name!r}", set(numbers), {numbers[0]})
                merged = value
            state.setdefault(name, {})[state_name] = merged
    return OptimizerState(state, first.param_groups)


def _read_sizes(value: Any, damaged: CheckpointError) -> tuple[int, ...]:
    if not is_shape(value):
        raise damaged
    return tuple(value)


def _find_corner(place: Any, shape: tuple[int, ...], damaged: CheckpointError) -> tuple[int, ...]:
    """Where a block begins in a row-major tensor; `place` is its offset and strides in elements."""
    if not isinstance(place, list) or len(place) != 2 or type(place[0]) is not int or place[0] < 0:
        raise damaged
    strides = compute_row_major_strides(shape, 1)
    if _read_sizes(place[1], damaged) != strides:
        raise damaged
    left, corner = place[0], []
    for stride in strides:
        low, left = divmod(left, stride)
        corner.append(low)
    return tuple(corner)
