"""Read the optimizer of FSDP1 from per-rank files. Each file contains a range of each parameter.

With `use_orig_params`, each index in the optimizer state refers to one parameter. The ranges of all
ranks, concatenated, are the elements of the parameter.

Without `use_orig_params`, each index refers to a flat parameter. FSDP1 builds it from the
parameters of one wrapped module: they are concatenated, padded, and split into equal ranges. The
files do not record which modules were wrapped. This reader infers the wrapped modules from the
lengths of the flat parameters. This works if only one choice of modules matches these lengths.

Source: `_get_shard` and `flatten_tensors` in torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState
from portable.converters.containers.pickle_reader import is_safe_index, to_json_value
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import DamagedCheckpointError, OptimizerStateError
from portable.converters.formats.torch_save.optimizer import is_optimizer_state_dict, to_lazy_tensor
from portable.converters.limits import MAX_FLAT_WORK
from portable.converters.names.index_keys import flatten_group_keys, match_groups_to_parameters
from portable.converters.names.tied_weights import are_tensors_equal
from portable.converters.storage.byte_sources import ConcatenatedSources, SourceSlice
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.checkpoint import ParamGroups, Scalar
    from portable.converters.storage.byte_sources import ByteSource


class RankCopies:
    """Plain tensors that have the same name in the files of several ranks.

    A plain tensor is neither a DTensor nor a ShardedTensor. The tensors are usually copies of one
    unsharded tensor. In an optimizer of FSDP1, they may instead be the ranges of a flat parameter.
    A pickle does not distinguish the two cases.

    Args:
        location: Path of the checkpoint and name of the tensor, used in error messages.

    Attributes:
        copies: Tensor of each rank, keyed by rank. Ranks without the tensor are missing.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.copies: dict[int, StoredTensor] = {}

    @property
    def ndim(self) -> int:
        """Largest number of dimensions among the tensors of all ranks."""
        return max(len(stored.shape) for stored in self.copies.values())

    def add_rank(self, value: Any, rank: int) -> None:
        """Add the tensor of one rank.

        Args:
            value: Unpickled value in the rank's file.
            rank: Rank of the file.

        Raises:
            CheckpointError: If the value is not an unsharded tensor.
        """
        if not isinstance(value, StoredTensor):
            raise DamagedCheckpointError(
                f"{self.location}: is a sharded tensor on some ranks and an ordinary tensor on others"
            )
        self.copies[rank] = value

    def to_tensor(self) -> Tensor:
        """Return the first rank's copy as a lazy tensor, and check that all copies are equal.

        If several ranks have a copy, the check reads the values of all copies.

        Raises:
            CheckpointError: If the copies of two ranks differ.
        """
        tensors = [to_lazy_tensor(stored, self.location) for stored in self.copies.values()]
        first = tensors[0]
        for rank, other in zip(self.copies, tensors, strict=True):
            if other is not first and not are_tensors_equal(first, other):
                raise DamagedCheckpointError(
                    f"{self.location}: is replicated, but the values of rank {next(iter(self.copies))} and "
                    f"rank {rank} differ"
                )
        return first


def is_flat_optimizer(saved: Any) -> bool:
    """Return whether FSDP1 saved an optimizer as flat ranges rather than as sharded tensors.

    In the flat format, each rank saves a range of each parameter's elements as a plain tensor. The
    format is recognized by the values of the state: all are numbers or plain tensors, and at least
    one of the tensors is not a scalar. A plain tensor is neither a DTensor nor a ShardedTensor.

    Args:
        saved: Merged content of the ranks' files.
    """
    if not is_optimizer_state_dict(saved):
        return False
    states = [state for state in saved["state"].values() if isinstance(state, dict)]
    values = [value for state in states for value in state.values()]
    runs = sum(isinstance(value, RankCopies) and value.ndim > 0 for value in values)
    return runs > 0 and all(isinstance(value, (int, float, RankCopies)) for value in values)


def build_flat_optimizer(
    saved: dict[str, Any],
    parameter_names: Sequence[str],
    tensors: Mapping[str, Tensor],
    world_size: int,
    location: str,
) -> OptimizerState:
    """Build the optimizer state of a model from the flat parameters of FSDP1.

    With `use_orig_params`, each entry of the optimizer belongs to one parameter. This case is tried
    first. Otherwise, each entry belongs to a flat parameter: the concatenation of several
    parameters. The files do not record which parameters it contains, so they are inferred from the
    lengths of all flat parameters. There must be exactly one way to divide the model's parameters
    that gives these lengths.

    Args:
        saved: Merged content of the ranks' files, with `RankCopies` for tensors.
        parameter_names: Names of the sharded parameters in module order, without aliases.
        tensors: Tensors of the model.
        world_size: Number of ranks.
        location: Path of the checkpoint, used in error messages.

    Returns:
        The optimizer state, keyed by parameter name.

    Raises:
        CheckpointError: If the files are damaged, or if there is not exactly one way to divide the
            parameters.
    """
    groups, state = saved["param_groups"], saved["state"]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise DamagedCheckpointError(f"{location}: damaged: a parameter group has no list of parameters")
    keys = flatten_group_keys(
        [group["params"] for group in groups if all(map(is_safe_index, group["params"]))], state, location
    )
    rank_lengths = {
        key: _compute_run_lengths(values, world_size, f"{location}: {key}") for key, values in state.items()
    }
    sizes = [(name, (prod(tensors[name].shape),)) for name in parameter_names]
    totals = [
        [(sum(rank_lengths[key]),) if key in rank_lengths else None for key in group["params"]]
        for group in groups
    ]
    places = match_groups_to_parameters(sizes, totals)
    names_by_key: dict[Any, list[str]]
    if isinstance(places, dict):
        names_by_key = {groups[group]["params"][offset]: [name] for name, (group, offset) in places.items()}
    else:
        parameter_units = _find_wrapped_modules(
            sizes, [rank_lengths.get(key) for key in sorted(keys)], world_size
        )
        if not isinstance(parameter_units, list):
            problem = (
                "several sets of wrapped modules fit the sizes of the flat parameters"
                if parameter_units
                else "no set of wrapped modules fits the sizes of the flat parameters"
            )
            raise OptimizerStateError(
                f"{location} has flat parameters of FSDP1, but does not record the wrapped modules, and "
                f"{problem}"
            )
        names_by_key = dict(zip(sorted(keys), parameter_units, strict=True))
    state_by_name: dict[str, dict[str, Tensor | Scalar]] = {}
    for key in keys:
        for state_name, value in state.get(key, {}).items():
            if not isinstance(value, RankCopies) or not value.ndim:
                state_value = value.to_tensor() if isinstance(value, RankCopies) else value
                for name in names_by_key[key]:
                    state_by_name.setdefault(name, {})[str(state_name)] = state_value
                continue
            joined = ConcatenatedSources(
                [_to_bytes_source(value.copies[rank]) for rank in range(world_size) if rank in value.copies]
            )
            dtype = next(iter(value.copies.values())).dtype
            offset = 0
            for name in names_by_key[key]:
                shape = tensors[name].shape
                tensor = Tensor.from_source(f"{name}.{state_name}", dtype, shape, joined, offset)
                if offset + tensor.nbytes > joined.nbytes:
                    raise DamagedCheckpointError(
                        f"{location}: the optimizer state {state_name} of {name!r} has fewer elements than "
                        "the parameter"
                    )
                state_by_name.setdefault(name, {})[str(state_name)] = tensor
                offset += tensor.nbytes
    param_groups: ParamGroups = [
        {
            **{str(key): to_json_value(value) for key, value in group.items() if key != "params"},
            "params": [name for key in group["params"] for name in names_by_key[key]],
        }
        for group in groups
    ]
    return OptimizerState(state_by_name, param_groups)


def _compute_run_lengths(values: Any, world_size: int, location: str) -> list[int]:
    """Compute how many elements of a flat parameter each rank has.

    Args:
        values: Merged states of the flat parameter, keyed by state name.
        world_size: Number of ranks.
        location: Name of the parameter, used in error messages.

    Returns:
        One number per rank. All numbers are 0 if the parameter has no states, or only scalar states.

    Raises:
        CheckpointError: If the states of the parameter differ in length, or if a state has different
            dtypes on different ranks.
    """
    lengths: list[int] | None = None
    for state_name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, RankCopies) and value.ndim:
            counts = [
                prod(value.copies[rank].shape) if rank in value.copies else 0 for rank in range(world_size)
            ]
            kinds = {stored.dtype for stored in value.copies.values()}
            if len(kinds) != 1:
                raise DamagedCheckpointError(
                    f"{location}: the dtype of {state_name} differs between the ranks"
                )
            if lengths is not None and counts != lengths:
                raise DamagedCheckpointError(
                    f"{location}: {state_name} has a different length from the parameter's other states"
                )
            lengths = counts
    return lengths or [0] * world_size


def _find_wrapped_modules(
    names_and_sizes: Sequence[tuple[str, tuple[int]]],
    rank_lengths: Sequence[list[int] | None],
    world_size: int,
) -> list[list[str]] | int:
    """Find which parameters each flat parameter contains.

    The first flat parameter belongs to the root module, and the others belong to the wrapped
    modules in module order. The files do not record which modules were wrapped. This function
    therefore searches for the sets of wrapped modules whose flat parameters have the recorded
    lengths. It uses dynamic programming over the parameters. The result is only accepted if exactly
    one set fits. FSDP1 pads each flat parameter, so its length must be equal on all ranks.

    Args:
        names_and_sizes: Name and number of elements of each parameter, in module order.
        rank_lengths: For each flat parameter, the number of its elements on each rank. None for a
            flat parameter without optimizer state.
        world_size: Number of ranks.

    Returns:
        Parameter names of each flat parameter. If there is not exactly one fitting set, a number
        instead: 0 if no set fits, or 2 if several sets fit or the search needs more than
        `MAX_FLAT_WORK` steps.
    """
    if not rank_lengths or any(run is not None and len(set(run)) != 1 for run in rank_lengths):
        return 0
    lengths = [None if run is None else run[0] for run in rank_lengths]
    offsets = [0]
    for _, (size,) in names_and_sizes:
        offsets.append(offsets[-1] + size)
    total = offsets[-1]
    # Keys: number of assigned parameters, number of begun flat parameters, elements of the root module.
    # Values: the number of choices that lead to the key, and the last step of one of them.
    ways: dict[tuple[int, int, int], int] = {(0, 1, 0): 1}
    predecessors: dict[tuple[int, int, int], tuple[tuple[int, int, int], bool]] = {}
    work = 0
    limit = total if lengths[0] is None else lengths[0] * world_size
    for num_seen in range(len(names_and_sizes)):
        ends = _list_module_ends(names_and_sizes, num_seen)
        for state in [state for state in ways if state[0] == num_seen]:
            count = ways[state]
            _, unit, root = state
            root_numel = root + names_and_sizes[num_seen][1][0]
            steps = [((num_seen + 1, unit, root_numel), False)] if root_numel <= limit else []
            if unit < len(lengths):
                steps += [
                    ((end, unit + 1, root), True)
                    for end in ends
                    if lengths[unit] in (None, -(-(offsets[end] - offsets[num_seen]) // world_size))
                ]
            for next_state, is_module in steps:
                ways[next_state] = ways.get(next_state, 0) + count
                predecessors[next_state] = state, is_module
            work += 1 + len(steps)
            if work > MAX_FLAT_WORK:
                return 2
    last = [state for state in ways if state[:2] == (len(names_and_sizes), len(lengths))]
    last = [state for state in last if lengths[0] in (None, -(-state[2] // world_size))]
    count = sum(ways[state] for state in last)
    if count != 1:
        return min(count, 2)
    units: list[list[str]] = [[] for _ in lengths]
    state = last[0]
    while state[0]:
        previous_state, is_module = predecessors[state]
        names = [name for name, _ in names_and_sizes[previous_state[0] : state[0]]]
        units[previous_state[1] if is_module else 0][:0] = names
        state = previous_state
    return units


def _list_module_ends(names_and_sizes: Sequence[tuple[str, tuple[int]]], first: int) -> list[int]:
    """List the ends of all modules that begin with the parameter at index `first`.

    Args:
        names_and_sizes: Name and number of elements of each parameter, in module order.
        first: Index of a parameter.

    Returns:
        The index after the last parameter of each module, in ascending order. The root module is not
        included.
    """
    parts = names_and_sizes[first][0].split(".")
    ends = set()
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth]) + "."
        if first and names_and_sizes[first - 1][0].startswith(prefix):
            continue
        end = first
        while end < len(names_and_sizes) and names_and_sizes[end][0].startswith(prefix):
            end += 1
        ends.add(end)
    return sorted(ends)


def _to_bytes_source(stored: StoredTensor) -> ByteSource:
    """Return the bytes of a contiguous tensor."""
    view = stored.to_byte_view()
    return SourceSlice(view.source, view.offset, prod(stored.shape) * get_itemsize(stored.dtype))
