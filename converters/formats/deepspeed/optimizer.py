"""Optimizer state of a ZeRO run: flat moments split into parameters, and groups by name."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from converters.checkpoint import OptimizerState, ParamGroups, Scalar
from converters.containers.pickle_reader import to_json_value
from converters.containers.torchzip import StoredTensor
from converters.errors import CheckpointError
from converters.formats.deepspeed.flat_layout import (
    Layout,
    Share,
    WholeParameters,
    check_distinct,
    join,
    piece_of,
)
from converters.formats.deepspeed.rank_files import OptimFile, check_same, flat
from converters.formats.torch_save.optimizer import as_tensor
from converters.storage.places import map_ahead
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from converters.formats.deepspeed.flat_layout import SwapFiles
    from converters.storage.path_or_url import Place

State = dict[str, dict[str, Tensor | Scalar]]
_BASE, _OPTIMIZER = "base_optimizer_state", "optimizer_state_dict"


def build_optimizer(
    stage: int,
    ranks: Sequence[OptimFile],
    layouts: Sequence[Layout],
    shares: Sequence[Share],
    swap: SwapFiles | None = None,
) -> OptimizerState | None:
    """The optimizer by parameter name; None if the files hold none.

    Args:
        layouts: one per share.
        swap: the swap files of buffers that were pickled empty.

    Raises:
        CheckpointError: the ranks disagree, or a state is neither flat nor a number.
    """
    names: list[list[str]] = [[] for _ in range(max((share.group for share in shares), default=-1) + 1)]
    states = [_states(stage, rank, len(names)) for rank in ranks]
    if any(found is None for found in states):
        return None
    state: State = {}
    for layout, share in zip(layouts, shares, strict=True):
        by_rank = [(ranks[rank], (states[rank] or [])[share.group]) for rank in share.ranks]
        for name, values in _group(layout, by_rank, swap).items():
            state[share.names[name]] = values
        names[share.group] += [share.names[name] for name in layout.shapes]
    groups = _groups(stage, ranks)
    if groups is None:  # elastic checkpoints have no groups
        return OptimizerState(state, [{"params": group} for group in names])
    return OptimizerState(state, [named_group(group, names, ranks[0].where) for group in groups])


def optimizer_steps(folder: Place, stage: int, ranks: Sequence[OptimFile], groups: int) -> int | None:
    """Return the number of optimizer steps, which must be the same in all groups of all ranks.

    Args:
        folder: Folder of the files.
        stage: ZeRO stage.
        ranks: Optimizer files of all ranks.
        groups: Number of parameter groups.

    Returns:
        The number of steps, or None if it is not recorded.

    Raises:
        CheckpointError: If the ranks differ.
    """

    def read_steps(rank: OptimFile) -> list[float | int | None]:
        states = _states(stage, rank, groups) or ()
        return [number(state.get("step"), f"{rank.where}: step") for state in states]

    first: int | None = None
    for rank, steps in zip(ranks, map_ahead(folder, read_steps, ranks), strict=True):
        for step in steps:
            if step is None:
                continue
            if not isfinite(step):
                raise CheckpointError(f"{rank.where}: damaged, its optimizer step is {step:g}")
            if first is None:
                first = int(step)
            if step != first:
                raise CheckpointError(
                    f"{rank.where}: is at optimizer step {step:g}, another rank or group at step {first}"
                )
    return first


def number(value: Any, where: str) -> float | int | None:
    """A number, also from a 0-d tensor; else None."""
    if isinstance(value, StoredTensor) and value.shape == ():
        value = as_tensor(value, where).tolist()
    return value if isinstance(value, (int, float)) else None


def _states(stage: int, rank: OptimFile, groups: int) -> list[dict[str, Any]] | None:
    """The state of each flat group of one rank, empty before the first step; None if not saved."""
    base = rank.state.get(_OPTIMIZER if stage == 3 else _BASE)
    if base is None:
        return None
    if isinstance(base, list):  # elastic
        found = base
    else:
        state = base.get("state") if isinstance(base, dict) else None
        if not isinstance(state, dict):
            raise CheckpointError(f"{rank.where}: damaged, the optimizer has no state")
        if set(state) - set(range(groups)):
            raise CheckpointError(
                f"{rank.where}: damaged, optimizer state for more than its {groups} parameter groups"
            )
        found = [state.get(index, {}) for index in range(groups)]
    if len(found) != groups or not all(isinstance(group, dict) for group in found):
        raise CheckpointError(
            f"{rank.where}: damaged, optimizer state for other than its {groups} parameter groups"
        )
    return found


def _group(
    layout: Layout, by_rank: Sequence[tuple[OptimFile, dict[str, Any]]], swap: SwapFiles | None
) -> State:
    """The state of the parameters of one flat group."""
    ranks, states = [rank for rank, _ in by_rank], [state for _, state in by_rank]
    made: State = {name: {} for name in layout.shapes} if states[0] else {}
    for rank, state in zip(ranks, states, strict=True):
        check_same(rank.where, "optimizer state", set(state), set(states[0]))
        runs = [value for value in state.values() if isinstance(value, StoredTensor) and value.shape != ()]
        check_distinct([flat(run, rank.where) for run in runs], rank.where)
    for what, first in states[0].items():
        if first is None:
            continue
        values = [state[what] for state in states]
        if isinstance(first, StoredTensor) and first.shape != ():
            runs = [flat(value, f"{rank.where}: {what}") for rank, value in zip(ranks, values, strict=True)]
            pieces = list(
                map(piece_of, runs) if swap is None else map_ahead(swap.folder.path, piece_of, runs)
            )
            if swap is not None and isinstance(layout, WholeParameters) and layout.length:
                pieces = [
                    piece if piece.numel else swap.piece(rank, layout, piece.dtype, what)
                    for rank, piece in enumerate(pieces)
                ]
            for name, tensor in layout.tensors(join(pieces, f"{ranks[0].where}: {what}"), f".{what}").items():
                made[name][what] = tensor
            continue
        count = number(first, f"{ranks[0].where}: {what}")
        if count is None:
            raise CheckpointError(
                f"{ranks[0].where}: the optimizer state {what!r} is neither flat nor a number"
            )
        for rank, value in zip(ranks, values, strict=True):
            check_same(rank.where, f"optimizer state {what!r}", number(value, rank.where), count)
        for name in made:
            held: Tensor | Scalar = first
            made[name][what] = as_tensor(first, f"{name}.{what}") if isinstance(first, StoredTensor) else held
    return made


def _groups(stage: int, ranks: Sequence[OptimFile]) -> ParamGroups | None:
    """`param_groups` of the ranks, with `params` as indices of flat groups."""
    found: list[Any] = []
    for rank in ranks:
        base = rank.state.get(_OPTIMIZER if stage == 3 else _BASE)
        if not isinstance(base, dict):
            return None
        groups = base.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{rank.where}: damaged, the optimizer has no param_groups")
        values = [_settings(group, rank.where) for group in groups]
        if rank is not ranks[0]:
            check_same(rank.where, "param_groups", values, found)
        found = values
    return found


def _settings(group: dict[Any, Any], where: str) -> dict[str, Any]:
    """A group's settings as plain values."""
    return {
        str(key): number(value, where) if isinstance(value, StoredTensor) else to_json_value(value)
        for key, value in group.items()
    }


def named_group(group: dict[Any, Any], names: Sequence[Iterable[str]], where: str) -> dict[str, Any]:
    """A group with the names of its parameters, of which it lists the numbers of the flat groups."""
    indices = group.get("params")
    if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < len(names) for i in indices):
        raise CheckpointError(f"{where}: damaged, its parameter groups do not match the flat groups")
    return {**_settings(group, where), "params": [name for index in indices for name in names[index]]}
