"""Read checkpoints of torch.distributed.checkpoint (DCP): `.metadata` and `__<rank>_<n>.distcp` files.

Each chunk of a tensor, and each pickled value, is a complete `torch.save` zip within a `.distcp`
file. A large run has a hundred thousand chunks. A chunk is therefore not opened, or compared with
`.metadata`, until it is first read.

Source: `_write_item` in torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import re
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Checkpoint, Scalar
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    OptimizerStateError,
    prefix_checkpoint_errors,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.dcp.checksums import CHECKSUMS, has_metadata_name, list_metadata_files
from portable.converters.formats.dcp.metadata import (
    Dims,
    Entry,
    ItemLocation,
    TensorEntry,
    format_chunk_key,
    read_folder_metadata,
)
from portable.converters.formats.dcp.tables import ShardTables, TableBackedTensor, open_shard_tables
from portable.converters.names.canonical import (
    classify_state_dict_keys,
    infer_key_paths,
    strip_common_prefixes,
)
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names
from portable.converters.storage.safe_open import get_child_inside, header_contains
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Box, Tensor, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.converters.checkpoint import Aliases, OptimizerState
    from portable.converters.formats.dcp.piece_index import BuildOnce
    from portable.converters.names.canonical import StateDictPath as KeyPath
    from portable.converters.storage.path_or_url import AnyPath

# Accelerate and transformers' Trainer write numbered folders, one for the model and one for the optimizer.
_MODEL_FOLDER, _OPTIMIZER_FOLDER = "pytorch_model_fsdp_", "optimizer_"
_COUNTED = ("train_state", "lr_scheduler")
MEGATRON_COMMON_FILE = "common.pt"
"""Name of a file that Megatron-Core writes next to its DCP shards. Such folders have a
separate format.
"""


def _find_dcp_folders(path: AnyPath) -> list[AnyPath]:
    """Find the DCP folders of a checkpoint.

    The result is the checkpoint's folder itself, or its subfolders `pytorch_model_fsdp_0` and
    `optimizer_0`, which Accelerate writes. The subfolder `optimizer_0` may be missing.

    Returns:
        The folders. Empty if there are none, or if Megatron-Core wrote the folder.

    Raises:
        LinkError: If a subfolder is a link to a target outside the checkpoint's folder.
    """
    if list_metadata_files(path):
        return [] if is_megatron_folder(path) else [path]
    pair = [path / f"{_MODEL_FOLDER}0", path / f"{_OPTIMIZER_FOLDER}0"]
    if not list_metadata_files(pair[0]):
        return []
    return [get_child_inside(path, folder.name) for folder in pair if list_metadata_files(folder)]


def is_megatron_folder(folder: AnyPath) -> bool:
    """Return whether Megatron-Core wrote the DCP shards in a folder.

    Such a folder contains a file `common.pt`, or a `metadata.json` that mentions `"torch_dist"`.
    """
    return (folder / MEGATRON_COMMON_FILE).is_file() or header_contains(
        folder / "metadata.json", b'"torch_dist"'
    )


def _explain_incomplete(source: CheckpointPath) -> str | None:
    """Return an error message if a path is a part of a DCP checkpoint that cannot be opened.

    Such a path is either one file of a checkpoint, or a folder in which the save did not finish.
    Call this function only if no format recognizes the path, because it does not check whether the
    folder contains `.metadata`.

    Returns:
        The message as one line. None if the path does not look like a part of a DCP checkpoint.
    """
    path = source.path
    if path.is_file() and (path.name.endswith(".distcp") or has_metadata_name(path)):
        return f"{path}: is one file of a DCP checkpoint; specify the folder"
    for folder in (path, path / f"{_MODEL_FOLDER}0"):
        if folder.is_dir() and any(entry.name.endswith(".distcp") for entry in folder.iterdir()):
            return (
                f"{folder}: contains .distcp files, but no .metadata, because the save did not "
                "finish; choose another step"
            )
    return None


def _open_dcp_checkpoint(source: CheckpointPath, folders: Sequence[AnyPath]) -> Checkpoint:
    """Open the DCP folders of a checkpoint. No tensor data is read.

    Raises:
        CheckpointError: If the metadata is damaged or not supported, if a shard is missing or too
            short, if a key is stored twice, or if there are several models.
    """
    location = str(source.path)
    if (source.path / f"{_MODEL_FOLDER}1").is_dir():
        raise CheckpointError(
            f"{location}: contains several models; specify one of the {_MODEL_FOLDER}* folders"
        )
    entries: dict[str, Entry] = {}
    builders: dict[str, Callable[[TensorEntry, str], Tensor]] = {}
    for path in folders:
        folder_entries, builder = _open_folder_entries(path, source.rank, source.build_once)
        for key, entry in folder_entries.items():
            if entries.setdefault(key, entry) is not entry:
                raise DamagedCheckpointError(f"{path}: the key {key!r} is stored twice")
            builders[key] = builder

    def build_tensor(entry: TensorEntry, name: str) -> Tensor:
        return builders[entry.key](entry, name)

    recorded_paths = {key: entry.path for key, entry in entries.items() if entry.path is not None}
    paths = (
        recorded_paths if len(recorded_paths) == len(entries) else infer_key_paths(entries, location=location)
    )
    tensor_entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorEntry)}
    roles = classify_state_dict_keys(paths, frozenset(tensor_entries), location=location)
    stored = {name: build_tensor(tensor_entries[key], name) for name, key in roles.model.items()}
    tensors = strip_common_prefixes(stored, location=location)

    def open_optimizer(aliases: Aliases) -> OptimizerState | None:
        if not roles.optimizers:
            return None
        from portable.converters.formats.dcp.optimizer import build_optimizer_state
        from portable.converters.formats.torch_save.reader import deduplicate_tied_names

        if len(roles.optimizers) > 1:
            names = sorted(".".join(map(str, path)) for path in roles.optimizers)
            raise OptimizerStateError(
                f"{location}: contains several optimizers "
                f"({', '.join(map(format_untrusted_value, names[:8]))}), but only one is supported"
            )
        return build_optimizer_state(
            roles,
            tensors,
            lambda key, name: _read_optimizer_state(entries[key], name, build_tensor),
            lambda key: _read_entry_value(entries[key], build_tensor),
            location=location,
            order=deduplicate_tied_names(tensors, aliases),
        )

    return Checkpoint(
        format="dcp",
        root=source.path,
        tensors=tensors,
        optimizer=open_optimizer,
        metadata={**_build_world_size_metadata(folders), **read_trainer_metadata(source.path)},
        companions=find_companions(source.path),
        counters=lambda: _read_training_counters(roles.other, paths, entries, build_tensor),
    )


def open_tensors(folder: AnyPath, build_once: BuildOnce | None = None) -> dict[str, Tensor]:
    """Open all tensors of a DCP folder, keyed by flattened state dict key. Values are read lazily.

    Args:
        folder: DCP folder.
        build_once: Function that writes a file in one process per node. See `open_checkpoint`.

    Raises:
        CheckpointError: If the metadata is damaged.
    """
    entries, build_tensor = _open_folder_entries(folder, None, build_once)
    return {key: build_tensor(entry, key) for key, entry in entries.items() if isinstance(entry, TensorEntry)}


class _FolderEntries(NamedTuple):
    """Entries of a DCP folder, and a function that builds their tensors.

    Attributes:
        entries: Entry of each key.
        build_tensor: Function that builds a tensor from an entry and a name. The name is used in error
            messages.
    """

    entries: Mapping[str, Entry]
    build_tensor: Callable[[TensorEntry, str], Tensor]


def _open_folder_entries(
    path: AnyPath, rank: tuple[int, int] | None, build_once: BuildOnce | None
) -> _FolderEntries:
    """Read the entries of a DCP folder.

    An entry describes one key of the state dict, and lists the stored pieces (chunks) of a tensor.

    Args:
        path: The folder.
        rank: Rank and world size of the reader, if it needs only its own pieces. If each rank that
            saved the checkpoint wrote its own metadata file, the reader first reads one of these
            files, and reads the others only when needed. None if the reader needs all pieces.
        build_once: Function that lets one process per node write an index of the metadata for the
            other processes. See `open_checkpoint`. If None, no index is written.
    """
    folder = CheckpointFolder(path)
    if rank is not None or build_once is not None:
        tables = open_shard_tables(folder, rank, build_once)
        if tables is not None:
            return _FolderEntries(tables.entries, partial(_build_table_backed_tensor, tables))
    return _FolderEntries(read_folder_metadata(folder), _build_tensor_of_pieces)


def _build_world_size_metadata(folders: Sequence[AnyPath]) -> dict[str, Any]:
    """Count the ranks in the names of the shard files.

    Returns:
        `{"world_size": n}`, or an empty dict if there are no shards.
    """
    names = [name for folder in folders for name in list_entry_names(folder)]
    ranks = {match[1] for name in names if (match := re.fullmatch(r"__(\d+)_\d+\.distcp", name))}
    return {"world_size": len(ranks)} if ranks else {}


def _read_training_counters(
    keys: list[str],
    paths: Mapping[str, KeyPath],
    entries: Mapping[str, Entry],
    build_tensor: Callable[[TensorEntry, str], Tensor],
) -> dict[str, Scalar]:
    """Read the counters of torchtitan's trainer and learning-rate schedule.

    They are the entries below `train_state` and `lr_scheduler`. Values that are not numbers, and
    tensors with at least one dimension, are skipped.

    Returns:
        Numbers, keyed by their dotted paths in the state dict.
    """
    counters: dict[str, Scalar] = {}
    for key in keys:
        entry = entries[key]
        if paths[key][0] in _COUNTED and (not isinstance(entry, TensorEntry) or entry.shape == ()):
            value = _read_entry_value(entry, build_tensor)
            if isinstance(value, (int, float)):
                counters[".".join(map(str, paths[key]))] = value
    return counters


def _build_tensor_of_pieces(entry: TensorEntry, name: str) -> Tensor:
    """Build the tensor of a key from the pieces that its entry lists.

    Each piece is opened when it is first read.

    Raises:
        CheckpointError: If the metadata lacks the location of a piece, if a piece is too short
            for its shape, or if the pieces do not form the tensor.
    """
    boxes = build_piece_boxes(entry)
    with prefix_checkpoint_errors(entry.folder.path):
        return Tensor(name, entry.dtype, entry.shape, boxes)


def build_piece_boxes(entry: TensorEntry) -> list[Box]:
    """Build a lazy `Box` for each piece (chunk) of a tensor.

    A `Box` is a region of the tensor together with its data. This function checks the metadata of
    the pieces. Each piece is opened, and compared with the metadata, when it is first read. The
    pieces of an empty tensor are never read, so they are opened and compared immediately. Empty
    pieces of any other tensor are omitted.

    Raises:
        CheckpointError: If the metadata lacks the location of a piece, if a piece is too short for
            its shape, or if a piece of an empty tensor differs from the metadata.
    """
    boxes = []
    for offsets, sizes in entry.chunks:
        item = entry.items.get(format_chunk_key(offsets))
        if not prod(sizes):
            if prod(entry.shape):
                continue  # an empty shard, which DCP need not store
            if item is not None:
                _open_piece(entry, item, sizes)  # check it now, because it is never read
            boxes.append(Box(offsets, sizes, View(InMemorySource(b""), 0, (0,) * len(sizes))))
            continue
        if item is None:
            raise DamagedCheckpointError(
                f"{entry.folder.path}: the chunk of {entry.key!r} at position {list(offsets)} is missing"
            )
        if item.length < (nbytes := prod(sizes) * get_itemsize(entry.dtype)):
            open_item_archive(entry, item).load_object()  # raises a better error for a tensor subclass
            raise DamagedCheckpointError(
                f"{entry.folder.path / item.file}: damaged: the chunk of {entry.key!r} has {item.length:,} "
                f"bytes, but its shape needs {nbytes:,}"
            )
        boxes.append(Box(offsets, sizes, partial(_open_piece, entry, item, sizes)))
    return boxes


def _build_table_backed_tensor(tables: ShardTables, entry: TensorEntry, name: str) -> Tensor:
    """Build a lazy tensor for an entry of the metadata.

    Its pieces are looked up in the ranks' metadata tables when it is read.

    Args:
        tables: Metadata tables of the checkpoint. Each table lists the pieces that one rank saved.
        entry: Metadata of the tensor.
        name: Name of the lazy tensor.
    """
    with prefix_checkpoint_errors(entry.folder.path):
        return TableBackedTensor(
            name,
            entry.dtype,
            entry.shape,
            partial(tables.find_overlapping_boxes, entry.key, build_piece_boxes),
        )


def _open_piece(entry: TensorEntry, item: ItemLocation, sizes: Dims) -> View:
    """Open one piece (chunk) of a tensor in its `.distcp` file, and compare it with `.metadata`.

    Args:
        entry: Entry of the tensor.
        item: Location of the piece.
        sizes: Shape of the piece.

    Returns:
        View of the elements, which are not read yet.

    Raises:
        CheckpointError: If the piece is not a plain tensor, or if its dtype or shape differs from
            `.metadata`.
    """
    archive = open_item_archive(entry, item)
    stored = archive.load_object()
    if not isinstance(stored, StoredTensor):
        raise DamagedCheckpointError(f"{archive.location}: contains an object other than a plain tensor")
    if stored.dtype != entry.dtype or stored.shape != sizes:
        raise DamagedCheckpointError(
            f"{archive.location}: has the dtype {stored.dtype} and the shape {list(stored.shape)}, but "
            f".metadata records {entry.dtype} and {list(sizes)}"
        )
    return stored.to_byte_view()


def open_item_archive(entry: Entry, item: ItemLocation) -> TorchZip:
    """Open the `torch.save` zip that contains one chunk of a tensor, or one pickled value.

    Args:
        entry: Entry of the tensor or value. It provides the checkpoint folder, and the key that is
            used in error messages.
        item: Location of the zip.

    Raises:
        CheckpointError: If the zip is damaged or does not have its recorded checksum.
    """
    file = entry.folder.get_file(item.file)
    archive = TorchZip(file, item.offset, item.length, description=f"item {entry.key!r}")
    if item.checksum is not None and archive.checksum != item.checksum:
        raise DamagedCheckpointError(
            f"{archive.location}: does not match its checksum in {CHECKSUMS} or in the metadata, so one "
            "of these files is damaged or from another save"
        )
    return archive


def _read_entry_value(entry: Entry, build_tensor: Callable[[TensorEntry, str], Tensor]) -> Any:
    """Read the value of an entry as a Python object.

    Args:
        entry: Entry of a tensor or of a pickled value.
        build_tensor: Function that builds a lazy tensor from its entry and its name.

    Returns:
        For a tensor, its values as a number or nested lists of numbers. For any other entry, the
        unpickled value.
    """
    if isinstance(entry, TensorEntry):
        return build_tensor(entry, entry.key).tolist()
    return open_item_archive(entry, entry.item).load_object()


def _read_optimizer_state(
    entry: Entry, name: str, build_tensor: Callable[[TensorEntry, str], Tensor]
) -> Tensor | Scalar | None:
    """Read one entry of the optimizer state as a lazy tensor or a number.

    Args:
        entry: Entry of the state dict.
        name: Name of the resulting tensor.
        build_tensor: Function that builds a lazy tensor from a tensor entry and a name.

    Returns:
        The tensor or the number. None if the entry is neither.
    """
    if isinstance(entry, TensorEntry):
        return build_tensor(entry, name)
    value = _read_entry_value(entry, build_tensor)
    return value if isinstance(value, (int, float)) else None


FORMAT = Format(
    "dcp",
    lambda source: _find_dcp_folders(source.path) or None,
    _open_dcp_checkpoint,
    _explain_incomplete,
)
