"""Parse DCP's `.metadata`: the keys of the state dict, and the locations of their chunks.

A pickled `Metadata` contains three tables: the shapes and chunks of each key
(`state_dict_metadata`), the location of each chunk (`storage_data`), and the nested path of each
flattened key (`planner_data`). The file has no checksum, so the tables are checked against each
other and against the sizes of the files.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py, default_planner.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.pickle_reader import (
    PickledGlobal,
    PickledInstance,
    Standin,
    build_getattr_standin,
    build_inert_members,
    format_untrusted_value,
    is_safe_index,
    unpickle_without_code,
)
from portable.converters.containers.torchzip import MEMORY_FORMATS, TORCH_STANDINS
from portable.converters.containers.untrusted_values import (
    require_attributes,
    require_list,
    require_mapping,
    require_shape,
)
from portable.converters.errors import CheckpointError, DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.formats.dcp.checksums import Region, list_metadata_files, read_shard_checksums
from portable.converters.limits import MAX_PATH, MAX_TENSOR_NAME
from portable.converters.tensors.dtypes import FROM_TORCH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.formats.dcp.checksums import ShardChecksums
    from portable.converters.names.canonical import StateDictPath as KeyPath
    from portable.converters.storage.folder import CheckpointFolder

Dims = tuple[int, ...]

_CLASSES = "torch.distributed.checkpoint."
_MEMBERS = {f"{_CLASSES}metadata._MEM_FORMAT_ENCODING": MEMORY_FORMATS}
_STANDINS: Mapping[str, Standin | None] = {
    **TORCH_STANDINS,
    "builtins.getattr": build_getattr_standin(build_inert_members(_MEMBERS)),
}


@dataclass(frozen=True)
class ItemLocation:
    """Location of one chunk of a tensor, or of one pickled value.

    The chunk or value is stored as a zip archive in the format of `torch.save`. A shard file
    contains many such archives.

    Attributes:
        file: Name of the shard file in the folder.
        offset: Position of the archive in the shard file, in bytes.
        length: Size of the archive in bytes.
        checksum: CRC32 of the archive's directory, which contains the CRC32s of the data. None if
            the folder does not record it.
    """

    file: str
    offset: int
    length: int
    checksum: int | None = None


@dataclass(frozen=True)
class TensorEntry:
    """Metadata of a tensor in the state dict, with the locations of its chunks.

    Attributes:
        folder: Folder of the checkpoint.
        key: Flattened key in the state dict.
        path: Dict keys and list indices that lead to the tensor in the nested state dict, or None
            if the writer did not record them.
        dtype: Safetensors dtype.
        shape: Full, unsharded shape.
        chunks: Region of the tensor that each chunk covers.
        items: Location of each chunk in the files, keyed by `format_chunk_key` of the chunk's
            offsets.
    """

    folder: CheckpointFolder
    key: str
    path: KeyPath | None
    dtype: str
    shape: Dims
    chunks: tuple[Region, ...]
    items: dict[str, ItemLocation]


@dataclass(frozen=True)
class ValueEntry:
    """Metadata of a pickled value in the state dict.

    Attributes:
        folder: Folder of the checkpoint.
        key: Flattened key in the state dict.
        path: Nested path of the key, as in `TensorEntry`.
        item: Location of the value.
    """

    folder: CheckpointFolder
    key: str
    path: KeyPath | None
    item: ItemLocation


Entry = TensorEntry | ValueEntry


def format_chunk_key(offsets: Dims | None) -> str:
    """Format the offsets of a chunk as a dict key. For a pickled value, pass None.

    Strings are used because a malicious file could contain numbers whose hashes collide. See
    `portable.converters.limits.MAX_KEY`.
    """
    return repr(offsets)


def read_folder_metadata(folder: CheckpointFolder) -> dict[str, Entry]:
    """Read the entries of all keys in a DCP folder.

    If the ranks saved without communicating, their metadata files are merged. The function does not
    check whether the metadata file of a rank is missing.

    Returns:
        Entries, keyed by the keys of the state dict. Empty if the folder has no metadata files.

    Raises:
        CheckpointError: If `read_metadata_file` rejects a metadata file, if `shard_checksums.json`
            is damaged, has an unsupported version, or is missing although the manifest lists it, or
            if the metadata files of two ranks contradict each other.
    """
    merged: dict[str, Entry] = {}
    checksums = read_shard_checksums(folder)
    for name in list_metadata_files(folder.path):
        for key, entry in read_metadata_file(folder, name, checksums).items():
            merged[key] = _merge_entries(merged[key], entry) if key in merged else entry
    return merged


def read_metadata_file(
    folder: CheckpointFolder, name: str, checksums: ShardChecksums | None
) -> dict[str, Entry]:
    """Read one metadata file: `.metadata`, or the table that one rank wrote.

    `.metadata` describes the chunks of all ranks. A table describes only the chunks that its rank
    saved.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the file.
        checksums: Checksums of the folder, or None if it has none.

    Returns:
        Entries, keyed by the keys of the state dict. They are in the order of the state dict if the
        writer recorded `planner_data`.

    Raises:
        CheckpointError: If the file is damaged, was not written by DCP, or does not match its
            checksum. Also raised if a shard file is missing, too short, or outside the folder, if
            items overlap, if an item is compressed, or if a dtype is not supported. Items with the
            same location are accepted if the items cover every byte of the file.
    """
    file = folder.get_file(name)
    location = str(file.path)
    data = file.read_bytes(0, file.nbytes)
    if checksums is not None:
        checksums.check_metadata_file(name, data)
    root = unpickle_without_code(data, location=location, standins=_STANDINS, allowed_prefixes=(_CLASSES,))
    fields = require_attributes(root, "Metadata", location)
    descriptions = require_mapping(fields.get("state_dict_metadata"), "state_dict_metadata", location)
    stored = require_mapping(fields.get("storage_data"), "storage_data", location)
    items = _parse_item_locations(folder, stored, location, checksums)
    if "planner_data" not in fields:
        raise DamagedCheckpointError(
            f"{location}: has no planner_data, so it is damaged or was not written by "
            "torch.distributed.checkpoint"
        )
    key_paths = fields["planner_data"]
    if not isinstance(key_paths, dict) or not key_paths:
        key_paths = None
    if not descriptions.keys() >= items.keys() or (
        key_paths is not None and key_paths.keys() != descriptions.keys()
    ):
        raise DamagedCheckpointError(
            f"{location}: damaged: state_dict_metadata, storage_data and planner_data contain different keys"
        )
    entries: dict[str, Entry] = {}
    # Iterate in the order of planner_data, which is the order of the state dict. The other tables are in
    # the order in which the ranks wrote.
    for key in descriptions if key_paths is None else key_paths:
        description = descriptions[key]
        if not isinstance(key, str):
            raise DamagedCheckpointError(f"{location}: damaged: a key of state_dict_metadata is not a string")
        if len(key) > MAX_TENSOR_NAME:
            raise DamagedCheckpointError(
                f"{location}: damaged: the key {format_untrusted_value(key)} is too long ({len(key):,} "
                f"characters, at most {MAX_TENSOR_NAME:,})"
            )
        path = None if key_paths is None else _parse_key_path(key_paths[key], key, location)
        kind = description.key.rpartition(".")[2] if isinstance(description, PickledInstance) else ""
        stored = items.get(key, {})
        if kind == "TensorStorageMetadata":
            properties = _parse_tensor_properties(description, key, location)
            entries[key] = TensorEntry(
                folder, key, path, properties.dtype, properties.shape, properties.chunks, stored
            )
        elif kind == "BytesStorageMetadata" and list(stored) == [format_chunk_key(None)]:
            entries[key] = ValueEntry(folder, key, path, stored[format_chunk_key(None)])
        else:
            raise DamagedCheckpointError(
                f"{location}: damaged: the entry of {key!r} in state_dict_metadata is invalid"
            )
    return entries


def _merge_entries(first: Entry, second: Entry) -> Entry:
    """Merge the entries that the metadata files of two ranks have for the same key.

    If both ranks stored a chunk or value, the location on the first rank is kept.

    Raises:
        CheckpointError: If one entry is a tensor and the other a pickled value, or if the paths,
            dtypes, or shapes differ.
    """
    if isinstance(first, ValueEntry) and isinstance(second, ValueEntry) and first.path == second.path:
        return first
    if (
        isinstance(first, TensorEntry)
        and isinstance(second, TensorEntry)
        and (first.dtype, first.shape, first.path) == (second.dtype, second.shape, second.path)
    ):
        chunks = tuple({repr(chunk): chunk for chunk in (*first.chunks, *second.chunks)}.values())
        return replace(first, chunks=chunks, items={**second.items, **first.items})
    raise DamagedCheckpointError(
        f"{first.folder.path}: the ranks' metadata files describe {first.key!r} differently"
    )


def _parse_key_path(path: Any, key: str, location: str) -> KeyPath:
    """Check and return the path that `planner_data` records for a key.

    The path consists of the dict keys and list indices that lead to the value in the nested state
    dict. DCP joins them with dots to form the key. For example, the path `("a", 0)` belongs to the
    key `a.0`.

    Args:
        path: Path from `planner_data`.
        key: Key of the value in the flattened state dict.
        location: Path of the metadata file, used in error messages.

    Raises:
        CheckpointError: If the path is not a tuple of keys and indices, or if joining them does not
            give the key.
    """
    # DCP joins the path with dots to form the key, so a path that does not match its key is damaged.
    is_key_path = (
        isinstance(path, tuple) and path and all(type(part) is str or is_safe_index(part) for part in path)
    )
    if is_key_path and len(path) <= MAX_PATH and ".".join(map(str, path)) == key:
        return tuple(path)
    raise DamagedCheckpointError(
        f"{location}: damaged: the path of {key!r} in planner_data does not match the key"
    )


def _parse_item_locations(
    folder: CheckpointFolder, storage_data: dict[Any, Any], location: str, checksums: ShardChecksums | None
) -> dict[str, dict[str, ItemLocation]]:
    """Parse the location of each chunk and value, and reject items that overlap in a file.

    Two state dict entries may have the same location, for example for tied tensors. This is
    accepted only if the items cover every byte of the file. Otherwise, the gap contains an item to
    which one of the two entries should refer, so the metadata is rejected as damaged.

    Returns:
        Locations, keyed by state dict key and then by chunk key. See `format_chunk_key`.

    Raises:
        CheckpointError: If a location is damaged, if a file is missing or too short, if an item is
            compressed, or if items overlap.
    """
    items: dict[str, dict[str, ItemLocation]] = {}
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in storage_data.items():
        index_fields = require_attributes(index, "MetadataIndex", location)
        stored_at = require_attributes(info, "_StorageInfo", location)
        key, name = index_fields.get("fqn"), stored_at.get("relative_path")
        if not isinstance(key, str) or not isinstance(name, str):
            raise DamagedCheckpointError(
                f"{location}: damaged: an entry of storage_data lacks a valid key or file name"
            )
        if len(key) > MAX_TENSOR_NAME:
            raise DamagedCheckpointError(
                f"{location}: damaged: the key {format_untrusted_value(key)} is too long ({len(key):,} "
                f"characters, at most {MAX_TENSOR_NAME:,})"
            )
        chunk = format_chunk_key(
            None
            if index_fields.get("offset") is None
            else require_shape(index_fields["offset"], f"the position of a chunk of {key!r}", location)
        )
        offset, length = require_shape(
            (stored_at.get("offset"), stored_at.get("length")),
            f"the offset and length of {key!r} in storage_data",
            location,
        )
        if stored_at.get("transform_descriptors"):
            raise CheckpointError(
                f"{location}: {key!r} is compressed by a DCP extension; save the checkpoint without "
                "the extension"
            )
        file = folder.get_file(name)
        if offset + length > file.nbytes:
            raise DamagedCheckpointError(
                f"{file.path}: truncated: {key!r} would end at byte {offset + length:,}, but the file "
                f"has {file.nbytes:,} bytes"
            )
        if chunk in items.setdefault(key, {}):
            raise DamagedCheckpointError(f"{location}: damaged: a chunk of {key!r} is stored twice")
        checksum = checksums.get_item_checksum(name, offset, stored_at.get("checksum")) if checksums else None
        items[key][chunk] = ItemLocation(name, offset, length, checksum)
        spans.setdefault(name, []).append((offset, offset + length, key))
    files: dict[object, list[tuple[int, int, str]]] = {}
    for name, file_spans in spans.items():  # one file may have several names
        file = folder.get_file(name)
        files.setdefault(file.get_file_identity(), [(0, 0, ""), (file.nbytes, file.nbytes, "")]).extend(
            file_spans
        )
    for file_spans in files.values():
        file_spans.sort()
        gap = any(stop < start for (_, stop, _), (start, _, _) in pairwise(file_spans))
        for (first, stop, key), (start, end, other) in pairwise(file_spans):
            if start < stop and (gap or (first, stop) != (start, end)):
                raise DamagedCheckpointError(
                    f"{location}: damaged: the data of {key!r} and {other!r} overlap in a file"
                )
    return items


class _TensorProperties(NamedTuple):
    """Dtype, shape and chunks of a tensor."""

    dtype: str
    shape: Dims
    chunks: tuple[Region, ...]


def _parse_tensor_properties(description: PickledInstance, key: str, location: str) -> _TensorProperties:
    """Parse the dtype, the shape and the chunks of a tensor.

    Args:
        description: Pickled `TensorStorageMetadata`.
        key: Key of the tensor, used in error messages.
        location: Path of the metadata file, used in error messages.

    Raises:
        CheckpointError: If the description is damaged, or if the dtype is not supported.
    """
    fields = require_attributes(description, "TensorStorageMetadata", location)
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, PickledInstance) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    name = dtype.key.removeprefix("torch.") if isinstance(dtype, PickledGlobal) else "?"
    if name not in FROM_TORCH:
        raise UnsupportedCheckpointError(
            f"{location}: {key!r} has the element type {name}, which is not supported"
        )
    chunk_name = f"a chunk of {key!r}"
    extents = []
    for chunk in require_list(fields.get("chunks"), f"the chunks entry of {key!r}", location):
        parts = require_attributes(chunk, "ChunkStorageMetadata", location)
        offsets = require_shape(parts.get("offsets"), f"the position of {chunk_name}", location)
        sizes = require_shape(parts.get("sizes"), f"the shape of {chunk_name}", location)
        extents.append(Region(offsets, sizes))
    return _TensorProperties(
        FROM_TORCH[name],
        require_shape(fields.get("size"), f"the shape of {key!r}", location),
        tuple(extents),
    )
