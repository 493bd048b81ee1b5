"""The optimizer of FSDP1, keyed by index, with one rank's run of elements of each (flat) parameter.

With `use_orig_params` an index is a parameter, and the ranks' runs end to end are its elements. Without, it
is a flat parameter: those of one wrapped module, end to end, padded and cut into equal runs. The files do not
record which modules were wrapped. They follow from the lengths where only one choice of modules has them.

Source: torch/distributed/fsdp/_flat_param.py (`_get_shard`, `flatten_tensors`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState
from portable.converters.containers.pickle_reader import is_index, to_json_value
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.formats.torch_save.optimizer import as_tensor, is_optimizer
from portable.converters.limits import MAX_FLAT_WORK
from portable.converters.names.index_keys import check_listed, fit_in_order
from portable.converters.names.tied_weights import has_same_values
from portable.converters.storage.byte_sources import Joined, Slice
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.checkpoint import ParamGroups, Scalar
    from portable.converters.storage.byte_sources import Source


class RankCopies:
    """A tensor that is not sharded, as each rank has it; None for a rank without it."""

    def __init__(self, location: str) -> None:
        self.where = location
        self.held: dict[int, StoredTensor] = {}

    @property
    def dims(self) -> int:
        return max(len(stored.shape) for stored in self.held.values())

    def add(self, value: Any, rank: int) -> None:
        if not isinstance(value, StoredTensor):
            raise CheckpointError(f"{self.where}: sharded on some ranks only")
        self.held[rank] = value

    def to_tensor(self) -> Tensor:
        """The tensor, equal on all ranks."""
        tensors = [as_tensor(stored, self.where) for stored in self.held.values()]
        first = tensors[0]
        for rank, other in zip(self.held, tensors, strict=True):
            if other is not first and not has_same_values(first, other):
                raise CheckpointError(f"{self.where}: not sharded, and rank {rank} has another value of it")
        return first


def is_flat(saved: Any) -> bool:
    """Whether an optimizer's state, merged from all ranks, holds runs of elements and no sharded tensor."""
    if not is_optimizer(saved):
        return False
    states = [state for state in saved["state"].values() if isinstance(state, dict)]
    values = [value for state in states for value in state.values()]
    runs = sum(isinstance(value, RankCopies) and value.dims > 0 for value in values)
    return runs > 0 and all(isinstance(value, (int, float, RankCopies)) for value in values)


def read_flat(
    saved: dict[str, Any], order: Sequence[str], tensors: Mapping[str, Tensor], world: int, location: str
) -> OptimizerState:
    """The state by parameter name.

    Args:
        saved: the merged content of the ranks' files, with `RankCopies` for tensors.
        order: the sharded parameters in module order, without aliases.

    Raises:
        CheckpointError: damaged, or several choices of wrapped modules have these lengths.
    """
    groups, state = saved["param_groups"], saved["state"]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointError(f"{location}: damaged, its groups list no parameters")
    keys = check_listed(
        [group["params"] for group in groups if all(map(is_index, group["params"]))], state, location
    )
    runs = {key: _read_run_lengths(values, world, f"{location}: {key}") for key, values in state.items()}
    sizes = [(name, (prod(tensors[name].shape),)) for name in order]
    totals = [[(sum(runs[key]),) if key in runs else None for key in group["params"]] for group in groups]
    places = fit_in_order(sizes, totals)
    units: dict[Any, list[str]]
    if isinstance(places, dict):
        units = {groups[group]["params"][offset]: [name] for name, (group, offset) in places.items()}
    else:
        parameter_units = _find_units(sizes, [runs.get(key) for key in sorted(keys)], world)
        if not isinstance(parameter_units, list):
            why = "several choices of" if parameter_units else "no choice of"
            raise OptimizerStateError(
                f"{location} has FSDP1's flat parameters, which fit {why} wrapped modules"
            )
        units = dict(zip(sorted(keys), parameter_units, strict=True))
    state_by_name: dict[str, dict[str, Tensor | Scalar]] = {}
    for key in keys:
        for state_name, value in state.get(key, {}).items():
            if not isinstance(value, RankCopies) or not value.dims:
                state_value = value.to_tensor() if isinstance(value, RankCopies) else value
                for name in units[key]:
                    state_by_name.setdefault(name, {})[str(state_name)] = state_value
                continue
            whole = Joined(
                [_to_bytes_source(value.held[rank]) for rank in range(world) if rank in value.held]
            )
            dtype = next(iter(value.held.values())).dtype
            offset = 0
            for name in units[key]:
                shape = tensors[name].shape
                tensor = Tensor.from_source(f"{name}.{state_name}", dtype, shape, whole, offset)
                if offset + tensor.nbytes > whole.nbytes:
                    raise CheckpointError(
                        f"{location}: {state_name} of {name!r} is shorter than the parameter"
                    )
                state_by_name.setdefault(name, {})[str(state_name)] = tensor
                offset += tensor.nbytes
    param_groups: ParamGroups = [
        {
            **{str(key): to_json_value(value) for key, value in group.items() if key != "params"},
            "params": [name for key in group["params"] for name in units[key]],
        }
        for group in groups
    ]
    return OptimizerState(state_by_name, param_groups)


def _read_run_lengths(values: Any, world: int, location: str) -> list[int]:
    """The number of elements on each rank, the same in all of a parameter's state."""
    lengths: list[int] | None = None
    for state_name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, RankCopies) and value.dims:
            counts = [prod(value.held[rank].shape) if rank in value.held else 0 for rank in range(world)]
            kinds = {stored.dtype for stored in value.held.values()}
            if len(kinds) != 1 or (lengths is not None and counts != lengths):
                raise CheckpointError(
                    f"{location}: the ranks disagree about the type or length of {state_name}"
                )
            lengths = counts
    return lengths or [0] * world


def _find_units(
    sizes: Sequence[tuple[str, tuple[int]]], runs: Sequence[list[int] | None], world: int
) -> list[list[str]] | int:
    """The parameters of each flat parameter: the root's own, then those of each wrapped module.

    Returns:
        Names by flat parameter; or the number of choices if it is not 1, as 0 or 2 (several, or too many).
    """
    if not runs or any(run is not None and len(set(run)) != 1 for run in runs):
        return 0
    lengths = [None if run is None else run[0] for run in runs]
    before = [0]
    for _, (size,) in sizes:
        before.append(before[-1] + size)
    total = before[-1]
    # (parameters seen, units seen, elements of the root) -> ways, and the ends of the last unit of one way.
    ways: dict[tuple[int, int, int], int] = {(0, 1, 0): 1}
    back: dict[tuple[int, int, int], tuple[tuple[int, int, int], bool]] = {}
    work = 0
    limit = total if lengths[0] is None else lengths[0] * world
    for seen in range(len(sizes)):
        ends = _find_subtree_ends(sizes, seen)
        for state in [state for state in ways if state[0] == seen]:
            count = ways[state]
            _, unit, root = state
            own = root + sizes[seen][1][0]
            steps = [((seen + 1, unit, own), False)] if own <= limit else []
            if unit < len(lengths):
                steps += [
                    ((end, unit + 1, root), True)
                    for end in ends
                    if lengths[unit] in (None, -(-(before[end] - before[seen]) // world))
                ]
            for after, whole in steps:
                ways[after] = ways.get(after, 0) + count
                back[after] = state, whole
            work += 1 + len(steps)
            if work > MAX_FLAT_WORK:
                return 2
    last = [state for state in ways if state[:2] == (len(sizes), len(lengths))]
    last = [state for state in last if lengths[0] in (None, -(-state[2] // world))]
    count = sum(ways[state] for state in last)
    if count != 1:
        return min(count, 2)
    units: list[list[str]] = [[] for _ in lengths]
    state = last[0]
    while state[0]:
        before_, whole = back[state]
        names = [name for name, _ in sizes[before_[0] : state[0]]]
        units[before_[1] if whole else 0][:0] = names
        state = before_
    return units


def _find_subtree_ends(sizes: Sequence[tuple[str, tuple[int]]], first: int) -> list[int]:
    """Where each module ends that begins with parameter `first`, the root left out."""
    parts = sizes[first][0].split(".")
    ends = set()
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth]) + "."
        if first and sizes[first - 1][0].startswith(prefix):
            continue
        end = first
        while end < len(sizes) and sizes[end][0].startswith(prefix):
            end += 1
        ends.add(end)
    return sorted(ends)


def _to_bytes_source(stored: StoredTensor) -> Source:
    view = stored.to_view()
    return Slice(view.source, view.offset, prod(stored.shape) * get_itemsize(stored.dtype))
