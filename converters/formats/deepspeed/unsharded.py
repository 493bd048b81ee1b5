"""Read DeepSpeed checkpoints without ZeRO: one file with the model and its optimizer.

After training in fp32, the file contains a plain torch optimizer. In fp16 and bf16, DeepSpeed's
wrapper around the optimizer also keeps fp32 master weights, which have no names. They are stored
either with their shapes (`fp32_groups`), or as one flat buffer per parameter group
(`fp32_groups_flat`). Their order within a group is the order of the model's weights. This reader
assigns each master weight to a weight of the model, and checks that the rounded master weight
equals this weight.

Source: deepspeed/runtime/fp16/unfused_optimizer.py and fused_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.containers.torchzip import StoredTensor
from portable.converters.containers.untrusted_values import get_list_or_empty, get_mapping_or_empty
from portable.converters.errors import DamagedCheckpointError, OptimizerStateError, UnsupportedCheckpointError
from portable.converters.formats.deepspeed.checks import sample_rounds_to_weight
from portable.converters.formats.deepspeed.flat_layout import (
    GroupOnRanks,
    Stage12GroupLayout,
    require_equal_dtypes,
    to_flat_piece,
)
from portable.converters.formats.deepspeed.optimizer import build_zero_optimizer
from portable.converters.formats.deepspeed.rank_files import (
    ModelFile,
    NamedWeights,
    OptimFile,
    build_deepspeed_checkpoint,
    require_contiguous,
)
from portable.converters.formats.torch_save.optimizer import (
    build_named_optimizer,
    is_optimizer_state_dict,
    to_lazy_tensor,
)
from portable.converters.formats.torch_save.reader import find_tied_aliases
from portable.converters.names.canonical import strip_common_prefixes
from portable.converters.names.index_keys import match_groups_to_parameters

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint, OptimizerState
    from portable.converters.storage.folder import CheckpointFolder
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor


@dataclass(frozen=True)
class _Fp32Masters:
    """Fp32 master weights of a model, and the names of the parameters in the optimizer's groups.

    All attributes are empty or None if the optimizer keeps no separate master weights.

    Attributes:
        tensors: Master weights, keyed by parameter name.
        groups: Parameter names in each parameter group of the optimizer.
        flat: Layout of each flat buffer. None if the master weights are not stored in flat buffers.
    """

    tensors: dict[str, Tensor]
    groups: list[list[str]]
    flat: list[Stage12GroupLayout] | None = None


def open_unsharded_checkpoint(folder: CheckpointFolder, model: ModelFile, root: AnyPath) -> Checkpoint:
    """Open a checkpoint that consists of a single file of model states.

    If the optimizer has fp32 master weights, they replace the model's weights of the same names.
    Buffers, frozen weights and all other tensors keep their values in the model states. The
    optimizer state is built when it is needed.

    Args:
        folder: Checkpoint folder.
        model: Content of the file, which also contains the optimizer.
        root: Path that was opened.

    Raises:
        CheckpointError: If the file belongs to a ZeRO run, whose optimizer files are missing, or if
            the values of a buffer are missing. Also raised if the fp32 master weights do not match
            the model's weights, or if the format of the optimizer is unknown and it may contain
            master weights.
    """
    if model.group_shapes is not None:
        raise DamagedCheckpointError(f"{folder.path}: the optimizer states of all ranks are missing")
    stored = {key: value for key, value in model.module.items() if isinstance(value, StoredTensor)}
    stored = strip_common_prefixes(stored, location=model.location)
    missing = [buffer for buffer in model.buffers if buffer not in model.module]
    if missing:
        raise DamagedCheckpointError(
            f"{model.location}: the buffer {missing[0]!r} is in buffer_names, but its values are missing"
        )
    weights_by_name = {key: to_lazy_tensor(value, key) for key, value in stored.items()}
    aliases = find_tied_aliases(stored, weights_by_name)
    buffers = set(strip_common_prefixes(dict.fromkeys(model.buffers), location=model.location))
    parameter_names = [key for key in stored if key not in aliases and key not in buffers]
    saved = model.content.get("optimizer")
    masters = _read_masters(saved, stored, parameter_names, model)
    tensors = weights_by_name | masters.tensors

    def open_optimizer() -> OptimizerState | None:
        if saved is None:
            return None
        if masters.flat is not None:
            return _build_flat_optimizer(saved, masters.flat, masters.groups, model.location)
        state = saved.get("optimizer_state_dict") if masters.groups else saved
        if masters.groups and isinstance(state, dict):
            state = _add_parameter_names(state, masters.groups, model.location)
        return build_named_optimizer(state, tensors, parameter_names, location=model.location)

    metadata = {
        "world_size": model.get_counter("dp_world_size"),
        "ds_version": model.content.get("ds_version"),
        "zero_stage": 0,
    }
    weights = NamedWeights(tensors, aliases)
    return build_deepspeed_checkpoint(
        "deepspeed", root, folder.path, model, weights, open_optimizer, metadata
    )


def _read_masters(
    saved: Any, stored: dict[str, StoredTensor], parameter_names: list[str], model: ModelFile
) -> _Fp32Masters:
    """Read the fp32 master weights of the optimizer.

    Args:
        saved: Optimizer as unpickled. None if the file contains no optimizer.
        stored: Tensors of the model, keyed by name.
        parameter_names: Names of the parameters in the order of the model.
        model: Model states file. Its path is used in error messages.

    Returns:
        The master weights. Empty if the file contains no optimizer. Also empty if the model was
        trained in fp32, because its weights then have no separate fp32 copies.

    Raises:
        CheckpointError: If the master weights cannot be matched to the weights of the model, or if
            the optimizer has an unknown format and may contain master weights.
    """
    if saved is None:
        return _Fp32Masters({}, [])
    shaped, flat = (get_mapping_or_empty(saved).get(key) for key in ("fp32_groups", "fp32_groups_flat"))
    if isinstance(shaped, list) and shaped and all(isinstance(group, list) for group in shaped):
        return _name_shaped_masters(shaped, stored, parameter_names, model.location)
    if isinstance(flat, list) and flat:
        return _split_flat_masters(flat, stored, parameter_names, model.location)
    # Weights in fp32 have no separate master weights. The optimizer is then only rejected when it is read.
    if not is_optimizer_state_dict(saved) and any(stored[name].dtype != "F32" for name in parameter_names):
        raise UnsupportedCheckpointError(
            f"{model.location}: the optimizer state, which may contain the fp32 master weights, has an "
            "unknown format"
        )
    return _Fp32Masters({}, [])


def _name_shaped_masters(
    groups: list[list[Any]], stored: dict[str, StoredTensor], parameter_names: list[str], location: str
) -> _Fp32Masters:
    """Match fp32 master weights that were saved in their original shapes to the model's parameters.

    The master weights have no names. They are matched by their shapes and by their order in each
    parameter group. To confirm a match, a sample of the master weight's elements is rounded to the
    parameter's dtype. The result must equal the same elements of the parameter.

    Args:
        groups: Master weights in each parameter group.
        stored: Tensors of the model, keyed by name.
        parameter_names: Names of the parameters in the order of the model.
        location: Path of the file, used in error messages.

    Returns:
        The master weights, keyed by parameter name, and the names in each group.

    Raises:
        CheckpointError: If there is not exactly one way to match the master weights, or if a
            rounded master weight differs from its parameter.
    """
    masters_by_group = [
        [require_contiguous(master, f"{location}: fp32_groups", any_shape=True) for master in group]
        for group in groups
    ]
    positions = match_groups_to_parameters(
        [(name, stored[name].shape) for name in parameter_names],
        [[master.shape for master in group] for group in masters_by_group],
    )
    if isinstance(positions, int):
        problem = "can be matched to the weights in several ways" if positions else "do not match the weights"
        raise UnsupportedCheckpointError(
            f"{location}: the fp32 master weights have no names and {problem}; such checkpoints, for example "
            "with the optimizer Muon, are only supported with ZeRO"
        )
    names_by_group = [[""] * len(group) for group in masters_by_group]
    tensors = {}
    for name, (group, index) in positions.items():
        master = masters_by_group[group][index]
        if sample_rounds_to_weight(to_flat_piece(master), 0, stored[name], prod(master.shape)) is False:
            raise DamagedCheckpointError(
                f"{location}: the weight {name!r} differs from its fp32 master weight"
            )
        names_by_group[group][index] = name
        tensors[name] = to_lazy_tensor(master, name)
    return _Fp32Masters(tensors, names_by_group)


def _split_flat_masters(
    groups: list[Any], stored: dict[str, StoredTensor], parameter_names: list[str], location: str
) -> _Fp32Masters:
    """Split the flat fp32 buffer of each parameter group into named parameters.

    A buffer contains the master weights of its group in the order of the model. For each weight of
    the model, a sample of the next unassigned elements of every buffer is rounded to the weight's
    dtype and compared with the weight. The weight belongs to the group whose sample equals it. A
    weight that matches no group is frozen. If a frozen weight has the shape of a trained one, the
    split is rejected, because the weight may instead be a trained weight with changed values.

    Args:
        groups: Flat buffer of each parameter group.
        stored: Tensors of the model, keyed by name.
        parameter_names: Names of the parameters in the order of the model.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If a weight matches several groups, if a buffer has elements that do not
            belong to any weight, or if a frozen weight has the same shape as a trained one.
    """
    flat_masters = [
        to_flat_piece(require_contiguous(group, f"{location}: fp32_groups_flat")) for group in groups
    ]
    positions = [0] * len(flat_masters)
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in flat_masters]
    for name in parameter_names:
        count = prod(stored[name].shape)
        fitting = [
            group
            for group, flat_master in enumerate(flat_masters)
            if count
            and positions[group] + count <= flat_master.numel
            and sample_rounds_to_weight(flat_master, positions[group], stored[name], count)
        ]
        if len(fitting) > 1:
            raise UnsupportedCheckpointError(
                f"{location}: the weight {name!r} matches several entries of fp32_groups_flat"
            )
        for group in fitting:
            shapes[group][name] = stored[name].shape
            positions[group] += count
    frozen = [name for name in parameter_names if not any(name in group for group in shapes)]
    trained_shapes = {stored[name].shape for group in shapes for name in group}
    if positions != [flat_master.numel for flat_master in flat_masters] or any(
        stored[name].shape in trained_shapes for name in frozen
    ):
        raise UnsupportedCheckpointError(
            f"{location}: the entries of fp32_groups_flat cannot be matched to the weights"
        )
    layouts = [
        Stage12GroupLayout(group, [0] * len(group), 1, flat_master.numel, location)
        for group, flat_master in zip(shapes, flat_masters, strict=True)
    ]
    tensors: dict[str, Tensor] = {}
    for layout, flat_master in zip(layouts, flat_masters, strict=True):
        tensors |= layout.split_into_parameters(require_equal_dtypes([flat_master], location))
    return _Fp32Masters(tensors, [list(group) for group in shapes], layouts)


def _add_parameter_names(state: dict[str, Any], groups: list[list[str]], location: str) -> dict[str, Any]:
    """Return a copy of the optimizer's state dict with `param_names` added to its parameter groups.

    Args:
        state: State dict of the optimizer.
        groups: Parameter names in each group.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If the number or the lengths of the parameter groups differ from `groups`.
    """
    listed = state.get("param_groups")
    params = [get_mapping_or_empty(group).get("params") for group in get_list_or_empty(listed)]
    if [len(get_list_or_empty(keys)) for keys in params] != list(map(len, groups)):
        raise DamagedCheckpointError(
            f"{location}: the parameter groups of the optimizer do not match fp32_groups"
        )
    named_groups = [
        {**get_mapping_or_empty(group), "param_names": names}
        for group, names in zip(get_list_or_empty(listed), groups, strict=True)
    ]
    return {**state, "param_groups": named_groups}


def _build_flat_optimizer(
    saved: dict[str, Any], layouts: list[Stage12GroupLayout], groups: list[list[str]], location: str
) -> OptimizerState:
    """Build the optimizer state of a run that stores its fp32 master weights in flat buffers.

    This optimizer has the same layout as in a ZeRO run with one rank: one flat parameter per group.

    Args:
        saved: State dict of the optimizer wrapper, as unpickled.
        layouts: Layout of each flat buffer.
        groups: Parameter names in each group.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If the optimizer has no state.
    """
    # A ZeRO run with one rank has the same layout: one flat parameter per group.
    optim_file = OptimFile(location, {"base_optimizer_state": saved.get("optimizer_state_dict")}, None, {})
    shares = [
        GroupOnRanks(number, (0,), {name: name for name in group}) for number, group in enumerate(groups)
    ]
    built = build_zero_optimizer(1, [optim_file], layouts, shares)
    if built is None:
        raise OptimizerStateError(f"{location}: the optimizer state is missing")
    return built
