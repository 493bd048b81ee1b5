"""Match index-keyed optimizer state to parameters.

Each group keeps the model's order, but the groups' members are not recorded. The shapes of the state decide:
there must be exactly one way to distribute the model's parameters, in order, over the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.limits import MAX_ORDER_WORK, MAX_STATES
from portable.converters.tensors.dtypes import CASTABLE_DTYPES

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


def list_possible_parameters(order: Iterable[str], tensors: Mapping[str, Tensor]) -> list[NamedShape]:
    """(name, shape) of the possible parameters, in the model's order."""
    return [
        NamedShape(name, tensors[name].shape)
        for name in order
        if tensors[name].dtype in CASTABLE_DTYPES and name.rpartition(".")[2] not in _BUFFERS
    ]


def flatten_group_keys(groups: Sequence[Sequence[K]], state: Collection[K], location: str) -> list[K]:
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
    positions = match_groups_to_parameters(
        candidates, [[shapes.get(key) for key in group] for group in groups]
    )
    if isinstance(positions, int):
        why = (
            "fits the model's parameters in several ways"
            if positions
            else "does not fit the model's parameters"
        )
        raise OptimizerStateError(f"{location}: its state is keyed by index and {why}")
    return {groups[group][index]: name for name, (group, index) in positions.items()}


def match_groups_to_parameters(
    candidates: Sequence[tuple[str, Shape]], group_shapes: Sequence[Sequence[Shape | None]]
) -> dict[str, GroupPosition] | int:
    """The only way to assign the model's parameters, in order, to the groups' shapes.

    Dynamic programming over the parameters: the state is the position reached in each group, the value the
    number of ways to reach it.

    Args:
        candidates: (name, shape) in the model's order; those in no group are frozen.
        group_shapes: group -> the shape of each of its indices, None where its state has none.

    Returns:
        Name -> (group, position in the group); or the number of ways if it is not 1, as 0 or 2 (several, or
        too many to count).
    """
    frozen = len(candidates) - sum(map(len, group_shapes))
    if frozen < 0:
        return 0
    work = 0
    steps: list[dict[Shape, int]] = [{(0,) * len(group_shapes): 1}]
    for num_seen, (_, shape) in enumerate(candidates):
        reached: dict[Shape, int] = {}
        for state, ways in steps[-1].items():
            if num_seen - sum(state) < frozen:
                reached[state] = reached.get(state, 0) + ways
            for group, shapes in enumerate(group_shapes):
                if state[group] < len(shapes) and shapes[state[group]] in (None, shape):
                    after = (*state[:group], state[group] + 1, *state[group + 1 :])
                    reached[after] = reached.get(after, 0) + ways
                    work += len(group_shapes)
            work += len(group_shapes)
            if work > MAX_ORDER_WORK:
                return 2
        if len(reached) > MAX_STATES:
            return 2
        steps.append(reached)
    state = tuple(map(len, group_shapes))
    ways = steps[-1].get(state, 0)
    if ways != 1:
        return min(ways, 2)
    positions: dict[str, GroupPosition] = {}
    for num_seen in range(len(candidates) - 1, -1, -1):
        name, shape = candidates[num_seen]
        before = steps[num_seen]
        if state in before and num_seen - sum(state) < frozen:
            continue
        for group, shapes in enumerate(group_shapes):
            last = (*state[:group], state[group] - 1, *state[group + 1 :])
            if state[group] and last in before and shapes[state[group] - 1] in (None, shape):
                positions[name] = GroupPosition(group, state[group] - 1)
                state = last
                break
    return positions
