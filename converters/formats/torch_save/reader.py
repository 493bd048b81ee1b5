"""Read full state dicts that `torch.save` wrote to a file or to indexed shards.

A file (`.bin`, `.pt` or `.pth`) contains a bare state dict, or a dict with the state dict under a
key such as `model` or `state_dict`. In the second case, the file may also contain an optimizer, a
scheduler, and counters such as the step. If two names refer to the same elements of the same
storage, they are tied. The optimizer may also be a separate file: `optimizer.pt` (transformers'
Trainer) or `optimizer.bin` (Accelerate), next to a model in this format or in safetensors.

Source: torch/serialization.py; `save_pretrained` of transformers; `FULL_STATE_DICT` in
accelerate/utils/fsdp_utils.py.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Aliases, Checkpoint, OptimizerState
from portable.converters.config_and_tokenizer_files import (
    check_single_model,
    find_companions,
    read_trainer_metadata,
)
from portable.converters.containers.pickle_reader import PickledInstance, format_untrusted_value
from portable.converters.containers.shard_index import read_indexed_shards
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    OptimizerStateError,
    prefix_checkpoint_errors,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.torch_save.optimizer import (
    TensorLeaf,
    build_named_optimizer,
    is_optimizer_state_dict,
    to_lazy_tensor,
)
from portable.converters.limits import MAX_CONTAINER_DEPTH, MAX_KEY_IN_PATH, MAX_VALUES
from portable.converters.names.canonical import find_model_container, strip_common_prefixes
from portable.converters.names.tied_weights import select_tie_owner
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names, list_file_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from portable.converters.names.canonical import StateDictPath as KeyPath
    from portable.converters.storage.byte_sources import CheckpointFile
    from portable.converters.tensors.tensor import Tensor

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_SUFFIX = ".bin.index.json"
_FSDP_FILE = "pytorch_model_fsdp.bin"
_HF_FILES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
"""Names of the file or index of a complete model, in order of preference.

In a folder with safetensors files, they are ignored, because the safetensors copy is preferred.
"""
_OTHER_FILES = re.compile(
    r"optimizer.*|optim.*|scheduler.*|scaler.*|rng_state.*|random_states.*|training_args\.bin|sampler.*"
    r"|dataloader.*|dl_state.*|custom_checkpoint.*"
)
"""Pattern of the names of files that are often next to a model, but do not contain the model."""
_RANK_FILE = re.compile(
    r".*(?:mp_rank_\d+|zero_pp_rank_\d+|_optim_states|rank-?\d+-of-\d+|_rank\d+|layer_\d+-model_\d+|expert_\d+).*"
)
"""Pattern of the names of per-rank files, written by any library. They never contain a full state
dict.
"""
_NUMPY_ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
"""Global names of the functions that a pickled NumPy array refers to."""
_RANDOM_STATE = re.compile(r"(?i)(?:^|_)(?:rng|random|seed|numpy|np)(?:_|$)")
"""Pattern of the keys under which programs save the state of NumPy's random generator."""
_LOCAL_STATE_FILE = re.compile(r"pytorch_model_fsdp_rank\d+\.bin")
"""Pattern of the per-rank file names that Accelerate uses with FSDP1's LOCAL_STATE_DICT."""
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


def _find_model_file(source: CheckpointPath) -> str | None:
    """Find the file that contains the model, or the index that lists the model's files.

    If the path is a file, only this file is considered. In a folder, well-known names such as
    `pytorch_model.bin` are preferred. If the folder has none of them, it must contain exactly one
    other candidate.

    Returns:
        Name of the file. None if no file or several files could be the model. Without a well-known
        name, also None if any file has the name of a rank's file, such as `model_rank0.pt`. Also None
        if the folder contains safetensors files but not `pytorch_model_fsdp.bin`. Safetensors files
        are preferred to all other files.
    """
    path = source.path
    if path.is_file():
        is_rank_file = _RANK_FILE.fullmatch(path.name)
        return path.name if path.name.endswith((*_SUFFIXES, _INDEX_SUFFIX)) and not is_rank_file else None
    entries = list_file_names(path)
    if _FSDP_FILE in entries:
        return _FSDP_FILE
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in entries):
        return None
    for name in _HF_FILES:
        if name in entries:
            return name
    candidates = [name for name in entries if name.endswith(_SUFFIXES) and not name.startswith(".")]
    if any(_RANK_FILE.fullmatch(name) for name in candidates):
        return None
    indices = [name for name in entries if name.endswith(_INDEX_SUFFIX)]
    candidates = indices or [name for name in candidates if not _OTHER_FILES.fullmatch(name)]
    return candidates[0] if len(candidates) == 1 else None


def _explain_incomplete(source: CheckpointPath) -> str | None:
    """Explain why a path cannot be opened as a full state dict.

    The path may contain only the shards of single ranks, or several files that could be the model.

    Returns:
        The reason as one line. None if neither is the case.
    """
    path = source.path
    names = [path.name] if path.is_file() else list_entry_names(path)
    if any(_LOCAL_STATE_FILE.fullmatch(name) for name in names):
        return (
            f"{path}: contains one rank's part of a LOCAL_STATE_DICT of FSDP1, which does not record the "
            "shapes of the tensors; load the checkpoint with the program that saved it, and save it with "
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    if path.is_file():
        if _RANK_FILE.fullmatch(path.name) and path.name.endswith(_SUFFIXES):
            return (
                f"{path}: according to its name, the file is only one rank's part of a checkpoint; specify "
                "the folder with all parts"
            )
        return None
    candidates = [name for name in names if name.endswith(_SUFFIXES)]
    parts = [name for name in candidates if _RANK_FILE.fullmatch(name)]
    if parts:
        return (
            f"{path}: contains files of single ranks, such as {parts[0]}, but other files are missing or "
            "their format is unknown; save a full state dict, or save the checkpoint with "
            "torch.distributed.checkpoint"
        )
    candidates = [name for name in candidates if not _OTHER_FILES.fullmatch(name)]
    if len(candidates) > 1:
        return (
            f"{path}: several files could be the model ({', '.join(candidates[:4])}); specify one of "
            "these files"
        )
    return None


def _open_torch_checkpoint(source: CheckpointPath, name: str) -> Checkpoint:
    """Open the file or index `name` as a checkpoint.

    The optimizer may be in the same file. Otherwise, if the path is a folder, the optimizer is read
    from `optimizer.pt` or `optimizer.bin`.

    Raises:
        CheckpointError: If a file is damaged or does not contain a full state dict, or if the folder
            contains several models.
    """
    root = source.path if source.path.is_dir() else source.path.parent
    folder = CheckpointFolder(root)
    if source.path.is_dir():
        check_single_model(root, name)
    location = str(root / name)
    optimizers: list[Any] = []
    counters: dict[str, Any] = {}
    if name.endswith(_INDEX_SUFFIX):
        stored = read_indexed_shards(
            folder, name, lambda file: _require_shard_tensors(file, load_torch_file(file))
        )
    else:
        stored, optimizers, counters = split_state_dict(load_torch_file(folder.get_file(name)), location)
    views = strip_common_prefixes(stored, location=location)
    tensors: dict[str, Tensor] = {}
    for plain, view in views.items():
        with prefix_checkpoint_errors(root / name):
            tensors[plain] = to_lazy_tensor(view, plain)
    companions = find_companions(source.path)

    def open_optimizer(aliases: Aliases) -> OptimizerState | None:
        if len(optimizers) > 1:
            raise OptimizerStateError(
                f"{location}: contains {len(optimizers)} optimizers, but only one can be converted"
            )
        if optimizers:
            return build_named_optimizer(
                optimizers[0], tensors, deduplicate_tied_names(tensors, aliases), location=location
            )
        if source.path.is_file():
            return None
        return open_optimizer_file(folder, tensors, lambda: deduplicate_tied_names(tensors, aliases))

    return Checkpoint(
        format="torch",
        root=source.path,
        tensors=tensors,
        aliases=find_tied_aliases(views, tensors),
        optimizer=open_optimizer,
        metadata={**counters, **read_trainer_metadata(root)},
        companions=companions,
        counters=lambda: {"step": counters["step"]} if "step" in counters else {},
    )


def load_torch_file(file: CheckpointFile) -> Any:
    """Load a file like `torch.load`, but without running code. Tensors become `StoredTensor`s.

    Raises:
        CheckpointError: If the file is damaged or has the format of torch before 1.6, or if its pickle
            refers to an unsupported type.
    """
    return TorchZip(file).load_object()


def deduplicate_tied_names(names: Iterable[str], aliases: Aliases) -> list[str]:
    """Replace each alias of a tied tensor with the tensor's main name, and drop duplicates.

    The result contains each tensor once, as in `named_parameters`. The order of the names is kept.
    """
    return list(dict.fromkeys(aliases.get(name, name) for name in names))


def open_optimizer_file(
    folder: CheckpointFolder, tensors: Mapping[str, Tensor], order: Callable[[], list[str] | None]
) -> OptimizerState | None:
    """Open the optimizer in `optimizer.pt` or `optimizer.bin`, next to the model.

    Args:
        folder: Folder of the model.
        tensors: Tensors of the model.
        order: Function that returns the names in module order, or None if the order is not known.

    Returns:
        The optimizer state, or None if there is no such file.

    Raises:
        CheckpointError: If there are several optimizers, if the file is damaged, or if the state cannot
            be assigned to the model's parameters unambiguously.
    """
    entries = list_entry_names(folder.path)
    optimizer_files = [name for name in OPTIMIZERS if name in entries]
    if not optimizer_files:
        return None
    if len(optimizer_files) > 1 or "optimizer_1.bin" in entries:
        raise OptimizerStateError(
            f"{folder.path}: contains several optimizers, but only one can be converted"
        )
    file = folder.get_file(optimizer_files[0])
    return build_named_optimizer(load_torch_file(file), tensors, order(), location=str(file.path))


def _require_shard_tensors(file: CheckpointFile, saved: Any) -> dict[str, StoredTensor]:
    """Check that a shard contains only tensors, and return them.

    Raises:
        CheckpointError: If the shard contains other values.
    """
    if not isinstance(saved, dict) or not all(
        isinstance(key, str) and isinstance(value, StoredTensor) for key, value in saved.items()
    ):
        raise CheckpointError(
            f"{file.path}: is not a dict of tensors, so it is not a shard of a state dict; save the "
            "state_dict() of the model"
        )
    return saved


class StateDictParts(NamedTuple):
    """Content of a pickled state dict, split by purpose.

    Attributes:
        model_tensors: Tensors of the model, keyed by name.
        optimizers: State dicts of optimizers.
        counters: Dict with the entry `step`. Empty if the file does not record the step.
    """

    model_tensors: dict[str, Any]
    optimizers: list[Any]
    counters: dict[str, Any]


def split_state_dict(saved: Any, location: str) -> StateDictParts:
    """Split the content of a file into the model's tensors, the optimizers, and the training step.

    The model's tensors are at the top level or in a nested dict such as `model`, which
    `find_model_container` selects. Their names do not include the path of this dict, and tensors in
    other dicts are dropped. If it cannot select a dict, all tensors are returned, and their names
    include the paths of their dicts. Other values, such as strings, are ignored.

    Args:
        saved: Unpickled content of the file.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If the content is not a full state dict, if two tensors get the same name, or
            if a NumPy array may be a parameter. The message names the format if it
            is known.
    """
    if not isinstance(saved, dict):
        description = (
            "a single tensor"
            if isinstance(saved, StoredTensor)
            else f"an object of type {type(saved).__name__}"
        )
        raise CheckpointError(
            f"{location}: is not a state dict but {description}; save the state_dict() of the model"
        )
    if "shard_metadata" in saved:
        raise CheckpointError(
            f"{location}: is one rank's shard of a PyTorch/XLA FSDP checkpoint; specify the folder that "
            "contains all shards"
        )
    if "ds_version" in saved or "ds_config" in saved:
        raise CheckpointError(
            f"{location}: is one file of a DeepSpeed checkpoint; specify the folder of the checkpoint"
        )
    if is_optimizer_state_dict(saved):
        raise CheckpointError(
            f"{location}: contains the state of an optimizer, but no model; specify the folder of the "
            "checkpoint"
        )
    leaves: dict[KeyPath, TensorLeaf] = {}
    optimizers: list[Any] = []
    counters: dict[str, Any] = {}
    arrays: list[KeyPath] = []
    remaining_values = MAX_VALUES
    # Use a stack instead of recursion, because a file may nest deeper than the recursion limit.
    pending: list[tuple[KeyPath, Any]] = [((), saved)]
    while pending:
        path, value = pending.pop()
        remaining_values -= 1
        if remaining_values < 0 or len(path) > MAX_CONTAINER_DEPTH:
            raise CheckpointError(
                f"{location}: has more than {MAX_VALUES:,} values or more than {MAX_CONTAINER_DEPTH} levels "
                "of nesting, so it is not a state dict; save the state_dict() of the model"
            )
        if isinstance(value, TensorLeaf):
            leaves[path] = value
        elif is_optimizer_state_dict(value):
            optimizers.append(value)
        elif isinstance(value, dict):
            items = [(key, item) for key, item in value.items() if isinstance(key, (str, int))]
            if any(type(key) is int and abs(key) > MAX_KEY_IN_PATH for key, _ in items):
                raise CheckpointError(
                    f"{location}: a dict has an integer key that is not from -{MAX_KEY_IN_PATH:,} to "
                    f"{MAX_KEY_IN_PATH:,}, so it is not a state dict; save the state_dict() of the model"
                )
            pending.extend(((*path, key), item) for key, item in reversed(items))
        elif isinstance(value, (list, tuple)):
            pending.extend(((*path, key), item) for key, item in reversed(list(enumerate(value))))
        elif isinstance(value, PickledInstance) and value.key in _NUMPY_ARRAYS:
            arrays.append(path)
        elif isinstance(value, int) and len(path) == 1 and path[0] in ("step", "global_step"):
            counters["step"] = value
    container = find_model_container(list(leaves))
    for path in arrays:
        # Inside a dict such as `model`, every array except an extra state may be a parameter.
        is_other_state = str(path[-1]).endswith("_extra_state") or (
            not container and any(_RANDOM_STATE.search(str(part)) for part in path)
        )
        if (container is None or path[:-1] == container) and not is_other_state:
            raise CheckpointError(
                f"{location}: {format_untrusted_value('.'.join(map(str, path)))} is a numpy array; "
                "save the array as a tensor"
            )
    model: dict[str, TensorLeaf] = {}
    for path, stored in leaves.items():
        if container is None or path[:-1] == container:
            name = ".".join(map(str, path if container is None else path[-1:]))
            if name in model:
                raise DamagedCheckpointError(f"{location}: two tensors have the name {name!r}")
            model[name] = stored
    if not model:
        raise CheckpointError(f"{location}: contains no tensors; specify a file that contains a model")
    return StateDictParts(model, optimizers, counters)


def find_tied_aliases(views: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Find tied tensors: names whose tensors have the same dtype and are the same view of one storage.

    One of these names becomes the owner of the tensor. The other names become aliases of the owner.
    Empty tensors are never tied.

    Args:
        views: Location of each tensor in its storage, keyed by name.
        tensors: Tensors of the model, keyed by the same names.

    Returns:
        Name of the owner of each alias, keyed by alias.
    """
    groups: dict[str, list[str]] = {}
    for name, view in views.items():
        if tensors[name].numel and prod(view.shape):
            # Strides of dimensions of size 1 do not matter. The key is a string because of
            # `pickle_reader.MAX_KEY`.
            strides = [step if size > 1 else 0 for size, step in zip(view.shape, view.strides, strict=True)]
            view_key = (str(view.storage.zip.file.path), view.storage.key, view.offset, view.shape, strides)
            groups.setdefault(repr((*view_key, view.dtype)), []).append(name)
    aliases: dict[str, str] = {}
    for names in groups.values():
        owner = select_tie_owner({name: tensors[name] for name in names}) if len(names) > 1 else names[0]
        aliases.update({name: owner for name in names if name != owner})
    return aliases


FORMAT = Format(
    "torch",
    _find_model_file,
    _open_torch_checkpoint,
    _explain_incomplete,
)
