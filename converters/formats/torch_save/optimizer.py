"""Read the optimizer of a full state dict: `optimizer.state_dict()`, pickled in one file.

FSDP identifies the parameters by name. A plain optimizer only numbers them, group by group, in
module order within each group. To find the parameter of each number, the shapes of the optimizer
state are compared with the shapes of the model's parameters. If no assignment fits, or more than
one, the state is rejected.

Source: `state_dict` in torch/optim/optimizer.py, `optim_state_dict` in torch/distributed/fsdp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import OptimizerState, ParamGroups, Scalar
from portable.converters.containers.pickle_reader import is_safe_index, to_json_value
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import DamagedCheckpointError, OptimizerStateError
from portable.converters.limits import MAX_GROUP_TENSOR
from portable.converters.names.canonical import find_plain_name
from portable.converters.names.index_keys import (
    flatten_group_keys,
    list_possible_parameters,
    map_indices_to_names,
)
from portable.converters.tensors.tensor import Box, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PARAMETER_SHAPED_STATES = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "exp_inf"),
    *("sum", "acc_delta", "prev", "ax"),
)
"""Names of optimizer states that always have the shape of their parameter."""

Shape = tuple[int, ...]
TensorLeaf = StoredTensor | Tensor
"""A tensor in one file, or a tensor assembled from the files of several ranks."""


def to_lazy_tensor(stored: TensorLeaf, name: str) -> Tensor:
    """Convert a pickled tensor to a lazy `Tensor`, whose bytes are located on the first read.

    Args:
        stored: Tensor from a pickle in a checkpoint file. A lazy `Tensor` is returned unchanged.
        name: Name of the result, used in error messages.
    """
    if isinstance(stored, Tensor):
        return stored
    origin = (0,) * len(stored.shape)
    return Tensor(name, stored.dtype, stored.shape, [Box(origin, stored.shape, stored.to_byte_view)])


def is_optimizer_state_dict(value: Any) -> bool:
    """Return whether an unpickled value has the structure of an optimizer's state dict."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
    )


def build_named_optimizer(
    saved: Any, tensors: Mapping[str, Tensor], parameter_names: Sequence[str] | None, *, location: str
) -> OptimizerState:
    """Build the optimizer state, keyed by parameter name, from `optimizer.state_dict()`.

    Args:
        saved: Unpickled `{"state": ..., "param_groups": [...]}`.
        tensors: Stored tensors of the model, including aliases, keyed by name without the prefixes
            of module wrappers.
        parameter_names: Names of the model's parameters in the order of its modules, without
            aliases. None if the order is not known.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If the state dict is damaged, or if its state cannot be assigned to
            parameters unambiguously.
    """
    groups, keys = parse_param_groups(saved, location)
    state = {key: _parse_parameter_state(value, str(key), location) for key, value in saved["state"].items()}
    names = _map_keys_to_names(groups, keys, state, tensors, parameter_names, location)
    if len(set(names.values())) != len(names):
        raise DamagedCheckpointError(
            f"{location}: two entries of the optimizer state belong to the same parameter"
        )
    state_by_name: dict[str, Mapping[str, Tensor | Scalar]] = {}
    # Use the order of the groups, because the state is in the order in which parameters were first updated.
    for key in (key for group in keys for key in group):
        if key in state:
            name = names[key]
            check_state_shapes(name, state[key], tensors, location)
            state_by_name[name] = {
                state_name: to_lazy_tensor(value, f"{name}.{state_name}")
                if isinstance(value, TensorLeaf)
                else value
                for state_name, value in state[key].items()
            }

    def build_groups() -> ParamGroups:
        return [
            {**read_hyperparameters(group), "params": [names[key] for key in params]}
            for group, params in zip(groups, keys, strict=True)
        ]

    return OptimizerState(state_by_name, build_groups)


class ParsedGroups(NamedTuple):
    """Parameter groups of a pickled optimizer.

    Attributes:
        groups: `param_groups` as it was pickled.
        parameter_keys: Keys of the parameters in each group: names or indices.
    """

    groups: list[dict[Any, Any]]
    parameter_keys: list[list[Any]]


def parse_param_groups(saved: Any, location: str) -> ParsedGroups:
    """Parse the parameter groups of `optimizer.state_dict()`.

    Raises:
        CheckpointError: If the value is not a state dict, if the `params` of a group are not a list, if
            a key is neither a name nor a number or occurs twice, or if the state contains a key that is
            not in any group.
    """
    if not is_optimizer_state_dict(saved) or not all(
        isinstance(group, dict) for group in saved["param_groups"]
    ):
        raise OptimizerStateError(
            f"{location}: is not the state_dict() of an optimizer, because state or param_groups is missing "
            "or invalid"
        )
    groups: list[dict[Any, Any]] = saved["param_groups"]
    keys = [group.get("params") for group in groups]
    if not all(isinstance(group, (list, tuple)) for group in keys):
        raise DamagedCheckpointError(f"{location}: damaged: the params of a parameter group are not a list")
    parameter_keys = [list(group or ()) for group in keys]
    if not all(type(key) is str or is_safe_index(key) for group in parameter_keys for key in group):
        raise DamagedCheckpointError(
            f"{location}: damaged: the params of a parameter group are neither names nor indices"
        )
    flatten_group_keys(parameter_keys, saved["state"], location)
    return ParsedGroups(groups, parameter_keys)


def _map_keys_to_names(
    groups: list[dict[Any, Any]],
    keys: list[list[Any]],
    state: Mapping[Any, Mapping[str, TensorLeaf | Scalar]],
    tensors: Mapping[str, Tensor],
    parameter_names: Sequence[str] | None,
    location: str,
) -> dict[Any, str]:
    """Map each parameter's key in a saved optimizer to the parameter's name.

    A string key is already a name. If the keys are indices, the names come from `param_names` of
    the parameter groups. If `param_names` is missing, or its length is wrong, the indices are matched
    to the model's parameters by the shapes of their states. This requires that the parameters of each
    group are in module order, and that the match is unique.

    Raises:
        CheckpointError: If the keys are damaged.
        OptimizerStateError: If the model lacks one of the parameters, or if the names cannot be
            determined from the indices.
    """
    flat = [key for group in keys for key in group]
    if all(type(key) is str for key in flat):
        return {key: _require_plain_name(key, tensors, location) for key in flat}
    if not all(type(key) is int for key in flat):
        raise DamagedCheckpointError(
            f"{location}: damaged: the params of the parameter groups are partly names and partly indices"
        )
    # Recorded by AdamW(model.named_parameters()).
    recorded_names = [group.get("param_names") for group in groups]
    if all(
        isinstance(names, list) and len(names) == len(group)
        for names, group in zip(recorded_names, keys, strict=True)
    ):
        return {
            key: _require_plain_name(str(name), tensors, location)
            for group, names in zip(keys, recorded_names, strict=True)
            for key, name in zip(group, names or [], strict=True)
        }
    if parameter_names is None:
        raise OptimizerStateError(
            f"{location}: the state is keyed by index, but the order of the parameters is not recorded "
            "(safetensors files sort parameters by name)"
        )
    shapes = {key: _find_state_shape(values) for key, values in state.items()}
    return map_indices_to_names(keys, shapes, list_possible_parameters(parameter_names, tensors), location)


def _require_plain_name(parameter: str, tensors: Mapping[str, Tensor], location: str) -> str:
    """Return a parameter's name in the model, and check that the model has this parameter.

    Prefixes that wrappers such as DDP added to the name are removed.

    Raises:
        OptimizerStateError: If the model has no such parameter.
    """
    name = find_plain_name(parameter, tensors)
    if name not in tensors:
        raise OptimizerStateError(
            f"{location}: the optimizer contains {name!r}, which is not a parameter of the model"
        )
    return name


def _parse_parameter_state(values: Any, key: str, location: str) -> dict[str, TensorLeaf | Scalar]:
    """Parse the optimizer state of one parameter. Values that are None are skipped.

    Args:
        values: State of the parameter, keyed by entry name, such as `exp_avg`.
        key: Key of the parameter in the optimizer's state, used in error messages.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If `values` is not a dict, or if an entry is not a tensor, a number, or
            None.
    """
    if not isinstance(values, dict):
        raise DamagedCheckpointError(f"{location}: damaged: the state of {key!r} is not a dict")
    state: dict[str, TensorLeaf | Scalar] = {}
    for state_name, value in values.items():
        if isinstance(value, (StoredTensor, Tensor, int, float)):
            state[str(state_name)] = value
        elif value is not None:
            raise OptimizerStateError(
                f"{location}: the optimizer state {str(state_name)!r} of {key!r} is neither a tensor nor a "
                "number"
            )
    return state


def _find_state_shape(values: Mapping[str, TensorLeaf | Scalar]) -> Shape | None:
    """Infer the shape of a parameter from one of its optimizer states, such as `exp_avg`.

    Only states that always have the shape of their parameter are considered.

    Args:
        values: States of the parameter, keyed by state name.

    Returns:
        The shape, or None if there is no such state.
    """
    shapes = [
        value.shape
        for state_name in _PARAMETER_SHAPED_STATES
        if isinstance(value := values.get(state_name), TensorLeaf)
    ]
    return shapes[0] if shapes else None


def find_moment_shape(values: Mapping[Any, Any]) -> Shape | None:
    """Return the shape of the first non-scalar state except `step`, or None if all are scalars.

    This assumes that all states of the optimizer have the shape of the parameter.
    """
    shapes = (
        value.shape
        for state_name, value in values.items()
        if state_name != "step" and isinstance(value, TensorLeaf)
    )
    return next(filter(None, shapes), None)


def check_state_shapes(
    name: str, values: Mapping[str, TensorLeaf | Scalar], tensors: Mapping[str, Tensor], location: str
) -> None:
    """Check that the states in `_PARAMETER_SHAPED_STATES` have the shape of their parameter.

    Other states may have any shape.

    Args:
        name: Name of the parameter. States of a parameter that the model does not contain are not
            checked.
        values: States of the parameter, keyed by state name.
        tensors: Tensors of the model, keyed by name.
        location: Path of the optimizer, used in error messages.

    Raises:
        CheckpointError: If a shape differs.
    """
    for state_name in _PARAMETER_SHAPED_STATES if name in tensors else ():
        value = values.get(state_name)
        if isinstance(value, TensorLeaf) and value.shape != tensors[name].shape:
            raise DamagedCheckpointError(
                f"{location}: {state_name} of {name!r} has shape {list(value.shape)}, but the parameter "
                f"has shape {list(tensors[name].shape)}"
            )


def read_hyperparameters(group: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group as JSON values.

    `group` is an entry of an optimizer's `param_groups`. Its parameter list and parameter names are
    omitted. A tensor of at most `MAX_GROUP_TENSOR` elements, such as a learning rate, is read, and
    becomes a number or a list. A larger tensor becomes None.
    """
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, TensorLeaf):
            tensor = to_lazy_tensor(value, str(key))
            value = tensor.tolist() if tensor.numel <= MAX_GROUP_TENSOR else None
        settings[str(key)] = to_json_value(value)
    return settings
