"""Match index-keyed optimizer state to parameters.

Each group keeps the model's order, but the groups' members are not recorded. The shapes of the state decide:
there must be exactly one way to distribute the model's parameters, in order, over the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.limits import MAX_ORDER_WORK, MAX_STATES
from portable.converters.tensors.dtypes import CASTABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from portable.converters.tensors.tensor import Tensor

K = TypeVar("K")
Shape = tuple[int, ...]

# BatchNorm's buffers are floating-point like parameters, but never in an optimizer.
_BUFFERS = ("running_mean", "running_var")


class NamedShape(NamedTuple):
    """Name and shape of a tensor that may be a parameter of an optimizer."""

    name: str
    shape: Shape


class GroupPosition(NamedTuple):
    """Position of a parameter in the parameter groups of an optimizer."""

    group: int
    index_in_group: int


def list_candidates(order: Iterable[str], tensors: Mapping[str, Tensor]) -> list[NamedShape]:
    """(name, shape) of the possible parameters, in the model's order."""
    return [
        NamedShape(name, tensors[name].shape)
        for name in order
        if tensors[name].dtype in CASTABLE and name.rpartition(".")[2] not in _BUFFERS
    ]


def check_listed(groups: Sequence[Sequence[K]], state: Collection[K], location: str) -> list[K]:
    """The keys of all groups; CheckpointError if one comes twice, or state belongs to a key in no group."""
    keys = [key for group in groups for key in group]
    if len(set(keys)) != len(keys):
        raise CheckpointError(f"{location}: damaged, the parameters of its groups are not distinct")
    if not set(state) <= set(keys):
        raise CheckpointError(f"{location}: damaged, it holds state for a parameter in no group")
    return keys


def map_indices_to_names(
    groups: Sequence[Sequence[K]],
    shapes: Mapping[K, Shape | None],
    candidates: Sequence[tuple[str, Shape]],
    location: str,
) -> dict[K, str]:
    """Key -> parameter, for an optimizer that counts parameters group by group in the model's order.

    Args:
        groups: the keys of each group.
        shapes: of the state of a key, where it has one.
        candidates: the parameters in the model's order.

    Raises:
        OptimizerStateError: the shapes fit the parameters in no way, or in several.
    """
    positions = fit_in_order(candidates, [[shapes.get(key) for key in group] for group in groups])
    if isinstance(positions, int):
        why = (
            "fits the model's parameters in several ways"
            if positions
            else "does not fit the model's parameters"
        )
        raise OptimizerStateError(f"{location}: its state is keyed by index and {why}")
    return {groups[group][index]: name for name, (group, index) in positions.items()}


def fit_in_order(
    candidates: Sequence[tuple[str, Shape]], wanted: Sequence[Sequence[Shape | None]]
) -> dict[str, GroupPosition] | int:
    """The only way to assign the model's parameters, in order, to the groups' shapes.

    Dynamic programming over the parameters: the state is the position reached in each group, the value the
    number of ways to reach it.

    Args:
        candidates: (name, shape) in the model's order; those in no group are frozen.
        wanted: group -> the shape of each of its indices, None where its state has none.

    Returns:
        Name -> (group, position in the group); or the number of ways if it is not 1, as 0 or 2 (several, or
        too many to count).
    """
    frozen = len(candidates) - sum(map(len, wanted))
    if frozen < 0:
        return 0
    work = 0
    steps: list[dict[Shape, int]] = [{(0,) * len(wanted): 1}]
    for seen, (_, shape) in enumerate(candidates):
        reached: dict[Shape, int] = {}
        for state, ways in steps[-1].items():
            if seen - sum(state) < frozen:
                reached[state] = reached.get(state, 0) + ways
            for group, shapes in enumerate(wanted):
                if state[group] < len(shapes) and shapes[state[group]] in (None, shape):
                    after = (*state[:group], state[group] + 1, *state[group + 1 :])
                    reached[after] = reached.get(after, 0) + ways
                    work += len(wanted)
            work += len(wanted)
            if work > MAX_ORDER_WORK:
                return 2
        if len(reached) > MAX_STATES:
            return 2
        steps.append(reached)
    state = tuple(map(len, wanted))
    ways = steps[-1].get(state, 0)
    if ways != 1:
        return min(ways, 2)
    places: dict[str, GroupPosition] = {}
    for seen in range(len(candidates) - 1, -1, -1):
        name, shape = candidates[seen]
        before = steps[seen]
        if state in before and seen - sum(state) < frozen:
            continue
        for group, shapes in enumerate(wanted):
            last = (*state[:group], state[group] - 1, *state[group + 1 :])
            if state[group] and last in before and shapes[state[group] - 1] in (None, shape):
                places[name] = GroupPosition(group, state[group] - 1)
                state = last
                break
    return places
