"""DeepSpeed without ZeRO: one file with the model and its optimizer.

In fp32 the optimizer is torch's own. In 16 bits a wrapper keeps fp32 masters without names, shaped
(`fp32_groups`) or one flat buffer per group (`fp32_groups_flat`). They are matched, in the model's order, to
the weights that equal their rounded values.

Source: deepspeed/runtime/fp16/unfused_optimizer.py and fused_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.formats.deepspeed.checks import rounds_to
from portable.converters.formats.deepspeed.flat_layout import (
    EqualSlices,
    ParameterShare,
    join_pieces,
    to_piece,
)
from portable.converters.formats.deepspeed.optimizer import build_optimizer
from portable.converters.formats.deepspeed.rank_files import (
    ModelFile,
    OptimFile,
    Weights,
    build_checkpoint,
    require_flat,
)
from portable.converters.formats.torch_save.optimizer import as_tensor, is_optimizer, read_optimizer
from portable.converters.formats.torch_save.reader import find_aliases
from portable.converters.names.canonical import strip_prefixes
from portable.converters.names.index_keys import fit_in_order

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint, OptimizerState
    from portable.converters.storage.folder import Folder
    from portable.converters.storage.path_or_url import Place
    from portable.converters.tensors.tensor import Tensor


@dataclass(frozen=True)
class _Masters:
    """The fp32 masters by name, and their names in the optimizer's groups."""

    tensors: dict[str, Tensor]
    groups: list[list[str]]
    flat: list[EqualSlices] | None = None


def open_unsharded(folder: Folder, model: ModelFile, root: Place) -> Checkpoint:
    """The checkpoint in a single file of model states.

    Raises:
        CheckpointError: part of a ZeRO run, or its masters do not fit the weights.
    """
    if model.groups is not None:
        raise CheckpointError(f"{folder.path}: the optimizer states of all ranks are missing")
    stored = {key: value for key, value in model.module.items() if isinstance(value, StoredTensor)}
    stored = strip_prefixes(stored, location=model.where)
    missing = [buffer for buffer in model.buffers if buffer not in model.module]
    if missing:
        raise CheckpointError(f"{model.where}: the buffer {missing[0]!r} is named but missing")
    whole = {key: as_tensor(value, key) for key, value in stored.items()}
    aliases = find_aliases(stored, whole)
    buffers = set(strip_prefixes(dict.fromkeys(model.buffers), location=model.where))
    order = [key for key in stored if key not in aliases and key not in buffers]
    saved = model.content.get("optimizer")
    masters = _read_masters(saved, stored, order, model)
    tensors = whole | masters.tensors

    def open_optimizer() -> OptimizerState | None:
        if not isinstance(saved, dict):
            return None
        if masters.flat is not None:
            return _build_flat_optimizer(saved, masters.flat, masters.groups, model.where)
        state = saved if is_optimizer(saved) else saved.get("optimizer_state_dict")
        if masters.groups and isinstance(state, dict):
            state = _with_names(state, masters.groups, model.where)
        return read_optimizer(state, tensors, order, location=model.where)

    about = {
        "world_size": model.get_counter("dp_world_size"),
        "ds_version": model.content.get("ds_version"),
        "zero_stage": 0,
    }
    weights = Weights(tensors, aliases)
    return build_checkpoint("deepspeed", root, folder.path, model, weights, open_optimizer, about)


def _read_masters(
    saved: Any, stored: dict[str, StoredTensor], order: list[str], model: ModelFile
) -> _Masters:
    if not isinstance(saved, dict):
        return _Masters({}, [])
    shaped, run = saved.get("fp32_groups"), saved.get("fp32_groups_flat")
    if isinstance(shaped, list) and all(isinstance(group, list) for group in shaped):
        return _name_shaped_masters(shaped, stored, order, model.where)
    if isinstance(run, list):
        return _split_flat_masters(run, stored, order, model.where)
    if not is_optimizer(saved):
        raise OptimizerStateError(f"{model.where}: its optimizer is not supported")
    return _Masters({}, [])


def _name_shaped_masters(
    groups: list[list[Any]], stored: dict[str, StoredTensor], order: list[str], location: str
) -> _Masters:
    wanted = [
        [require_flat(master, f"{location}: fp32_groups", whole=True) for master in group] for group in groups
    ]
    places = fit_in_order(
        [(name, stored[name].shape) for name in order],
        [[master.shape for master in group] for group in wanted],
    )
    if isinstance(places, int):
        why = "several ways" if places else "no way"
        raise CheckpointError(
            f"{location}: its fp32 masters have no names, and fit the weights in their order in {why}; "
            "Muon's have another, which is not supported without ZeRO"
        )
    named = [[""] * len(group) for group in wanted]
    tensors = {}
    for name, (group, index) in places.items():
        master = wanted[group][index]
        if rounds_to(to_piece(master), 0, stored[name], prod(master.shape)) is False:
            raise CheckpointError(f"{location}: the weight {name!r} differs from its rounded fp32 master")
        named[group][index] = name
        tensors[name] = as_tensor(master, name)
    return _Masters(tensors, named)


def _split_flat_masters(
    groups: list[Any], stored: dict[str, StoredTensor], order: list[str], location: str
) -> _Masters:
    """Split each group's flat buffer: each next weight goes to the only group with its values."""
    runs = [to_piece(require_flat(group, f"{location}: fp32_groups_flat")) for group in groups]
    positions = [0] * len(runs)
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in runs]
    for name in order:
        count = prod(stored[name].shape)
        fitting = [
            group
            for group, run in enumerate(runs)
            if count
            and positions[group] + count <= run.numel
            and rounds_to(run, positions[group], stored[name], count)
        ]
        if len(fitting) > 1:
            raise CheckpointError(f"{location}: the weight {name!r} fits several of its fp32_groups_flat")
        for group in fitting:
            shapes[group][name] = stored[name].shape
            positions[group] += count
    frozen = [name for name in order if not any(name in group for group in shapes)]
    taken = {stored[name].shape for group in shapes for name in group}
    if positions != [run.numel for run in runs] or any(stored[name].shape in taken for name in frozen):
        raise CheckpointError(f"{location}: its fp32_groups_flat do not fit the weights unambiguously")
    layouts = [
        EqualSlices(group, [0] * len(group), 1, run.numel, location)
        for group, run in zip(shapes, runs, strict=True)
    ]
    tensors: dict[str, Tensor] = {}
    for layout, run in zip(layouts, runs, strict=True):
        tensors |= layout.split_flat(join_pieces([run], location))
    return _Masters(tensors, [list(group) for group in shapes], layouts)


def _with_names(state: dict[str, Any], groups: list[list[str]], location: str) -> dict[str, Any]:
    """The optimizer's state dict, with the names of the parameters in its groups."""
    listed = state.get("param_groups")
    if not isinstance(listed, list) or [len(group.get("params", ())) for group in listed] != list(
        map(len, groups)
    ):
        raise CheckpointError(f"{location}: the optimizer's groups do not match its fp32 masters")
    named = [{**group, "param_names": names} for group, names in zip(listed, groups, strict=True)]
    return {**state, "param_groups": named}


def _build_flat_optimizer(
    saved: dict[str, Any], layouts: list[EqualSlices], groups: list[list[str]], location: str
) -> OptimizerState:
    # Laid out as by a ZeRO run of one rank: one flat parameter per group.
    alone = OptimFile(location, {"base_optimizer_state": saved.get("optimizer_state_dict")}, None, {})
    shares = [
        ParameterShare(number, (0,), {name: name for name in group}) for number, group in enumerate(groups)
    ]
    built = build_optimizer(1, [alone], layouts, shares)
    if built is None:
        raise CheckpointError(f"{location}: the optimizer has no state")
    return built
