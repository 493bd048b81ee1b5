"""Optimizer state and parameter groups out of flattened DCP keys, whoever flattened them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.checkpoint import OptimizerState, ParamGroups, Scalar
from converters.errors import CheckpointError
from converters.naming import Path, Roles, plain_name
from converters.pickles import plain
from converters.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

State = dict[str, dict[str, Tensor | Scalar]]


def build_optimizer(
    roles: Roles,
    tensors: Mapping[str, Tensor],
    read_state: Callable[[str, str], Tensor | Scalar | None],
    read_value: Callable[[str], Any],
    *,
    where: str,
) -> OptimizerState:
    """The optimizer of a flattened state dict.

    Args:
        roles: which key is what.
        tensors: the model, for naming state that is keyed by index.
        read_state: (key, name for errors) -> the state's tensor or number, None to leave it out.
        read_value: key -> the stored Python value, for parameter groups.

    Raises:
        CheckpointError: state keyed by index that does not fit the model's parameters.
    """
    state: State = {}
    for parameter, entries in roles.state.items():
        name = plain_name(parameter)
        if name in state:
            raise CheckpointError(f"{where}: two optimizer states are called {name!r}")
        read = {what: read_state(key, f"{name}.{what}") for what, key in entries.items()}
        state[name] = {what: value for what, value in read.items() if value is not None}

    names: dict[str, str] = {}
    if state and all(name.isdigit() and name not in tensors for name in state):
        names = _by_index(state, tensors, where)
        state = {names[index]: value for index, value in state.items()}

    def groups() -> ParamGroups:
        return _groups({path: read_value(key) for path, key in roles.groups.items()}, names, where)

    return OptimizerState(state, groups)


def _by_index(state: State, tensors: Mapping[str, Tensor], where: str) -> dict[str, str]:
    """Index -> name, where the optimizer counts parameters in the model's order; shapes must agree."""
    order = list(tensors)
    indices = sorted(state, key=int)
    names: dict[str, str] = {}
    for index in indices:
        name = order[int(index)] if int(index) < len(order) else None
        moments = [value for value in state[index].values() if isinstance(value, Tensor) and value.shape]
        if name is None or any(moment.shape != tensors[name].shape for moment in moments):
            raise CheckpointError(
                f"{where}: the optimizer state is keyed by index, and index {index} does not fit the model's "
                "parameters in their stored order; convert without --optimizer"
            )
        names[index] = name
    return names


def _groups(values: Mapping[Path, Any], names: Mapping[str, str], where: str) -> ParamGroups:
    """`param_groups` from one pickled list, from one item a value, or from one item a parameter and value."""
    whole = values.get(())
    if whole is not None:
        groups = plain(whole)
    elif values and all(isinstance(path[0], int) for path in values):
        groups = []
        for path, value in sorted(values.items(), key=lambda item: [str(part).zfill(9) for part in item[0]]):
            index = int(path[0])
            while len(groups) <= index:
                groups.append({})
            _put(groups[index], path[1:], plain(value))
    else:
        groups = _merged({".".join(map(str, path)): plain(value) for path, value in values.items()})
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{where}: the optimizer's param_groups are not a list of groups")
    for group in groups:
        params = group.get("params", [])
        if not isinstance(params, list):
            raise CheckpointError(f"{where}: the params of an optimizer group are not a list")
        group["params"] = [names.get(str(param), plain_name(str(param))) for param in params]
    return groups


def _put(group: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value below a group; integer components rebuild a list that was flattened."""
    if not path:
        group.update(value if isinstance(value, dict) else {})
        return
    if len(path) == 1:
        group[str(path[0])] = value
        return
    # torch flattens a list only when it holds tensors (a tensor learning rate within betas, say).
    items = group.setdefault(str(path[0]), [])
    if isinstance(items, list):
        items.append(value)


def _merged(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """torch's flattened form, `<parameter>.<hyperparameter>`: parameters with equal values make one group."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        parameter, _, what = key.rpartition(".")
        by_parameter.setdefault(parameter, {})[what] = value
    groups: dict[str, dict[str, Any]] = {}
    for parameter, values in by_parameter.items():
        group = groups.setdefault(repr(sorted(values.items())), {"params": [], **values})
        group["params"].append(parameter)
    return list(groups.values())
