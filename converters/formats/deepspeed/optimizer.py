"""Build the optimizer state of a ZeRO run from its flat moments.

A flat moment contains the elements of many parameters. It is split into one tensor per parameter,
keyed by the name of the parameter.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState, ParamGroups, Scalar
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import DamagedCheckpointError, OptimizerStateError
from portable.converters.formats.deepspeed.flat_layout import (
    GroupLayout,
    GroupOnRanks,
    Stage3GroupLayout,
    check_disjoint_bytes,
    require_equal_dtypes,
    to_flat_piece,
)
from portable.converters.formats.deepspeed.rank_files import (
    OptimFile,
    check_equal_records,
    require_contiguous,
)
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.storage.folder_operations import map_with_prefetch
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portable.converters.formats.deepspeed.flat_layout import SwapFiles
    from portable.converters.storage.path_or_url import AnyPath

State = dict[str, dict[str, Tensor | Scalar]]
_STAGE12_KEY, _STAGE3_KEY = "base_optimizer_state", "optimizer_state_dict"


def build_zero_optimizer(
    stage: int,
    optim_files: Sequence[OptimFile],
    layouts: Sequence[GroupLayout],
    shares: Sequence[GroupOnRanks],
    swap_files: SwapFiles | None = None,
) -> OptimizerState | None:
    """Build the optimizer state, keyed by parameter name.

    The parameter groups of an elastic checkpoint have no settings such as `lr`.

    Args:
        stage: ZeRO stage.
        optim_files: Optimizer files of all ranks.
        layouts: Layout of each entry of `shares`, in the same order.
        shares: Parameter groups, each with the set of ranks that store it.
        swap_files: Swap files of the run. If the run offloaded buffers to NVMe, these buffers are
            empty in the optimizer files, and are read from the swap files. If None, no swap files
            are read.

    Returns:
        The optimizer state, or None if the file of any rank does not contain it.

    Raises:
        CheckpointError: If the states of the ranks contradict each other, or if a state is neither
            a flat buffer nor a number.
    """
    names: list[list[str]] = [[] for _ in range(max((share.group_index for share in shares), default=-1) + 1)]
    states = [_get_group_states(stage, rank, len(names)) for rank in optim_files]
    if any(rank_states is None for rank_states in states):
        return None
    state: State = {}
    for layout, share in zip(layouts, shares, strict=True):
        by_rank = [(optim_files[rank], (states[rank] or [])[share.group_index]) for rank in share.ranks]
        for name, values in _build_group_state(layout, by_rank, swap_files).items():
            state[share.complete_names[name]] = values
        names[share.group_index] += [share.complete_names[name] for name in layout.shapes]
    groups = _read_param_groups(stage, optim_files)
    if groups is None:  # elastic checkpoints have no groups
        return OptimizerState(state, [{"params": group} for group in names])
    return OptimizerState(
        state, [build_named_group(group, names, optim_files[0].location) for group in groups]
    )


def read_step_count(folder: AnyPath, stage: int, ranks: Sequence[OptimFile], num_groups: int) -> int | None:
    """Return the number of optimizer steps, checking that all groups and ranks agree.

    Args:
        folder: Folder of the files.
        stage: ZeRO stage.
        ranks: Optimizer files of all ranks.
        num_groups: Number of parameter groups.

    Returns:
        The number of steps, or None if it is not recorded.

    Raises:
        CheckpointError: If ranks or parameter groups have different step counts, or if a step count
            is not finite.
    """

    def read_steps(rank: OptimFile) -> list[float | int | None]:
        states = _get_group_states(stage, rank, num_groups) or ()
        return [read_number(state.get("step"), f"{rank.location}: step") for state in states]

    first: int | None = None
    for rank, steps in zip(ranks, map_with_prefetch(folder, read_steps, ranks), strict=True):
        for step in steps:
            if step is None:
                continue
            if not isfinite(step):
                raise DamagedCheckpointError(
                    f"{rank.location}: damaged: the optimizer step is {step:g}, not a finite number"
                )
            if first is None:
                first = int(step)
            if step != first:
                raise DamagedCheckpointError(
                    f"{rank.location}: is at optimizer step {step:g}, but another rank or parameter group is "
                    f"at step {first}"
                )
    return first


def read_number(value: Any, location: str) -> float | int | None:
    """Return a number or 0-d tensor as a Python number, or None for any other value.

    Args:
        value: Unpickled value.
        location: Description of the value, used in error messages.
    """
    if isinstance(value, StoredTensor) and value.shape == ():
        value = to_lazy_tensor(value, location).tolist()
    return value if isinstance(value, (int, float)) else None


def _get_group_states(stage: int, rank: OptimFile, num_groups: int) -> list[dict[str, Any]] | None:
    """Return the state of each flat group on one rank. Before the first step, the states are empty.

    Returns:
        One dict per group, or None if the state was not saved.

    Raises:
        CheckpointError: If the state is damaged, or if the number of groups does not match.
    """
    base = rank.state.get(_STAGE3_KEY if stage == 3 else _STAGE12_KEY)
    if base is None:
        return None
    if isinstance(base, list):  # an elastic checkpoint
        group_states = base
    else:
        state = base.get("state") if isinstance(base, dict) else None
        if not isinstance(state, dict):
            raise DamagedCheckpointError(f"{rank.location}: damaged: the state of the optimizer is missing")
        if set(state) - set(range(num_groups)):
            raise DamagedCheckpointError(
                f"{rank.location}: damaged: the optimizer state has keys that are not indices below "
                f"{num_groups}, the number of parameter groups"
            )
        group_states = [state.get(index, {}) for index in range(num_groups)]
    if len(group_states) != num_groups:
        raise DamagedCheckpointError(
            f"{rank.location}: damaged: the numbers of parameter groups ({num_groups}) and of their "
            f"optimizer states ({len(group_states)}) differ"
        )
    if not all(isinstance(group, dict) for group in group_states):
        raise DamagedCheckpointError(
            f"{rank.location}: damaged: the optimizer state of a parameter group is not a dict"
        )
    return group_states


def _build_group_state(
    layout: GroupLayout, by_rank: Sequence[tuple[OptimFile, dict[str, Any]]], swap_files: SwapFiles | None
) -> State:
    """Build the optimizer state of the parameters in a flat group.

    Args:
        layout: Layout of the group.
        by_rank: File and optimizer state of each rank in the group.
        swap_files: Swap files, or None if the state is not on NVMe.

    Returns:
        The states, keyed by parameter and then by state name. Flat tensors are split into the
        parameters. Scalars, such as a step count, are repeated for each parameter. States that are
        None are omitted.

    Raises:
        CheckpointError: If the ranks have different states, different scalars, or flat tensors with
            different dtypes. Also if a state other than None is neither a flat tensor nor a scalar,
            or if flat tensors share bytes of a file.
    """
    ranks, states = [rank for rank, _ in by_rank], [state for _, state in by_rank]
    group_state: State = {name: {} for name in layout.shapes} if states[0] else {}
    for rank, state in zip(ranks, states, strict=True):
        check_equal_records(rank.location, "the list of optimizer states", set(state), set(states[0]))
        flat_tensors = [
            value for value in state.values() if isinstance(value, StoredTensor) and value.shape != ()
        ]
        check_disjoint_bytes([require_contiguous(run, rank.location) for run in flat_tensors], rank.location)
    for state_name, first in states[0].items():
        values = [state[state_name] for state in states]
        if first is None:
            for rank, value in zip(ranks, values, strict=True):
                check_equal_records(rank.location, f"the type of {state_name!r}", value is None, True)
            continue
        if isinstance(first, StoredTensor) and first.shape != ():
            flat_tensors = [
                require_contiguous(value, f"{rank.location}: {state_name}")
                for rank, value in zip(ranks, values, strict=True)
            ]
            pieces = list(
                map(to_flat_piece, flat_tensors)
                if swap_files is None
                else map_with_prefetch(swap_files.folder.path, to_flat_piece, flat_tensors)
            )
            if swap_files is not None and isinstance(layout, Stage3GroupLayout) and layout.rank_numel:
                pieces = [
                    piece
                    if piece.numel
                    else swap_files.open_flat_piece(rank, layout, piece.dtype, state_name)
                    for rank, piece in enumerate(pieces)
                ]
            for name, tensor in layout.split_into_parameters(
                require_equal_dtypes(pieces, f"{ranks[0].location}: {state_name}"), f".{state_name}"
            ).items():
                group_state[name][state_name] = tensor
            continue
        count = read_number(first, f"{ranks[0].location}: {state_name}")
        if count is None:
            raise OptimizerStateError(
                f"{ranks[0].location}: the optimizer state {state_name!r} is neither a flat tensor nor a "
                "number"
            )
        for rank, value in zip(ranks, values, strict=True):
            check_equal_records(
                rank.location, f"the optimizer state {state_name!r}", read_number(value, rank.location), count
            )
        for name in group_state:
            merged: Tensor | Scalar = first
            group_state[name][state_name] = (
                to_lazy_tensor(first, f"{name}.{state_name}") if isinstance(first, StoredTensor) else merged
            )
    return group_state


def _read_param_groups(stage: int, ranks: Sequence[OptimFile]) -> ParamGroups | None:
    """Read `param_groups`, whose `params` are indices of flat groups. All ranks must agree.

    Returns:
        The groups. None for an elastic checkpoint, which does not contain `param_groups`.

    Raises:
        CheckpointError: If the groups are missing or differ.
    """
    saved_groups: list[Any] = []
    for rank in ranks:
        base = rank.state.get(_STAGE3_KEY if stage == 3 else _STAGE12_KEY)
        if not isinstance(base, dict):
            return None
        groups = base.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise DamagedCheckpointError(
                f"{rank.location}: damaged: param_groups of the optimizer is missing or invalid"
            )
        values = [_to_plain_settings(group, rank.location) for group in groups]
        if rank is not ranks[0]:
            check_equal_records(rank.location, "param_groups", values, saved_groups)
        saved_groups = values
    return saved_groups


def _to_plain_settings(group: dict[Any, Any], location: str) -> dict[str, Any]:
    """Convert the settings of an optimizer's parameter group to JSON values.

    A 0-d tensor becomes a number. Any other tensor becomes None. An object becomes the name of its
    class.

    Args:
        group: Settings of the parameter group, keyed by name, such as `lr`.
        location: Path of the file, used in error messages.
    """
    return {
        str(key): read_number(value, location) if isinstance(value, StoredTensor) else to_json_value(value)
        for key, value in group.items()
    }


def build_named_group(group: dict[Any, Any], names: Sequence[Iterable[str]], location: str) -> dict[str, Any]:
    """Convert a saved parameter group, so that it lists the names of its parameters.

    In the file, `params` is a list of indices. Each index identifies a flat group, which is a
    buffer of several parameters. The result lists the names of these parameters.

    Args:
        group: The pickled parameter group.
        names: Parameter names of each flat group.
        location: Path of the file, used in error messages.

    Returns:
        The settings of the group as JSON values, and the names as `params`.

    Raises:
        CheckpointError: If `params` is not a list of valid indices.
    """
    indices = group.get("params")
    if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < len(names) for i in indices):
        raise DamagedCheckpointError(
            f"{location}: damaged: params of a parameter group is not a list of indices below {len(names)}"
        )
    return {
        **_to_plain_settings(group, location),
        "params": [name for index in indices for name in names[index]],
    }
