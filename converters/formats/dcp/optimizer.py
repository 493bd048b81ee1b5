"""Optimizer state and groups from flattened DCP keys, in the layout of each program that writes DCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState, ParamGroups, Scalar
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.errors import CheckpointError
from portable.converters.formats.torch_save.optimizer import find_moment_shape
from portable.converters.names.canonical import KeyRoles, StateDictPath, find_plain_name, is_parameter_index
from portable.converters.names.index_keys import (
    flatten_group_keys,
    list_possible_parameters,
    map_indices_to_names,
)
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

State = dict[str, dict[str, Tensor | Scalar]]


def build_optimizer_state(
    roles: KeyRoles,
    tensors: Mapping[str, Tensor],
    read_state: Callable[[str, str], Tensor | Scalar | None],
    read_value: Callable[[str], Any],
    *,
    location: str,
    order: Sequence[str] | None = None,
) -> OptimizerState:
    """The optimizer of a flattened state dict.

    Args:
        roles: the role of each key.
        tensors: the model's, for naming index-keyed state.
        read_state: (key, name for errors) -> the state's tensor or number, None to leave it out.
        read_value: key -> the stored Python value, for parameter groups.
        order: the names of `tensors` in module order, without aliases.

    Raises:
        CheckpointError: index-keyed state does not fit the model's parameters.
    """
    state: State = {}
    for parameter, entries in roles.optimizer_state.items():
        name = find_plain_name(parameter, tensors)
        if name in state:
            raise CheckpointError(f"{location}: two optimizer states are called {name!r}")
        read_values = {
            state_name: read_state(key, f"{name}.{state_name}") for state_name, key in entries.items()
        }
        state[name] = {state_name: value for state_name, value in read_values.items() if value is not None}

    def build_groups() -> ParamGroups:
        return _build_param_groups(
            {path: read_value(key) for path, key in roles.param_groups.items()}, tensors, location
        )

    if not state or not all(is_parameter_index(name) and name not in tensors for name in state):
        return OptimizerState(state, build_groups)
    groups = build_groups()
    keys = [group["params"] for group in groups] if groups else [sorted(state, key=int)]
    flatten_group_keys(keys, state, f"{location}: the optimizer")
    shapes = {key: find_moment_shape(values) for key, values in state.items()}
    candidates = list_possible_parameters(order or list(tensors), tensors)
    names = map_indices_to_names(keys, shapes, candidates, f"{location}: the optimizer")
    for group in groups:
        group["params"] = [names[key] for key in group["params"]]
    return OptimizerState({names[index]: value for index, value in state.items()}, groups)


def _build_param_groups(
    values: Mapping[StateDictPath, Any], tensors: Mapping[str, Tensor], location: str
) -> ParamGroups:
    """`param_groups` from one list, one item per value, or one item per parameter and value."""
    complete_list = values.get(())
    if complete_list is not None:
        groups = to_json_value(complete_list)
    elif values and all(isinstance(path[0], int) for path in values):
        groups = []
        for path, value in sorted(values.items(), key=lambda item: [str(part).zfill(9) for part in item[0]]):
            index = int(path[0])
            if index > len(groups):  # every group has a value, and the values are sorted by group
                raise CheckpointError(
                    f"{location}: damaged, param_groups {len(groups)} of the optimizer is missing"
                )
            while len(groups) <= index:
                groups.append({})
            _set_group_value(groups[index], path[1:], to_json_value(value))
    else:
        groups = _group_flat_hyperparameters(
            {".".join(map(str, path)): to_json_value(value) for path, value in values.items()}
        )
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{location}: the optimizer's param_groups are not a list of groups")
    for group in groups:
        params = group.get("params", [])
        if not isinstance(params, list):
            raise CheckpointError(f"{location}: the params of an optimizer group are not a list")
        group["params"] = [find_plain_name(str(param), tensors) for param in params]
    return groups


def _set_group_value(group: dict[str, Any], path: StateDictPath, value: Any) -> None:
    """Set a value in a group; integer path components rebuild a flattened list."""
    if not path:
        group.update(value if isinstance(value, dict) else {})
        return
    if len(path) == 1:
        group[str(path[0])] = value
        return
    # torch flattens a list only when it holds tensors (such as betas).
    items = group.setdefault(str(path[0]), [])
    if isinstance(items, list):
        items.append(value)


def _group_flat_hyperparameters(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups from torch's flattened `<parameter>.<hyperparameter>`: equal values make one group."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        parameter, _, hyperparameter = key.rpartition(".")
        by_parameter.setdefault(parameter, {})[hyperparameter] = value
    groups: dict[str, dict[str, Any]] = {}
    for parameter, values in by_parameter.items():
        group = groups.setdefault(repr(sorted(values.items())), {"params": [], **values})
        group["params"].append(parameter)
    return list(groups.values())
