"""Read checkpoints of PyTorch/XLA FSDP v1 (`XlaFullyShardedDataParallel`), with one file per rank.

The file of a rank contains `model` (its shards, and every complete buffer), `shard_metadata` and
often `optimizer`. The files may have any names that end with `.pth`, `.pt`, `.bin` or `.ckpt`.
transformers' Trainer writes `rank<r>-of-<W>-pytorch_model.bin`, and the optimizer in
`rank<r>-of-<W>-optimizer.pt`. Every rank describes every shard, and all descriptions must agree.

Source: `get_shard_metadata` and `_flatten_and_pad_to_world_size` in
torch_xla/distributed/fsdp/xla_fully_sharded_data_parallel.py, state_dict_utils.py;
transformers/integrations/tpu.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.shard_index import check_rank_files_complete
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    UnsupportedCheckpointError,
    prefix_checkpoint_errors,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.formats.xla_fsdp.optimizer import build_xla_optimizer
from portable.converters.formats.xla_fsdp.shards import XlaFsdpLayout, join_shards, parse_layouts
from portable.converters.names.canonical import strip_common_prefixes
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names, map_with_prefetch
from portable.converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from portable.converters.checkpoint import Aliases, OptimizerState
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor

_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
_RANK_FILE = re.compile(r"(?P<head>.*?)rank[-_]?(?P<rank>\d+)[-_]of[-_](?P<world>\d+)(?P<tail>.*)")
_TRAINER_MODEL, _TRAINER_OPTIMIZER = "-pytorch_model.bin", "-optimizer.pt"
_METADATA = "shard_metadata"
# Text in the pickle that identifies a rank file with any name.
_MARK = _METADATA.encode()


@dataclass(frozen=True)
class XlaRankFile:
    """Content of a rank file.

    Attributes:
        location: Path of the file, used in error messages.
        content: Content without `shard_metadata`.
        metadata: The `shard_metadata`.
        rank: Rank of the file.
        world_size: Number of ranks.
    """

    location: str
    content: dict[Any, Any]
    metadata: dict[Any, Any]
    rank: int
    world_size: int


def _match_rank_file_name(name: str) -> re.Match[str] | None:
    """Match a file name that contains the rank and the world size. None if it has a different form."""
    return _RANK_FILE.fullmatch(name) if name.endswith(_SUFFIXES) else None


def _has_shard_metadata(folder: CheckpointFolder, name: str) -> bool:
    """Return whether a file is a rank file, which contains `shard_metadata` in its pickle.

    XLA FSDP writes one such file per rank. The result is False if the file is damaged.

    Raises:
        RemoteError: If the object store failed.
    """
    try:
        return name.endswith(_SUFFIXES) and _MARK in TorchZip(folder.get_file(name)).read_member("data.pkl")
    except RemoteError:  # the storage failed, so the error does not describe the file
        raise
    except CheckpointError:
        return False


def _list_candidate_files(path: AnyPath) -> list[str]:
    """List the files in a folder that have a typical suffix of torch.save files."""
    return [name for name in list_entry_names(path) if name.endswith(_SUFFIXES)]


def _get_folder_of_rank_files(source: CheckpointPath) -> CheckpointFolder | None:
    """Find the folder of rank files. The path may be the folder or one of the files.

    Returns:
        The folder. None if there are no rank files.
    """
    path = source.path
    folder = CheckpointFolder(path.parent if path.is_file() else path)
    names = [path.name] if path.is_file() else _list_candidate_files(path)
    # A usual name suffices, because a damaged file must be refused instead of skipped.
    is_found = any(_match_rank_file_name(name) for name in names) or any(
        _has_shard_metadata(folder, name) for name in names
    )
    return folder if is_found else None


def _get_file_set_key(match: re.Match[str]) -> tuple[str, int, str]:
    """Return the parts of a rank file's name that all files of a checkpoint share.

    Returns:
        The text before the rank, the world size, and the text after the world size. For the
        model and optimizer files of transformers' Trainer, the last part is empty. Their
        endings differ, but both must get the same key.
    """
    tail = match["tail"]
    return (
        match["head"],
        int(match["world"][:9]),
        "" if tail in (_TRAINER_MODEL, _TRAINER_OPTIMIZER) else tail,
    )


def _list_rank_files(source: CheckpointPath, folder: CheckpointFolder) -> list[str]:
    """List the files of one checkpoint.

    Args:
        source: Path that was opened: a folder, or one rank file of the checkpoint.
        folder: Folder that contains the files.

    Returns:
        Names of the files that differ only in the rank, for example `rank0-of-2.pth`. If no names
        contain the rank and the world size, or `source` is a file with another name, the names of all
        other files that contain `shard_metadata`.

    Raises:
        CheckpointError: If the folder contains the rank files of several checkpoints, and `source` is
            not a file whose name contains the rank and the world size.
    """
    entries = _list_candidate_files(folder.path)
    names_by_set: dict[tuple[str, int, str], list[str]] = {}
    for name in entries:
        if match := _match_rank_file_name(name):
            names_by_set.setdefault(_get_file_set_key(match), []).append(name)
    if source.path.is_file():
        match = _match_rank_file_name(source.path.name)
        if match:
            return names_by_set[_get_file_set_key(match)]
    else:
        if len(names_by_set) > 1:  # other files may have names of this form
            names_by_set = {
                kind: names
                for kind, names in names_by_set.items()
                if any(_has_shard_metadata(folder, name) for name in names)
            }
        if len(names_by_set) == 1:
            return next(iter(names_by_set.values()))
    if len(names_by_set) > 1:
        first, other, *_ = [names[0] for names in names_by_set.values()]
        raise CheckpointError(
            f"{folder.path}: contains rank files of several checkpoints, such as {first} and {other}; "
            "specify one file of the checkpoint to open"
        )
    unranked_names = [name for name in entries if not _match_rank_file_name(name)]
    has_metadata = map_with_prefetch(folder.path, partial(_has_shard_metadata, folder), unranked_names)
    return [name for name, is_rank_file in zip(unranked_names, has_metadata, strict=True) if is_rank_file]


def _load_rank_file(folder: CheckpointFolder, name: str) -> XlaRankFile:
    """Load one rank file.

    Raises:
        CheckpointError: If the file is damaged or is not a rank file, or if its rank or world size does
            not match its name.
    """
    archive = TorchZip(folder.get_file(name))
    content = archive.load_object()
    metadata = content.pop(_METADATA, None) if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        raise CheckpointError(
            f"{archive.location}: has no {_METADATA}, which describes the shards; save the result of the "
            f"model's get_shard_metadata() in the file, under the key {_METADATA}"
        )
    rank, world = metadata.get("rank"), metadata.get("world_size")
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world:
        raise DamagedCheckpointError(
            f"{archive.location}: damaged: {_METADATA} has no valid rank and world_size"
        )
    match = _match_rank_file_name(name)
    if match and (int(match["rank"][:9]), int(match["world"][:9])) != (rank, world):
        raise DamagedCheckpointError(
            f"{archive.location}: contains rank {rank} of {world}, but the name of the file has another "
            "rank or world size"
        )
    return XlaRankFile(archive.location, content, metadata, rank, world)


def _sort_by_rank(files: list[XlaRankFile], kind: str, root: AnyPath) -> list[XlaRankFile]:
    """Select the files that contain a model or an optimizer, and sort them by rank.

    Args:
        files: All rank files of the checkpoint.
        kind: `model` or `optimizer`.
        root: Folder of the checkpoint, used in error messages.

    Returns:
        One file per rank, or an empty list if no file contains `kind`.

    Raises:
        CheckpointError: If a rank has no file or several files, or if world sizes differ.
    """
    files_by_rank: dict[int, XlaRankFile] = {}
    for file in files:
        if kind in file.content:
            if file.world_size != files[0].world_size:
                raise MixedCheckpointError(
                    f"{file.location}: records a world size of {file.world_size}, but {files[0].location} "
                    f"records {files[0].world_size}"
                )
            other = files_by_rank.setdefault(file.rank, file)
            if other is not file:
                raise DamagedCheckpointError(
                    f"{file.location}: contains the same rank as {other.location}: rank {file.rank} of "
                    f"{file.world_size}"
                )
    if files_by_rank:
        check_rank_files_complete(
            root, {rank: file.location for rank, file in files_by_rank.items()}, files[0].world_size, kind
        )
    return [files_by_rank[rank] for rank in sorted(files_by_rank)]


def _open_xla_fsdp_checkpoint(source: CheckpointPath, folder: CheckpointFolder) -> Checkpoint:
    """Open the rank files in a folder as a checkpoint.

    Raises:
        CheckpointError: If files are missing or damaged, if they do not contain a model, or if the
            files of the ranks contain different parameters or layouts.
    """
    root = folder.path
    files = list(
        map_with_prefetch(folder.path, partial(_load_rank_file, folder), _list_rank_files(source, folder))
    )
    models = _sort_by_rank(files, "model", root)
    optimizers = _sort_by_rank(files, "optimizer", root)
    unused_files = [file.location for file in files if not file.content.keys() & {"model", "optimizer"}]
    if not models or unused_files:
        raise CheckpointError(
            f"{unused_files[0] if unused_files else root}: contains {_METADATA}, but no model; specify a "
            "checkpoint that contains a model"
        )
    layouts = parse_layouts(
        [(file.location, file.metadata) for file in models], _require_model_table(models[0])
    )
    if optimizers and optimizers[0] is not models[0]:
        parse_layouts(
            [(file.location, file.metadata) for file in (models[0], *optimizers)],
            _require_model_table(models[0]),
        )
    stored: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    first = list(_require_model_table(models[0]))
    for file in models[1:]:
        if list(_require_model_table(file)) != first:
            raise DamagedCheckpointError(
                f"{file.location}: contains different parameters from {models[0].location}"
            )
    for key, value in _require_model_table(models[0]).items():
        shards = [(file.location, _require_model_table(file)[key]) for file in models]
        for name, tensor in _build_key_tensors(key, value, layouts.get(key), shards).items():
            if stored.setdefault(name, tensor) is not tensor:
                raise UnsupportedCheckpointError(
                    f"{models[0].location}: two parameters have the name {name!r}"
                )
        if key in layouts:
            shapes[key] = value.shape
    tensors = strip_common_prefixes(stored, location=str(root))
    plain_names = {
        raw: short
        for short, raw in strip_common_prefixes({raw: raw for raw in stored}, location=str(root)).items()
    }

    def open_optimizer(_: Aliases) -> OptimizerState | None:
        if not optimizers:
            return None
        saved = [(file.location, file.content["optimizer"]) for file in optimizers]
        trainer = bool(models[0].location.endswith(_TRAINER_MODEL))
        return build_xla_optimizer(saved, layouts, shapes, plain_names, root=root, from_trainer=trainer)

    return Checkpoint(
        format="xla-fsdp",
        root=source.path,
        tensors=tensors,
        optimizer=open_optimizer,
        metadata={"world_size": models[0].world_size, **read_trainer_metadata(root)},
        companions=find_companions(source.path),
    )


def _require_model_table(file: XlaRankFile) -> dict[Any, Any]:
    """Return the `model` dict in a rank file.

    Raises:
        CheckpointError: If `model` is not a dict.
    """
    model = file.content["model"]
    if not isinstance(model, dict):
        raise DamagedCheckpointError(f"{file.location}: damaged: the model is not a dict of tensors")
    return model


def _build_key_tensors(
    key: Any, value: Any, layout: XlaFsdpLayout | None, shards: list[tuple[str, Any]]
) -> dict[str, Tensor]:
    """Build the tensors of one entry in the `model` dict of the rank files.

    If the entry is sharded, the shards of all ranks are joined. Otherwise, the entry is a buffer,
    and all ranks have a copy of it. The copy of the first rank is used, as in torch_xla. The values of
    the copies are not compared, because each rank updates its buffers on its own. For example, the
    statistics of a BatchNorm differ between the ranks.

    Args:
        key: Key of the entry.
        value: Value on the first rank.
        layout: Layout of the parameters in the entry, or None if the entry is not sharded.
        shards: File and value of every rank, in order.

    Returns:
        Tensors, keyed by name. Empty if the value is not a tensor.

    Raises:
        CheckpointError: If the dtype or shape differs between the ranks, or if the shards do not fit
            the layout.
    """
    if layout is not None:
        return join_shards(layout, shards, str(key))
    if not isinstance(value, StoredTensor):
        return {}
    for location, other in shards:
        if not isinstance(other, StoredTensor) or (other.dtype, other.shape) != (value.dtype, value.shape):
            raise MixedCheckpointError(
                f"{location}: {str(key)!r} has a different dtype or shape than on rank 0"
            )
    with prefix_checkpoint_errors(shards[0][0]):
        return {str(key): to_lazy_tensor(value, str(key))}


FORMAT = Format(
    "xla-fsdp",
    _get_folder_of_rank_files,
    _open_xla_fsdp_checkpoint,
)
