"""The files of one DeepSpeed checkpoint folder: names, content, and whether they are from one run.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.containers.pickle_reader import Instance, plain, shown
from converters.containers.torchzip import StoredTensor, TorchZip
from converters.errors import CheckpointError
from converters.tensors.tensor import MAX_DIMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.containers.pickle_reader import Standin
    from converters.storage.folder import Folder
    from converters.storage.path_or_url import Place

Shapes = dict[str, tuple[int, ...]]

_OPTIM = re.compile(
    r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?(?:expert_|expp_rank_).*\.pt")
_PIPELINE = re.compile(r"layer_\d+.*model_states\.pt")


def _integer(value: Any = 0) -> int:
    return int(value) if isinstance(value, int) else 0


# Classes that DeepSpeed and its common clients pickle; those of `deepspeed.` are inert too.
STANDINS: Mapping[str, Standin | None] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": _integer,
    "argparse.Namespace": None,
    "types.SimpleNamespace": None,
}
PREFIXES = ("deepspeed.",)


@dataclass(frozen=True)
class Names:
    """The rank files of a folder.

    Attributes:
        optim: rank -> file of optimizer states; empty where ZeRO is off.
        model: rank -> file of model states; rank 0 alone below stage 3.
    """

    optim: dict[int, str]
    model: dict[int, str]
    per_rank_model: bool


def find_names(path: Place) -> Names | None:
    """The rank files in `path`; None if it holds none.

    Raises:
        CheckpointError: tensor, pipeline or expert parallel files, or files of two runs.
    """
    try:
        entries = sorted(entry.name for entry in path.iterdir())
    except OSError:
        return None
    optim, model, experts, layers = [], [], [], []
    for name in entries:
        if found := _OPTIM.fullmatch(name):
            optim.append((found, name))
        elif found := _MODEL.fullmatch(name):
            model.append((found, name))
        elif _EXPERT.fullmatch(name):
            experts.append(name)
        elif _PIPELINE.fullmatch(name):
            layers.append(name)
    if not optim and not model:
        return None
    if experts:
        raise CheckpointError(f"{path / experts[0]}: expert parallel checkpoints are not supported")
    if layers:
        raise CheckpointError(f"{path / layers[0]}: pipeline parallel checkpoints are not supported")
    for found, name in [*optim, *model]:
        if int(found["mp"]):
            raise CheckpointError(f"{path / name}: tensor parallel checkpoints are not supported")
    if len({found["prefix"] for found, _ in optim}) > 1:
        raise CheckpointError(
            f"{path}: holds optimizer files with and without the prefix bf16_, from two runs"
        )
    if not optim and (path / "zero").is_dir():  # a universal checkpoint for all stages has both
        whole = [(found, name) for found, name in model if found["rank"] is None]
        model = whole or model
    if len({found["rank"] is None for found, _ in model}) > 1:
        raise CheckpointError(f"{path}: holds model files of stage 3 and of other stages, from two runs")
    return Names(
        _by_rank(path, optim), _by_rank(path, model), any(found["rank"] is not None for found, _ in model)
    )


def _by_rank(path: Place, files: list[tuple[re.Match[str], str]]) -> dict[int, str]:
    ranks: dict[int, str] = {}
    for found, name in files:
        rank = int(found["rank"] or 0)
        if rank in ranks:
            raise CheckpointError(f"{path}: {ranks[rank]} and {name} are both of rank {rank}")
        ranks[rank] = name
    return dict(sorted(ranks.items()))


def check_ranks(path: Place, ranks: Mapping[int, str], world: int, what: str) -> None:
    """CheckpointError unless there is exactly one file for every rank of `world`."""
    missing = world - sum(rank < world for rank in ranks)
    if missing:
        first = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)  # `world` is untrusted
        raise CheckpointError(f"{path}: the {what} states of rank {first} are missing ({missing} of {world})")
    extra = [name for rank, name in ranks.items() if rank >= world]
    if extra:
        raise CheckpointError(f"{path / extra[0]}: a file of another run; this one had {world} ranks")


def load(folder: Folder, name: str) -> dict[str, Any]:
    """The content of one rank file.

    Raises:
        CheckpointError: damaged, holds code, or was renamed (torch.save stores the original name).
    """
    file = folder.file(name)
    archive = TorchZip(file)
    archive.refuse_renamed()
    content = archive.load(STANDINS, PREFIXES)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.path}: not a DeepSpeed file")
    return content


@dataclass(frozen=True)
class ModelFile:
    """One `*_model_states.pt`.

    Attributes:
        groups: parameter name -> shape in the order of the flat group, per group (stage 3: sub-group).
        frozen: frozen parameter -> shape; None if not saved.
        fragments: frozen parameter -> the part in this file.
        shared: tied alias -> owner.
    """

    where: str
    content: dict[str, Any]
    module: dict[str, Any]
    buffers: list[str]
    groups: list[Shapes] | None
    frozen: Shapes | None
    fragments: dict[str, StoredTensor]
    shared: dict[str, str]

    def count(self, key: str) -> int | None:
        """A counter such as `global_steps`."""
        value = self.content.get(key)
        return value if type(value) is int else None

    def counters(self) -> dict[str, int]:
        """The engine's counters in the file."""
        counted = {key: self.count(key) for key in ("global_steps", "global_samples", "skipped_steps")}
        return {key: value for key, value in counted.items() if value is not None}


def read_model(folder: Folder, name: str) -> ModelFile:
    """Read one file of model states; CheckpointError if DeepSpeed could not have written it."""
    content = load(folder, name)
    where = str(folder.path / name)
    module = content.get("module")
    if not isinstance(module, dict) or "buffer_names" not in content:
        raise CheckpointError(f"{where}: not a DeepSpeed model states file")
    if "autoep_layers" in content or "ds_autoep_layers" in content:
        raise CheckpointError(f"{where}: expert parallel checkpoints are not supported")
    degrees = content.get("checkpoint_parallel_dimensions")
    sizes = [content.get("mp_world_size"), *(degrees.values() if isinstance(degrees, dict) else ())]
    if any(type(size) is int and size > 1 for size in sizes):
        raise CheckpointError(f"{where}: tensor or pipeline parallel checkpoints are not supported")
    groups = content.get("param_shapes")
    if isinstance(groups, dict):
        groups = [groups]
    fragments = content.get("frozen_param_fragments")
    shared = content.get("shared_params")
    return ModelFile(
        where,
        content,
        module,
        _names(content["buffer_names"], where),
        None if groups is None else [_shapes(group, where) for group in _list(groups, where)],
        None
        if content.get("frozen_param_shapes") is None
        else _shapes(content["frozen_param_shapes"], where),
        {
            str(key): flat(value, f"{where}: {key!r}", whole=True)
            for key, value in _dict(fragments, where).items()
        },
        {str(alias): str(owner) for alias, owner in _dict(shared, where).items()},
    )


@dataclass(frozen=True)
class OptimFile:
    """One `*_optim_states.pt`: `state` is the ZeRO optimizer's own dict."""

    where: str
    state: dict[str, Any]
    version: Any
    config: dict[str, Any]


def read_optim(folder: Folder, name: str) -> OptimFile:
    """Read one file of optimizer states."""
    content = load(folder, name)
    where = str(folder.path / name)
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise CheckpointError(f"{where}: not a DeepSpeed optimizer states file")
    if "ds_zero_partition_groups" in state:
        raise CheckpointError(f"{where}: expert parallel checkpoints are not supported")
    config = content.get("ds_config")
    return OptimFile(where, state, content.get("ds_version"), config if isinstance(config, dict) else {})


def check_same(where: str, what: str, ours: Any, first: Any) -> None:
    """CheckpointError unless two files agree on a record that is equal on every rank of a run."""
    if ours != first:
        raise CheckpointError(f"{where}: its {what} differs from the first rank; files of two runs or steps")


def config_of(content: Mapping[str, Any]) -> Any:
    """The DeepSpeed configuration in comparable form."""
    return plain(content.get("ds_config"))


def flat(value: Any, where: str, *, whole: bool = False) -> StoredTensor:
    """`value` if it is a contiguous 1-d tensor (of any shape if `whole`); else CheckpointError."""
    if not isinstance(value, StoredTensor):
        raise CheckpointError(f"{where}: not a tensor")
    if not value.is_contiguous:
        raise CheckpointError(f"{where}: the tensor is not contiguous")
    if not whole and len(value.shape) != 1:
        raise CheckpointError(f"{where}: a flat tensor of {len(value.shape)} dimensions")
    return value


def fragment(value: Any, where: str) -> tuple[int, int]:
    """(start, numel) of a `fragment_address`."""
    state = value.state if isinstance(value, Instance) else None
    if isinstance(value, Instance) and len(value.args) == 2 and state is None:
        state = {"numel": value.args[0], "start": value.args[1]}
    if not isinstance(state, dict):
        raise CheckpointError(f"{where}: damaged param_slice_mappings")
    start, numel = state.get("start"), state.get("numel")
    if type(start) is not int or type(numel) is not int:
        raise CheckpointError(f"{where}: damaged param_slice_mappings")
    return start, numel


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: damaged, a table of parameters is not a dict")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: damaged, param_shapes is not a list")
    return value


def _names(value: Any, where: str) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{where}: damaged, buffer_names is not a list of names")
    return list(value)


def _shapes(value: Any, where: str) -> Shapes:
    shapes: Shapes = {}
    for name, shape in _dict(value, where).items():
        if (
            not isinstance(shape, tuple)
            or len(shape) > MAX_DIMS
            or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape)
        ):
            raise CheckpointError(f"{where}: the shape of {shown(name)} is not a shape")
        shapes[str(name)] = shape
    return shapes
