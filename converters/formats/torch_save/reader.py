"""Full state dicts written by `torch.save`: `.bin`, `.pt`, `.pth`, one file or shards with an index.

A file holds a bare state dict, or one within containers (`model`, `state_dict`, ...), beside an optimizer, a
scheduler and counters. Two names for one view of a storage are tied. The optimizer may also be a file of its
own, `optimizer.pt` (the Trainer) or `optimizer.bin` (Accelerate), beside a model in this format or
safetensors.

Source: torch/serialization.py; transformers' `save_pretrained`; accelerate/utils/fsdp_utils.py
(`FULL_STATE_DICT`).
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Aliases, Checkpoint, OptimizerState
from portable.converters.config_and_tokenizer_files import (
    check_one_model,
    find_companions,
    read_trainer_metadata,
)
from portable.converters.containers.pickle_reader import Instance, format_value
from portable.converters.containers.shard_index import read_index
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import CheckpointError, OptimizerStateError, prefix_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.torch_save.optimizer import Leaf, as_tensor, is_optimizer, read_optimizer
from portable.converters.limits import MAX_CONTAINER_DEPTH, MAX_KEY_IN_PATH, MAX_VALUES
from portable.converters.names.canonical import find_model_container, strip_prefixes
from portable.converters.names.tied_weights import pick_owner
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import files_in, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from portable.converters.names.canonical import Path as KeyPath
    from portable.converters.storage.byte_sources import SourceFile
    from portable.converters.tensors.tensor import Tensor

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_SUFFIX = ".bin.index.json"
# The names that libraries give a whole model, in order of preference. A safetensors copy of the weights is
# preferred to the last two.
_FSDP = "pytorch_model_fsdp.bin"
_HF = ("pytorch_model.bin.index.json", "pytorch_model.bin")
# Files beside a model that are not the model.
_OTHER = re.compile(
    r"optimizer.*|optim.*|scheduler.*|scaler.*|rng_state.*|random_states.*|training_args\.bin|sampler.*"
    r"|dataloader.*|dl_state.*|custom_checkpoint.*"
)
# One rank's part, from any library: never a full state dict.
_PARTS = re.compile(
    r".*(?:mp_rank_\d+|zero_pp_rank_\d+|_optim_states|rank-?\d+-of-\d+|_rank\d+|layer_\d+-model_\d+|expert_\d+).*"
)
# numpy's arrays, as they are pickled.
_ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
# Accelerate's files of FSDP1's LOCAL_STATE_DICT.
_LOCAL = re.compile(r"pytorch_model_fsdp_rank\d+\.bin")
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


def _find(source: CheckpointPath) -> str | None:
    """The file with the model, or its index: the given one, one of a known name, or the only one."""
    path = source.path
    if path.is_file():
        part = _PARTS.fullmatch(path.name)
        return path.name if path.name.endswith((*_SUFFIXES, _INDEX_SUFFIX)) and not part else None
    entries = files_in(path)
    if _FSDP in entries:
        return _FSDP
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in entries):
        return None
    for name in _HF:
        if name in entries:
            return name
    candidates = [name for name in entries if name.endswith(_SUFFIXES) and not name.startswith(".")]
    if any(_PARTS.fullmatch(name) for name in candidates):
        return None
    indices = [name for name in entries if name.endswith(_INDEX_SUFFIX)]
    candidates = indices or [name for name in candidates if not _OTHER.fullmatch(name)]
    return candidates[0] if len(candidates) == 1 else None


def _explain_incomplete(source: CheckpointPath) -> str | None:
    path = source.path
    names = [path.name] if path.is_file() else names_in(path)
    if any(_LOCAL.fullmatch(name) for name in names):
        return (
            f"{path}: one rank's part of FSDP1's LOCAL_STATE_DICT, which does not record shapes; load it "
            "where it was saved, and save with SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    if path.is_file():
        if _PARTS.fullmatch(path.name) and path.name.endswith(_SUFFIXES):
            return f"{path}: one rank's part of a checkpoint, by its name; give the folder with all parts"
        return None
    candidates = [name for name in names if name.endswith(_SUFFIXES)]
    parts = [name for name in candidates if _PARTS.fullmatch(name)]
    if parts:
        return (
            f"{path}: holds parts of single ranks ({parts[0]}, ...) that are incomplete or of an unknown "
            "format; save a full state dict, or use DCP"
        )
    candidates = [name for name in candidates if not _OTHER.fullmatch(name)]
    if len(candidates) > 1:
        return f"{path}: several files could be the model ({', '.join(candidates[:4])}); give one of them"
    return None


def _open(source: CheckpointPath, name: str) -> Checkpoint:
    root = source.path if source.path.is_dir() else source.path.parent
    folder = Folder(root)
    if source.path.is_dir():
        check_one_model(root, name)
    location = str(root / name)
    optimizers: list[Any] = []
    counted: dict[str, Any] = {}
    if name.endswith(_INDEX_SUFFIX):
        stored = read_index(folder, name, lambda file: _read_tensors(file, load(file)))
    else:
        stored, optimizers, counted = split_tensors(load(folder.file(name)), location)
    views = strip_prefixes(stored, location=location)
    tensors: dict[str, Tensor] = {}
    for plain, view in views.items():
        with prefix_errors(root / name):
            tensors[plain] = as_tensor(view, plain)
    companions = find_companions(source.path)

    def open_optimizer(aliases: Aliases) -> OptimizerState | None:
        if len(optimizers) > 1:
            raise OptimizerStateError(f"{location}: holds {len(optimizers)} optimizers")
        if optimizers:
            return read_optimizer(optimizers[0], tensors, drop_aliases(tensors, aliases), location=location)
        if source.path.is_file():
            return None
        return open_optimizer_file(folder, tensors, lambda: drop_aliases(tensors, aliases))

    return Checkpoint(
        format="torch",
        root=source.path,
        tensors=tensors,
        aliases=find_aliases(views, tensors),
        optimizer=open_optimizer,
        metadata={**counted, **read_trainer_metadata(root)},
        companions=companions,
        counters=lambda: {"step": counted["step"]} if "step" in counted else {},
    )


def load(file: SourceFile) -> Any:
    """The result of `torch.load`, with `StoredTensor` for tensors; no code in it is run."""
    return TorchZip(file).load()


def drop_aliases(names: Iterable[str], aliases: Aliases) -> list[str]:
    """`names` with each tied parameter once, at its first name, as `named_parameters` counts them."""
    return list(dict.fromkeys(aliases.get(name, name) for name in names))


def open_optimizer_file(
    folder: Folder, tensors: Mapping[str, Tensor], order: Callable[[], list[str] | None]
) -> OptimizerState | None:
    """The optimizer in `optimizer.pt` or `optimizer.bin` beside the model, None where there is none.

    Raises:
        CheckpointError: several, or one that does not fit the model's parameters.
    """
    entries = names_in(folder.path)
    optimizer_files = [name for name in OPTIMIZERS if name in entries]
    if not optimizer_files:
        return None
    if len(optimizer_files) > 1 or "optimizer_1.bin" in entries:
        raise OptimizerStateError(f"{folder.path}: holds several optimizers")
    file = folder.file(optimizer_files[0])
    return read_optimizer(load(file), tensors, order(), location=str(file.path))


def _read_tensors(file: SourceFile, saved: Any) -> dict[str, StoredTensor]:
    """The tensors of one shard, which may hold nothing else."""
    if not isinstance(saved, dict) or not all(
        isinstance(key, str) and isinstance(value, StoredTensor) for key, value in saved.items()
    ):
        raise CheckpointError(f"{file.path}: not a shard of a state dict (a table of tensors)")
    return saved


class StateDictParts(NamedTuple):
    """The parts of a pickled state dict.

    Attributes:
        model_tensors: Tensors of the model by name.
        optimizers: State dicts of optimizers.
        counters: The step, if the file records it.
    """

    model_tensors: dict[str, Any]
    optimizers: list[Any]
    counters: dict[str, Any]


def split_tensors(saved: Any, location: str) -> StateDictParts:
    """Split the content of a file into the model's tensors, the optimizers and the counters."""
    if not isinstance(saved, dict):
        description = "a single tensor" if isinstance(saved, StoredTensor) else f"a {type(saved).__name__}"
        raise CheckpointError(f"{location}: not a state dict but {description}")
    if "shard_metadata" in saved:
        raise CheckpointError(
            f"{location}: one rank's shard of a PyTorch/XLA FSDP checkpoint; give its folder"
        )
    if "ds_version" in saved or "ds_config" in saved:
        raise CheckpointError(f"{location}: one file of a DeepSpeed checkpoint; give its folder")
    if is_optimizer(saved):
        raise CheckpointError(
            f"{location}: an optimizer's state without a model; give the folder of the checkpoint"
        )
    leaves: dict[KeyPath, Leaf] = {}
    optimizers: list[Any] = []
    counted: dict[str, Any] = {}
    arrays: list[KeyPath] = []
    left = MAX_VALUES
    # A stack, since a file may nest deeper than the recursion limit.
    pending: list[tuple[KeyPath, Any]] = [((), saved)]
    while pending:
        path, value = pending.pop()
        left -= 1
        if left < 0 or len(path) > MAX_CONTAINER_DEPTH:
            raise CheckpointError(f"{location}: nested too deeply or too large to be a state dict")
        if isinstance(value, Leaf):
            leaves[path] = value
        elif is_optimizer(value):
            optimizers.append(value)
        elif isinstance(value, dict):
            items = [(key, item) for key, item in value.items() if isinstance(key, (str, int))]
            if any(type(key) is int and abs(key) > MAX_KEY_IN_PATH for key, _ in items):
                raise CheckpointError(f"{location}: a dict has integer keys too large for a state dict")
            pending.extend(((*path, key), item) for key, item in reversed(items))
        elif isinstance(value, (list, tuple)):
            pending.extend(((*path, key), item) for key, item in reversed(list(enumerate(value))))
        elif isinstance(value, Instance) and value.key in _ARRAYS:
            arrays.append(path)
        elif isinstance(value, int) and len(path) == 1 and path[0] in ("step", "global_step"):
            counted["step"] = value
    container = find_model_container(list(leaves))
    if container:  # beside a state dict without one, they are random states
        inside = (path for path in arrays if path[:-1] == container)
        lost = next((path for path in inside if not str(path[-1]).endswith("_extra_state")), None)
        if lost is not None:
            raise CheckpointError(
                f"{location}: {format_value('.'.join(map(str, lost)))} is a numpy array; save it as a tensor"
            )
    model: dict[str, Leaf] = {}
    for path, stored in leaves.items():
        if container is None or path[:-1] == container:
            name = ".".join(map(str, path if container is None else path[-1:]))
            if name in model:
                raise CheckpointError(f"{location}: two tensors are called {name!r}")
            model[name] = stored
    if not model:
        raise CheckpointError(f"{location}: holds no tensors")
    return StateDictParts(model, optimizers, counted)


def find_aliases(views: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Alias -> owner, for names with the same view of the same storage."""
    groups: dict[str, list[str]] = {}
    for name, view in views.items():
        if tensors[name].numel and prod(view.shape):
            # Strides of dimensions of size 1 do not matter. The key is a string: see `pickle_reader.MAX_KEY`.
            strides = [step if size > 1 else 0 for size, step in zip(view.shape, view.strides, strict=True)]
            located = (str(view.storage.zip.file.path), view.storage.key, view.offset, view.shape, strides)
            groups.setdefault(repr((*located, view.dtype)), []).append(name)
    aliases: dict[str, str] = {}
    for names in groups.values():
        owner = pick_owner({name: tensors[name] for name in names}) if len(names) > 1 else names[0]
        aliases.update({name: owner for name in names if name != owner})
    return aliases


FORMAT = Format(
    "torch",
    _find,
    _open,
    _explain_incomplete,
)
