"""Build the optimizer state and parameter groups from flattened DCP keys.

Programs write different layouts. State may be keyed by parameter name or by index, and parameter
groups may be nested or flattened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState, ParamGroups, Scalar
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.errors import DamagedCheckpointError
from portable.converters.formats.torch_save.optimizer import check_state_shapes, find_moment_shape
from portable.converters.limits import MAX_GROUP_VALUES
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
    """Build the optimizer state from the keys of a flattened state dict.

    Args:
        roles: Role of each key.
        tensors: Tensors of the model. State that is keyed by index is assigned to these tensors
            in `order`.
        read_state: Function that reads the tensor or number of a state, or returns None to skip
            it. Its arguments are the key, and a name that is used in error messages.
        read_value: Function that returns the stored Python value of a key, for parameter
            groups.
        location: Path of the checkpoint, used in error messages.
        order: Names of `tensors` in module order, without aliases. If None, the order of
            `tensors` is used.

    Returns:
        The optimizer state, keyed by parameter name. If the state is keyed by name, the
        parameter groups are read when they are first needed, and only then raise an error if
        they are damaged.

    Raises:
        CheckpointError: If two states have the same name, if the shape of a state differs from the
            shape of its parameter, or if state that is keyed by index does not fit the model's
            parameters or has damaged parameter groups.
    """
    state: State = {}
    for parameter, entries in roles.optimizer_state.items():
        name = find_plain_name(parameter, tensors)
        if name in state:
            raise DamagedCheckpointError(f"{location}: the optimizer state of {name!r} is stored twice")
        read_values = {
            state_name: read_state(key, f"{name}.{state_name}") for state_name, key in entries.items()
        }
        state[name] = {state_name: value for state_name, value in read_values.items() if value is not None}

    def build_groups() -> ParamGroups:
        return _build_param_groups(
            {path: read_value(key) for path, key in roles.param_groups.items()}, tensors, location
        )

    if not state or not all(is_parameter_index(name) and name not in tensors for name in state):
        for name, values in state.items():
            check_state_shapes(name, values, tensors, location)
        return OptimizerState(state, build_groups)
    groups = build_groups()
    keys = [group["params"] for group in groups] if groups else [sorted(state, key=int)]
    flatten_group_keys(keys, state, f"{location}: the optimizer")
    shapes = {key: find_moment_shape(values) for key, values in state.items()}
    candidates = list_possible_parameters(order or list(tensors), tensors)
    names = map_indices_to_names(keys, shapes, candidates, f"{location}: the optimizer")
    for group in groups:
        group["params"] = [names[key] for key in group["params"]]
    named_state = {names[index]: values for index, values in state.items()}
    for name, values in named_state.items():
        check_state_shapes(name, values, tensors, location)
    return OptimizerState(named_state, groups)


def _build_param_groups(
    values: Mapping[StateDictPath, Any], tensors: Mapping[str, Tensor], location: str
) -> ParamGroups:
    """Build `param_groups` from the values in a flattened state dict.

    Checkpoints store the groups in one of three layouts:

    - a complete list under a single key
    - separate keys that begin with the index of the group, such as `0.lr`
    - separate keys for each value of each parameter, such as `layer.weight.lr`

    Each group in the result has a list `params` with names as `find_plain_name` returns them. The
    list is empty if the checkpoint does not record the parameters of the group. All values are
    converted to JSON values.

    Args:
        values: Values of the groups, keyed by their path below `param_groups`.
        tensors: Tensors of the model.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If a group is missing, or if the values are not groups.
    """
    complete_list = values.get(())
    if complete_list is not None:
        groups = to_json_value(complete_list, limit=MAX_GROUP_VALUES)
    elif values and all(path and isinstance(path[0], int) for path in values):
        groups = []
        for path, value in sorted(values.items(), key=lambda item: [str(part).zfill(9) for part in item[0]]):
            index = int(path[0])
            # The values are sorted by group, so a skipped index means a missing group.
            if index > len(groups):
                raise DamagedCheckpointError(
                    f"{location}: damaged: parameter group {len(groups)} of the optimizer is missing"
                )
            while len(groups) <= index:
                groups.append({})
            # A list of parameter names may be longer than the limit of `to_json_value`.
            limit = 100_000 + (len(value) if isinstance(value, list) else 0)
            _set_group_value(groups[index], path[1:], to_json_value(value, limit=limit))
    else:
        groups = _group_flat_hyperparameters(
            {".".join(map(str, path)): to_json_value(value) for path, value in values.items()}
        )
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DamagedCheckpointError(
            f"{location}: damaged: param_groups of the optimizer is not a list of dicts"
        )
    for group in groups:
        params = group.get("params", [])
        if not isinstance(params, list):
            raise DamagedCheckpointError(
                f"{location}: damaged: params of an optimizer parameter group is not a list"
            )
        group["params"] = [find_plain_name(str(param), tensors) for param in params]
    return groups


def _set_group_value(group: dict[str, Any], path: StateDictPath, value: Any) -> None:
    """Set a hyperparameter of a parameter group in place.

    Call this function in the order of the paths, because the index of a list item is ignored.

    Args:
        group: Parameter group to extend.
        path: Path of the value within the group. If it is empty, the value is the complete group.
            If it has several parts, the value is appended to the list under the first part.
        value: Value to set. It is ignored if it is a complete group but not a dict, or if the first
            part of the path already has a value that is not a list.
    """
    if not path:
        group.update(value if isinstance(value, dict) else {})
        return
    if len(path) == 1:
        group[str(path[0])] = value
        return
    # torch flattens a list, such as betas, only if it contains tensors.
    items = group.setdefault(str(path[0]), [])
    if isinstance(items, list):
        items.append(value)


def _group_flat_hyperparameters(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Build parameter groups from torch's flattened keys `<parameter>.<hyperparameter>`.

    Parameters whose hyperparameters are all equal form one group.
    """
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        parameter, _, hyperparameter = key.rpartition(".")
        by_parameter.setdefault(parameter, {})[hyperparameter] = value
    groups: dict[str, dict[str, Any]] = {}
    for parameter, values in by_parameter.items():
        group = groups.setdefault(repr(sorted(values.items())), {"params": [], **values})
        group["params"].append(parameter)
    return list(groups.values())
