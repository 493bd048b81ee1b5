"""torch.distributed.checkpoint (DCP): `.metadata` and `__<rank>_<n>.distcp` files.

`.metadata` is a pickled `Metadata`: shapes and chunks by key (`state_dict_metadata`), where each chunk lies
(`storage_data`), and the nesting the keys were flattened from (`planner_data`). Each chunk is a complete
torch.save zip within a `.distcp` file. `.metadata` carries no checksum, so everything in it is held against the
other tables and, when a chunk is first read, against the chunk's own pickle.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py, default_planner.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from converters.checkpoint import Checkpoint, Scalar
from converters.companions import find_companions
from converters.dtypes import FROM_TORCH, itemsize
from converters.errors import CheckpointError
from converters.formats import Format, Source
from converters.formats.dcp_roles import build_optimizer
from converters.naming import Path as KeyPath
from converters.naming import assign_roles, paths_without_nesting, plain_names
from converters.pickles import Global, Instance, unpickle
from converters.storage import Folder
from converters.tensor import Box, Tensor, View
from converters.torchzip import TORCH_STANDINS, StoredTensor, TorchZip

_CLASSES = "torch.distributed.checkpoint."
_METADATA = re.compile(r"(?:__\d+)?\.metadata")
# accelerate and the Trainer: one folder for the model, one for the optimizer.
_MODEL_FOLDER, _OPTIMIZER_FOLDER = "pytorch_model_fsdp_{}", "optimizer_{}"


@dataclass(frozen=True)
class _Item:
    """Where one chunk or pickled value lies."""

    file: str
    offset: int
    length: int


def _metadata_files(folder: Path) -> list[str]:
    try:
        names = [entry.name for entry in folder.iterdir() if _METADATA.fullmatch(entry.name)]
    except OSError:
        return []
    return [".metadata"] if ".metadata" in names else sorted(names)


def _folders(path: Path) -> list[Path]:
    """The DCP folders that make up the checkpoint at `path`: itself, or accelerate's pair below it."""
    if _metadata_files(path):
        return [path]
    pair = [path / _MODEL_FOLDER.format(0), path / _OPTIMIZER_FOLDER.format(0)]
    return [folder for folder in pair if _metadata_files(folder)]


def _detect(source: Source) -> bool:
    return bool(_folders(source.path))


def _incomplete(source: Source) -> str | None:
    if source.path.is_file() and (source.path.suffix == ".distcp" or _METADATA.fullmatch(source.path.name)):
        return f"{source.path}: one file of a DCP checkpoint; give its folder"
    for folder in (source.path, source.path / _MODEL_FOLDER.format(0)):
        if folder.is_dir() and any(entry.suffix == ".distcp" for entry in folder.iterdir()):
            return (
                f"{folder}: holds .distcp files but no .metadata; the save did not finish, take another step"
            )
    return None


def _open(source: Source) -> Checkpoint:
    folders = _folders(source.path)
    if (source.path / _MODEL_FOLDER.format(1)).is_dir():
        raise CheckpointError(
            f"{source.path}: holds several models; give one of its {_MODEL_FOLDER[:-3]}* folders"
        )
    keys: dict[str, _Entry] = {}
    ranks = 0
    for folder in folders:
        for entry in _read_folder(Folder(folder, verify=source.verify)):
            if keys.setdefault(entry.key, entry) is not entry:
                raise CheckpointError(f"{folder}: the key {entry.key!r} is stored twice")
        ranks = max(ranks, len({name.split("_")[2] for name in _shards(folder)}))
    where = str(source.path)
    if any(entry.path for entry in keys.values()):
        paths: dict[str, KeyPath] = {entry.key: entry.path or (entry.key,) for entry in keys.values()}
    else:
        paths = paths_without_nesting(keys)
    tensor_keys = frozenset(key for key, entry in keys.items() if entry.tensor is not None)
    roles = assign_roles(paths, tensor_keys, where=where)
    tensors = {name: _tensor(keys[key], name) for name, key in roles.model.items()}
    named = plain_names(tensors, where=where)
    optimizer = None
    if roles.has_optimizer:
        optimizer = build_optimizer(
            roles,
            named,
            lambda key, name: _lazy_value(keys[key], name),
            lambda key: _value(keys[key]),
            where=where,
        )
    metadata: dict[str, Any] = {"world_size": ranks} if ranks else {}
    metadata.update(_trainer_state(source.path))
    metadata["other_keys"] = roles.other
    return Checkpoint(
        format="dcp",
        root=source.path,
        tensors=named,
        optimizer=optimizer,
        metadata=metadata,
        companions=find_companions(source.path),
    )


def _shards(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        if re.fullmatch(r"__\d+_\d+\.distcp", entry.name):
            yield entry.name


def _trainer_state(path: Path) -> dict[str, Any]:
    """What this project's trainer says about the step, beside the shards."""
    try:
        state = json.loads((path / "trainer_state.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(state, dict):
        return {}
    step = state.get("step", state.get("global_step"))
    return {"trainer_state": state} | ({"step": step} if isinstance(step, int) else {})


@dataclass(frozen=True)
class _Entry:
    """One key of the state dict: `tensor` is None for a pickled value."""

    folder: Folder
    key: str
    path: KeyPath | None
    tensor: tuple[str, tuple[int, ...], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] | None
    items: dict[tuple[int, ...] | None, _Item]


def _read_folder(folder: Folder) -> list[_Entry]:
    """Every key of one DCP folder, its tables checked against each other and against the files."""
    entries: list[_Entry] = []
    names = _metadata_files(folder.path)
    for name in names:
        file = folder.file(name)
        where = str(file.path)
        root = unpickle(file.read(0, file.nbytes), where=where, standins=TORCH_STANDINS, prefixes=(_CLASSES,))
        fields = _fields(root, "Metadata", where)
        described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        planned = fields.get("planner_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            raise CheckpointError(f"{where}: not DCP metadata")
        items = _items(folder, stored, where)
        if set(items) - set(described):
            raise CheckpointError(
                f"{where}: damaged, {min(map(str, set(items) - set(described)))!r} is not described"
            )
        nested = isinstance(planned, dict) and bool(planned)
        if nested and set(planned) != set(described):
            raise CheckpointError(f"{where}: damaged, its tables name different keys")
        for key, description in described.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: damaged, a key is not a string")
            path = planned[key] if nested else None
            if path is not None and not (
                isinstance(path, tuple)
                and path
                and all(isinstance(part, (str, int)) for part in path)
                and ".".join(map(str, path)) == key
            ):
                raise CheckpointError(f"{where}: damaged, the path of {key!r} does not match it")
            kind = description.key if isinstance(description, Instance) else ""
            if kind.endswith(".TensorStorageMetadata"):
                entry = _Entry(folder, key, path, _described(description, key, where), items.get(key, {}))
            elif kind.endswith(".BytesStorageMetadata"):
                entry = _Entry(folder, key, path, None, items.get(key, {}))
                if list(entry.items) != [None]:
                    raise CheckpointError(f"{where}: the value of {key!r} is stored {len(entry.items)} times")
            else:
                raise CheckpointError(f"{where}: {key!r} is neither a tensor nor bytes")
            entries.append(entry)
    return entries


def _fields(value: Any, name: str, where: str) -> dict[str, Any]:
    if (
        not isinstance(value, Instance)
        or not value.key.endswith("." + name)
        or not isinstance(value.state, dict)
    ):
        raise CheckpointError(f"{where}: not DCP metadata (no {name})")
    return value.state


def _items(
    folder: Folder, stored: dict[Any, Any], where: str
) -> dict[str, dict[tuple[int, ...] | None, _Item]]:
    """Key -> chunk offsets (None for bytes) -> where it lies; no two may share a byte."""
    items: dict[str, dict[tuple[int, ...] | None, _Item]] = {}
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in stored.items():
        at, place = _fields(index, "MetadataIndex", where), _fields(info, "_StorageInfo", where)
        key, chunk = at.get("fqn"), at.get("offset")
        file, offset, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if (
            not isinstance(key, str)
            or not (chunk is None or _is_dims(chunk))
            or not isinstance(file, str)
            or not _is_dims((offset, length))
        ):
            raise CheckpointError(f"{where}: damaged storage entry")
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{where}: {key!r} is compressed by a DCP extension; save it again without one"
            )
        if offset + length > folder.file(file).nbytes:
            raise CheckpointError(
                f"{folder.path / file}: truncated, {key!r} would end at byte {offset + length} of "
                f"{folder.file(file).nbytes}"
            )
        chunks = items.setdefault(key, {})
        if chunk in chunks:
            raise CheckpointError(f"{where}: {key!r} is stored twice at {chunk}")
        chunks[chunk] = _Item(file, offset, length)
        spans.setdefault(file, []).append((offset, offset + length, key))
    for file, taken in spans.items():
        taken.sort()
        for (_, stop, key), (start, _, other) in zip(taken, taken[1:], strict=False):
            if start < stop:
                raise CheckpointError(f"{where}: damaged, {key!r} and {other!r} share bytes of {file}")
    return items


def _is_dims(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is int and item >= 0 for item in value)


def _described(
    description: Instance, key: str, where: str
) -> tuple[str, tuple[int, ...], tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]:
    """(dtype, shape, chunks) of one tensor."""
    fields = _fields(description, "TensorStorageMetadata", where)
    size, chunks = fields.get("size"), fields.get("chunks")
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Instance) else None
    torch_dtype = state[0] if isinstance(state, tuple) and state else None
    name = torch_dtype.key.removeprefix("torch.") if isinstance(torch_dtype, Global) else "?"
    if name not in FROM_TORCH:
        raise CheckpointError(f"{where}: {key!r} has the element type {name}, which is not supported")
    if not _is_dims(size) or not isinstance(chunks, list):
        raise CheckpointError(f"{where}: damaged description of {key!r}")
    extents = []
    for chunk in chunks:
        parts = _fields(chunk, "ChunkStorageMetadata", where)
        if not _is_dims(parts.get("offsets")) or not _is_dims(parts.get("sizes")):
            raise CheckpointError(f"{where}: damaged description of {key!r}")
        extents.append((parts["offsets"], parts["sizes"]))
    assert isinstance(size, tuple)
    return FROM_TORCH[name], size, tuple(extents)


def _tensor(entry: _Entry, name: str) -> Tensor:
    """The tensor of one key; its chunks are located when they are first read."""
    assert entry.tensor is not None
    dtype, shape, chunks = entry.tensor
    boxes = []
    for offsets, sizes in chunks:
        if not prod(sizes):
            continue  # an empty shard holds nothing, stored or not
        item = entry.items.get(offsets)
        if item is None:
            raise CheckpointError(
                f"{entry.folder.path}: the chunk of {entry.key!r} at {list(offsets)} is not stored"
            )
        if item.length < prod(sizes) * itemsize(dtype):
            raise CheckpointError(f"{entry.folder.path / item.file}: the chunk of {entry.key!r} is too short")
        boxes.append(Box(offsets, sizes, _Locator(entry, item, dtype, sizes)))
    return Tensor(name, dtype, shape, boxes)


class _Locator:
    """Finds one chunk in its `.distcp` file and holds it against what `.metadata` says."""

    __slots__ = ("dtype", "entry", "item", "sizes")

    def __init__(self, entry: _Entry, item: _Item, dtype: str, sizes: tuple[int, ...]) -> None:
        self.entry = entry
        self.item = item
        self.dtype = dtype
        self.sizes = sizes

    def __call__(self) -> View:
        archive = _archive(self.entry, self.item)
        stored = archive.load()
        if not isinstance(stored, StoredTensor):
            raise CheckpointError(f"{archive.where}: not a plain tensor")
        if stored.dtype != self.dtype or stored.shape != self.sizes:
            raise CheckpointError(
                f"{archive.where}: is {stored.dtype} {list(stored.shape)}, "
                f".metadata says {self.dtype} {list(self.sizes)}"
            )
        return stored.view()


def _archive(entry: _Entry, item: _Item) -> TorchZip:
    return TorchZip(entry.folder.file(item.file), item.offset, item.length, what=f"item {entry.key!r}")


def _value(entry: _Entry) -> Any:
    """The value of one key: a number for a 0-d tensor, else the plain pickled value."""
    if entry.tensor is not None:
        tensor = _tensor(entry, entry.key)
        return tensor.read().item() if tensor.shape == () else tensor.read().tolist()
    return _archive(entry, entry.items[None]).load()


def _lazy_value(entry: _Entry, name: str) -> Tensor | Scalar | None:
    """One piece of optimizer state: a tensor, a number, or None for anything else."""
    if entry.tensor is not None:
        return _tensor(entry, name)
    value = _value(entry)
    return value if isinstance(value, (int, float, bool)) else None


FORMAT = Format("dcp", _detect, _open, _incomplete)
