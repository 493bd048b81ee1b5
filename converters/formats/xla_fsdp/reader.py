"""PyTorch/XLA FSDP v1 (`XlaFullyShardedDataParallel`): one file per rank, each with its own metadata.

A rank's file holds `model` (its shards, and every buffer whole), `shard_metadata` and often `optimizer`. The
files may be called anything; transformers' Trainer writes `rank<r>-of-<W>-pytorch_model.bin`, with the
optimizer in `rank<r>-of-<W>-optimizer.pt`. Every rank describes every shard; all descriptions must agree.

Source: torch_xla/distributed/fsdp/xla_fully_sharded_data_parallel.py (`get_shard_metadata`,
`_flatten_and_pad_to_world_size`), state_dict_utils.py; transformers/integrations/tpu.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.shard_index import check_ranks
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import CheckpointError, prefix_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.torch_save.optimizer import as_tensor
from portable.converters.formats.xla_fsdp.optimizer import read_optimizer
from portable.converters.formats.xla_fsdp.shards import XlaFsdpLayout, join, read_layouts
from portable.converters.names.canonical import strip_prefixes
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import map_ahead, names_in
from portable.converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from portable.converters.checkpoint import Aliases, OptimizerState
    from portable.converters.storage.path_or_url import Place
    from portable.converters.tensors.tensor import Tensor

_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
_RANKED = re.compile(r"(?P<head>.*?)rank[-_]?(?P<rank>\d+)[-_]of[-_](?P<world>\d+)(?P<tail>.*)")
_TRAINER_MODEL, _TRAINER_OPTIMIZER = "-pytorch_model.bin", "-optimizer.pt"
_METADATA = "shard_metadata"
# Identifies a rank file of any name by its pickle.
_MARK = _METADATA.encode()


@dataclass(frozen=True)
class RankFile:
    """One parsed file: its content without `shard_metadata`, and its rank."""

    where: str
    content: dict[Any, Any]
    metadata: dict[Any, Any]
    rank: int
    world: int


def _match_rank_file(name: str) -> re.Match[str] | None:
    """The parts of a file name that holds the rank and the world size."""
    return _RANKED.fullmatch(name) if name.endswith(_SUFFIXES) else None


def _is_rank_file(folder: Folder, name: str) -> bool:
    """Whether a file of any name is a rank file."""
    try:
        return name.endswith(_SUFFIXES) and _MARK in TorchZip(folder.file(name)).read("data.pkl")
    except RemoteError:  # not a property of the file
        raise
    except CheckpointError:
        return False


def _list_entries(path: Place) -> list[str]:
    return [name for name in names_in(path) if name.endswith(_SUFFIXES)]


def _find(source: CheckpointPath) -> Folder | None:
    path = source.path
    folder = Folder(path.parent if path.is_file() else path)
    names = [path.name] if path.is_file() else _list_entries(path)
    # A usual name is enough, so that a damaged file is refused and not skipped.
    is_found = any(_match_rank_file(name) for name in names) or any(
        _is_rank_file(folder, name) for name in names
    )
    return folder if is_found else None


def _set(match: re.Match[str]) -> tuple[str, int, str]:
    """The part that the file names of one checkpoint have in common."""
    tail = match["tail"]
    return (
        match["head"],
        int(match["world"][:9]),
        "" if tail in (_TRAINER_MODEL, _TRAINER_OPTIMIZER) else tail,
    )


def _list_files(source: CheckpointPath, folder: Folder) -> list[str]:
    """The files of one checkpoint."""
    entries = _list_entries(folder.path)
    sets: dict[tuple[str, int, str], list[str]] = {}
    for name in entries:
        if match := _match_rank_file(name):
            sets.setdefault(_set(match), []).append(name)
    if source.path.is_file():
        match = _match_rank_file(source.path.name)
        if match:
            return sets[_set(match)]
    else:
        if len(sets) > 1:  # other files may have such names
            sets = {
                kind: names
                for kind, names in sets.items()
                if any(_is_rank_file(folder, name) for name in names)
            }
        if len(sets) == 1:
            return next(iter(sets.values()))
    if len(sets) > 1:
        first, other, *_ = [names[0] for names in sets.values()]
        raise CheckpointError(
            f"{folder.path}: holds rank files of several checkpoints ({first}, {other}); give one of the "
            "files"
        )
    others = [name for name in entries if not _match_rank_file(name)]
    marked = map_ahead(folder.path, partial(_is_rank_file, folder), others)
    return [name for name, is_marked in zip(others, marked, strict=True) if is_marked]


def _load(folder: Folder, name: str) -> RankFile:
    archive = TorchZip(folder.file(name))
    content = archive.load()
    metadata = content.pop(_METADATA, None) if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{archive.where}: not a rank file of XLA FSDP (no {_METADATA})")
    rank, world = metadata.get("rank"), metadata.get("world_size")
    if type(rank) is not int or type(world) is not int or not 0 <= rank < world:
        raise CheckpointError(f"{archive.where}: damaged, {_METADATA} has no rank and world size")
    match = _match_rank_file(name)
    if match and (int(match["rank"][:9]), int(match["world"][:9])) != (rank, world):
        raise CheckpointError(f"{archive.where}: is rank {rank} of {world}, unlike its name")
    return RankFile(archive.where, content, metadata, rank, world)


def _sort_by_rank(files: list[RankFile], kind: str, root: Place) -> list[RankFile]:
    """The files that hold `kind`, in rank order; every rank must be there once."""
    files_by_rank: dict[int, RankFile] = {}
    for file in files:
        if kind in file.content:
            if file.world != files[0].world:
                raise CheckpointError(
                    f"{file.where}: has a world size of {file.world}, {files[0].where} of {files[0].world}"
                )
            other = files_by_rank.setdefault(file.rank, file)
            if other is not file:
                raise CheckpointError(
                    f"{file.where}: is rank {file.rank} of {file.world}, as is {other.where}"
                )
    if files_by_rank:
        check_ranks(root, {rank: file.where for rank, file in files_by_rank.items()}, files[0].world, kind)
    return [files_by_rank[rank] for rank in sorted(files_by_rank)]


def _open(source: CheckpointPath, folder: Folder) -> Checkpoint:
    root = folder.path
    files = list(map_ahead(folder.path, partial(_load, folder), _list_files(source, folder)))
    models = _sort_by_rank(files, "model", root)
    optimizers = _sort_by_rank(files, "optimizer", root)
    spare = [file.where for file in files if not file.content.keys() & {"model", "optimizer"}]
    if not models or spare:
        raise CheckpointError(f"{spare[0] if spare else root}: holds no model beside its {_METADATA}")
    layouts = read_layouts([(file.where, file.metadata) for file in models], _get_model(models[0]))
    if optimizers and optimizers[0] is not models[0]:
        read_layouts(
            [(file.where, file.metadata) for file in (models[0], *optimizers)], _get_model(models[0])
        )
    stored: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    first = list(_get_model(models[0]))
    for file in models[1:]:
        if list(_get_model(file)) != first:
            raise CheckpointError(f"{file.where}: holds other parameters than {models[0].where}")
    for key, value in _get_model(models[0]).items():
        shards = [(file.where, _get_model(file)[key]) for file in models]
        for name, tensor in _build_tensors(key, value, layouts.get(key), shards).items():
            if stored.setdefault(name, tensor) is not tensor:
                raise CheckpointError(f"{models[0].where}: two parameters are called {name!r}")
        if key in layouts:
            shapes[key] = value.shape
    tensors = strip_prefixes(stored, location=str(root))
    plain = {
        raw: short for short, raw in strip_prefixes({raw: raw for raw in stored}, location=str(root)).items()
    }

    def open_optimizer(_: Aliases) -> OptimizerState | None:
        if not optimizers:
            return None
        saved = [(file.where, file.content["optimizer"]) for file in optimizers]
        trainer = bool(models[0].where.endswith(_TRAINER_MODEL))
        return read_optimizer(saved, layouts, shapes, plain, trainer=trainer)

    return Checkpoint(
        format="xla-fsdp",
        root=source.path,
        tensors=tensors,
        optimizer=open_optimizer,
        metadata={"world_size": models[0].world, **read_trainer_metadata(root)},
        companions=find_companions(source.path),
    )


def _get_model(file: RankFile) -> dict[Any, Any]:
    model = file.content["model"]
    if not isinstance(model, dict):
        raise CheckpointError(f"{file.where}: damaged, its model is not a table of tensors")
    return model


def _build_tensors(
    key: Any, value: Any, layout: XlaFsdpLayout | None, shards: list[tuple[str, Any]]
) -> dict[str, Tensor]:
    """The tensors under one key of `model`: joined from shards, or a buffer replicated on every rank."""
    if layout is not None:
        return join(layout, shards, str(key))
    if not isinstance(value, StoredTensor):
        return {}
    for location, other in shards:
        if not isinstance(other, StoredTensor) or (other.dtype, other.shape) != (value.dtype, value.shape):
            raise CheckpointError(f"{location}: {str(key)!r} differs from rank 0")
    with prefix_errors(shards[0][0]):
        return {str(key): as_tensor(value, str(key))}


FORMAT = Format(
    "xla-fsdp",
    _find,
    _open,
)
