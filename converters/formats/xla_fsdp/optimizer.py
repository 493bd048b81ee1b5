"""Read the optimizer of an XLA FSDP v1 run. Its state is keyed by index and sharded like the parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState, ParamGroups, Scalar
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import MixedCheckpointError, OptimizerStateError, prefix_checkpoint_errors
from portable.converters.formats.torch_save.optimizer import (
    find_moment_shape,
    parse_param_groups,
    read_hyperparameters,
    to_lazy_tensor,
)
from portable.converters.formats.xla_fsdp.shards import XlaFsdpLayout, join_shards
from portable.converters.limits import MAX_GROUP_TENSOR
from portable.converters.names.index_keys import map_indices_to_names
from portable.converters.storage.folder_operations import map_with_prefetch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor

Shape = tuple[int, ...]

# Patterns of the names without weight decay in versions of transformers' Trainer, which matches them against
# shard names.
_UNDECAYED = (
    re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"),
    re.compile(r"bias"),
)
# The second flat parameter of a module contains the parameters that were frozen when it was wrapped.
_FROZEN = "_FSDP_SHARD_SEPARATOR_flat_param_1"


def build_xla_optimizer(
    saved: Sequence[tuple[str, Any]],
    layouts: Mapping[str, XlaFsdpLayout],
    shapes: Mapping[str, Shape],
    plain_names: Mapping[str, str],
    *,
    root: AnyPath,
    from_trainer: bool,
) -> OptimizerState:
    """Build the optimizer state of a model that was trained with XLA FSDP.

    Each rank's model file contains a dict `model`. Each of its sharded entries contains a part of
    one or more parameters. Its other entries have no layout.

    A replicated state of an entry, such as `step`, is copied to all parameters of the entry. It must
    be equal on all ranks.

    Args:
        saved: File and `optimizer.state_dict()` of every rank, in order.
        layouts: Layout of the parameters in each sharded entry, keyed by the keys of `model`. The
            keys are in the order of the model.
        shapes: Shape of one rank's shard, keyed by the keys of the sharded entries.
        plain_names: Parameter names without wrapper prefixes, keyed by the names with these
            prefixes.
        root: Folder of the files.
        from_trainer: Whether transformers' Trainer wrote the optimizer. Such an optimizer always
            has the same two parameter groups.

    Returns:
        The optimizer state, keyed by parameter name.

    Raises:
        CheckpointError: If the ranks differ, or if the state cannot be assigned to parameters
            unambiguously. Also raised if a state is neither a number nor a tensor, or has a shape
            other than its shard.
    """
    location, _ = saved[0]
    ranks = [(file, _get_state_by_index(value, file)) for file, value in saved]
    states = ranks[0][1]
    groups, indices = parse_param_groups(saved[0][1], f"{location}: the optimizer")
    hyperparameters = [read_hyperparameters(group) for group in groups]
    for file, value in saved[1:]:
        settings = [
            read_hyperparameters(group)
            for group in parse_param_groups(value, f"{file}: the optimizer").groups
        ]
        if list(value["state"]) != list(states) or settings != hyperparameters:
            raise MixedCheckpointError(
                f"{file}: the optimizer has different parameters or settings from the optimizer in {location}"
            )
    keys = _map_indices_to_keys(indices, groups, states, shapes, from_trainer, location)
    state: dict[str, Mapping[str, Tensor | Scalar]] = {}
    for index in (index for group in indices for index in group if index in states):
        state_by_name: dict[str, dict[str, Tensor | Scalar]] = {}
        for state_name, value in states[index].items():
            parts = [(file, values[index].get(state_name)) for file, values in ranks]
            if not _is_sharded_state(state_name, value, shapes[keys[index]], location):
                _check_equal_on_ranks(parts, f"the optimizer's {state_name!r} of {keys[index]!r}", root)
                if value is not None:
                    replicated = (
                        value
                        if not isinstance(value, StoredTensor)
                        else to_lazy_tensor(value, str(state_name))
                    )
                    for parameter in layouts[keys[index]].parameters:
                        state_by_name.setdefault(parameter.name, {})[str(state_name)] = replicated
                continue
            for raw, tensor in join_shards(
                layouts[keys[index]], parts, keys[index], f".{state_name}"
            ).items():
                state_by_name.setdefault(raw, {})[str(state_name)] = tensor
        state.update({plain_names[raw]: values for raw, values in state_by_name.items()})

    def build_groups() -> ParamGroups:
        names_by_group = [
            [parameter.name for index in group for parameter in layouts[keys[index]].parameters]
            for group in indices
        ]
        return [
            {**values, "params": [plain_names[raw] for raw in names]}
            for values, names in zip(hyperparameters, names_by_group, strict=True)
        ]

    return OptimizerState(state, build_groups)


def _get_state_by_index(saved: Any, location: str) -> dict[int, dict[Any, Any]]:
    """Check that the state of a rank is keyed by index, and return it.

    Raises:
        OptimizerStateError: If the state is missing or has other keys.
    """
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict) or not all(
        type(key) is int and isinstance(values, dict) for key, values in state.items()
    ):
        raise OptimizerStateError(
            f"{location}: the optimizer state is not a dict with the indices of the parameters as keys"
        )
    return state


def _map_indices_to_keys(
    indices: Sequence[Sequence[int]],
    groups: Sequence[Mapping[Any, Any]],
    states: Mapping[int, Mapping[Any, Any]],
    shapes: Mapping[str, Shape],
    from_trainer: bool,
    location: str,
) -> dict[int, str]:
    """Map each parameter index of the optimizer to the parameter's key in the rank files.

    A plain optimizer numbers its parameters. In the rank files, the parameters are stored under
    their keys in the dict `model`. If the groups contain the names of their parameters, and these
    names are distinct keys, they are used. Otherwise, indices and keys are matched by shape. If the
    optimizer has fewer parameters than the model, keys of frozen flat parameters are skipped.

    If this match fails or is ambiguous and the Trainer wrote the optimizer, its two groups (with and
    without weight decay) are matched separately.

    Args:
        indices: Parameter indices in each group.
        groups: Parameter groups of the optimizer.
        states: Optimizer states, keyed by parameter index and then by state name.
        shapes: Shape of one rank's shard, keyed by the key in `model`.
        from_trainer: Whether transformers' Trainer wrote the optimizer.
        location: File of the optimizer, used in error messages.

    Raises:
        OptimizerStateError: If no assignment fits, or if several assignments fit.
    """
    # Recorded by AdamW(model.named_parameters()).
    recorded_names = [group.get("param_names") for group in groups]
    if all(isinstance(names, (list, tuple)) for names in recorded_names):
        parameter_names = [
            str(name).replace("_fpw_module.", "") for names in recorded_names for name in names or ()
        ]
        flat = [index for group in indices for index in group]
        if (
            len(parameter_names) == len(flat)
            and len(set(parameter_names)) == len(parameter_names)
            and set(parameter_names) <= set(shapes)
        ):
            return dict(zip(flat, parameter_names, strict=True))
    moment_shapes = {index: find_moment_shape(values) for index, values in states.items()}
    candidates = list(shapes.items())
    if sum(map(len, indices)) < len(candidates):
        candidates = [(key, shape) for key, shape in candidates if not key.endswith(_FROZEN)]
    try:
        return map_indices_to_names(indices, moment_shapes, candidates, f"{location}: the optimizer")
    except OptimizerStateError:
        if not from_trainer or len(indices) != 2:
            raise
        fits = [
            fit
            for pattern in _UNDECAYED
            if (fit := _match_trainer_groups(pattern, candidates, indices, moment_shapes))
        ]
        if not fits or any(fit != fits[0] for fit in fits):
            raise
        return fits[0]


def _match_trainer_groups(
    pattern: re.Pattern[str],
    candidates: Sequence[tuple[str, Shape]],
    indices: Sequence[Sequence[int]],
    moment_shapes: Mapping[int, Shape | None],
) -> dict[int, str] | None:
    """Map optimizer indices to keys of the rank files' `model` dict, one parameter group at a time.

    An optimizer index is the number of a parameter in the optimizer state.

    transformers' Trainer creates two parameter groups: the first one with weight decay, and the
    second one without. Each group is matched separately.

    Args:
        pattern: Regular expression that finds parameters without weight decay by their names.
        candidates: Keys of `model` and the shapes of their shards.
        indices: Optimizer indices in each group.
        moment_shapes: Shape of the first non-scalar state, such as `exp_avg`, keyed by optimizer
            index. None if all states are scalars.

    Returns:
        The key in `model`, keyed by optimizer index. None if no assignment or more than one
        assignment fits a group.
    """
    keys: dict[int, str] = {}
    for group, has_match in zip(indices, (False, True), strict=True):
        part = [(key, shape) for key, shape in candidates if bool(pattern.search(key.lower())) == has_match]
        try:
            keys |= map_indices_to_names([group], moment_shapes, part, "")
        except OptimizerStateError:
            return None
    return keys


def _is_sharded_state(description: Any, value: Any, shard: Shape, location: str) -> bool:
    """Return whether an optimizer state is a tensor that is sharded like its parameter.

    The result is False for a number, for None, and for a replicated tensor. The state `step` and
    tensors without dimensions count as replicated.

    Args:
        description: Name of the state, such as `exp_avg` or `step`.
        value: Value of the state on the first rank.
        shard: Shape of one rank's shard of the parameter.
        location: File of the optimizer, used in error messages.

    Raises:
        OptimizerStateError: If a tensor is not replicated and its shape differs from `shard`, or if
            the value is neither a tensor nor a number.
    """
    if isinstance(value, StoredTensor) and value.shape and description != "step":
        if value.shape != shard:
            raise OptimizerStateError(
                f"{location}: the optimizer's {description!r} has shape {list(value.shape)}, but the shard "
                f"of the parameter has shape {list(shard)}"
            )
        return True
    if value is None or isinstance(value, (int, float, StoredTensor)):
        return False
    raise OptimizerStateError(f"{location}: the optimizer's {description!r} is neither a tensor nor a number")


def _check_equal_on_ranks(parts: Sequence[tuple[str, Any]], description: str, root: AnyPath) -> None:
    """Check that all ranks have equal copies of a replicated value.

    If the copies differ, the files are from different steps or runs.

    Args:
        parts: File and value of each rank.
        description: Description of the value, used in error messages.
        root: Folder of the files. In an object store, the copies are read concurrently.

    Raises:
        CheckpointError: If the copies differ, or if a copy is a tensor with too many elements.
    """
    location, _ = parts[0]
    copies = map_with_prefetch(root, _to_comparable, parts)
    expected = next(copies)
    for (file, _), copy in zip(parts[1:], copies, strict=True):
        if copy != expected:
            raise MixedCheckpointError(f"{file}: {description} differs from the value in {location}")


def _to_comparable(part: tuple[str, Any]) -> Any:
    """Convert a value to JSON values, so that it can be compared with the values of other ranks.

    A tensor becomes a number or a list.

    Args:
        part: Path of the file of one rank, used in error messages, and a value from this file, such as
            a step count.

    Raises:
        CheckpointError: If a tensor has too many elements.
    """
    location, value = part
    if not isinstance(value, StoredTensor):
        return to_json_value(value)
    with prefix_checkpoint_errors(location):
        tensor = to_lazy_tensor(value, "a step")
        if tensor.numel > MAX_GROUP_TENSOR:
            raise OptimizerStateError(
                f"an optimizer state that is not sharded has {tensor.numel:,} elements, but at most "
                f"{MAX_GROUP_TENSOR} are supported"
            )
        return tensor.tolist()
