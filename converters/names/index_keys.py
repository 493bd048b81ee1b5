"""Assign optimizer state that is keyed by index to the parameters of a model.

The state does not contain parameter names, but the parameters in each group have the order of the
model. The assignment is therefore found from the shapes of the state: there must be exactly one way
to distribute the model's parameters, in order, over the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from portable.converters.errors import DamagedCheckpointError, OptimizerStateError
from portable.converters.limits import MAX_ORDER_WORK, MAX_STATES
from portable.converters.tensors.dtypes import CASTABLE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from portable.converters.tensors.tensor import Tensor

K = TypeVar("K")
Shape = tuple[int, ...]

# BatchNorm's buffers have floating-point dtypes like parameters, but do not belong to an optimizer.
_BUFFERS = ("running_mean", "running_var")


class NamedShape(NamedTuple):
    """Name and shape of a tensor that may be an optimizer parameter."""

    name: str
    shape: Shape


class GroupPosition(NamedTuple):
    """Position of a parameter in an optimizer's parameter groups."""

    group: int
    index_in_group: int


def list_possible_parameters(order: Iterable[str], tensors: Mapping[str, Tensor]) -> list[NamedShape]:
    """List the tensors of a model that could be trained parameters.

    Known buffers and tensors that are not floating-point are omitted.

    Args:
        order: Tensor names in the order in which the model defines them.
        tensors: Tensors of the model, keyed by name.
    """
    return [
        NamedShape(name, tensors[name].shape)
        for name in order
        if tensors[name].dtype in CASTABLE_DTYPES and name.rpartition(".")[2] not in _BUFFERS
    ]


def flatten_group_keys(groups: Sequence[Sequence[K]], state: Collection[K], location: str) -> list[K]:
    """Check the keys in all parameter groups, and return them as one list, in order.

    Args:
        groups: Keys of the parameters in each group.
        state: Keys of the parameters with state.
        location: File of the optimizer, used in error messages.

    Raises:
        CheckpointError: If a key occurs twice, or if there is state for a key that is not in a group.
    """
    keys = [key for group in groups for key in group]
    if len(set(keys)) != len(keys):
        raise DamagedCheckpointError(
            f"{location}: damaged: a parameter is listed more than once in the optimizer groups"
        )
    if not set(state) <= set(keys):
        raise DamagedCheckpointError(
            f"{location}: damaged: the optimizer state contains a parameter that is not in any group"
        )
    return keys


def map_indices_to_names(
    groups: Sequence[Sequence[K]],
    shapes: Mapping[K, Shape | None],
    candidates: Sequence[tuple[str, Shape]],
    location: str,
) -> dict[K, str]:
    """Map each parameter index in an optimizer state to the parameter's name.

    The optimizer numbers its parameters group by group. The indices are matched to the model's
    parameters by the shapes of their states, and the parameters of each group must be in the order
    of the model.

    Args:
        groups: Indices of the parameters in each group, in the order of the model.
        shapes: Shape of the state of each parameter, keyed by index. If a parameter has no state,
            its index is missing or has the value None.
        candidates: Names and shapes of the model's possible parameters, in the order of the model.
            A candidate that is not matched is frozen.
        location: File of the optimizer, used in error messages.

    Returns:
        The name of each parameter in the groups, keyed by index.

    Raises:
        OptimizerStateError: If no assignment fits the shapes, if several assignments fit them, or
            if there are too many possibilities to compare.
    """
    positions = match_groups_to_parameters(
        candidates, [[shapes.get(key) for key in group] for group in groups]
    )
    if isinstance(positions, int):
        why = (
            "its shapes match the model's parameters in several ways"
            if positions
            else "its shapes do not match the model's parameters"
        )
        raise OptimizerStateError(
            f"{location}: the optimizer state contains indices instead of parameter names, and {why}"
        )
    return {groups[group][index]: name for name, (group, index) in positions.items()}


def match_groups_to_parameters(
    candidates: Sequence[tuple[str, Shape]], group_shapes: Sequence[Sequence[Shape | None]]
) -> dict[str, GroupPosition] | int:
    """Find the only way to assign a model's parameters to the shapes in an optimizer's groups.

    The parameters that are assigned to a group keep the order of the model.

    Uses dynamic programming over the parameters. A state consists of the number of assigned
    parameters in each group, and the value of a state is the number of ways to reach this state.

    Args:
        candidates: Possible parameters in the order of the model. Parameters that are not assigned
            are frozen.
        group_shapes: Shape of each parameter in each group, or None if the parameter has no state.

    Returns:
        Position of each assigned parameter, keyed by name. If there is not exactly one way, an
        integer: 0 if no way exists, or 2 if there are several ways or too many to count.
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
