"""Read folders of `torch_checkpointing`, the checkpoint library of torchtitan 0.3 and later.

`metadata.pkl` is a pickled table of the items (model, optimizer, ...). For each item, it lists the
file of each rank, and the shape, device mesh and placements of each sharded tensor. A rank's file
is `<item>_<rank>.pt` unless the table contains another name. It is either a `torch.save` file of
DTensors, or a safetensors file of the rank's parts, whose positions are computed from the table.

Source: torch_checkpointing/distributed_metadata.py, dtensor_metadata.py, checkpoint_layout.py.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.pickle_reader import (
    format_untrusted_value,
    to_json_value,
    unpickle_without_code,
)
from portable.converters.containers.shard_index import check_rank_files_complete
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    OptimizerStateError,
    UnsupportedCheckpointError,
    format_os_error,
    prefix_checkpoint_errors,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.dcp.optimizer import build_optimizer_state
from portable.converters.formats.fsdp_ranks.flat import RankCopies
from portable.converters.formats.fsdp_ranks.reader import RankParts
from portable.converters.formats.fsdp_ranks.sharded import (
    PlacedPart,
    ShardedRecord,
    compute_rank_extent,
    load_rank_file,
)
from portable.converters.formats.safetensors import read_safetensors_file
from portable.converters.formats.torch_save.reader import deduplicate_tied_names, find_tied_aliases
from portable.converters.limits import MAX_CONTAINER_DEPTH, MAX_COUNT, MAX_HEADER, MAX_KEY_IN_PATH, MAX_VALUES
from portable.converters.names.canonical import classify_state_dict_keys, strip_common_prefixes
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_file_names
from portable.converters.storage.safe_open import header_contains, read_small_file
from portable.converters.tensors.dtypes import FROM_TORCH
from portable.converters.tensors.tensor import Tensor, is_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from portable.converters.checkpoint import Aliases, OptimizerState, Scalar
    from portable.converters.names.canonical import StateDictPath as KeyPath
    from portable.converters.storage.path_or_url import AnyPath

_METADATA = "metadata.pkl"
# Texts that occur at the start of the table in versions 1 and 2, or in an empty table.
_MARKS = (b"nested_path_to_metadata", b"rank_to_layout_info", b"sharding_metadata")
_VERSION = "2.0"
_TORCH, _SAFETENSORS = "TorchSerialization", "SafetensorsSerialization"
_OTHER_FORMATS = ("JsonSerialization", "RawSerialization")
_DTENSOR = "DTensorShardingMetadata"
_STEP = re.compile(r"step_0\.(pt|json)")


class _TensorLayout(NamedTuple):
    """Shape and placements of a tensor on a group of ranks.

    Attributes:
        dtype: Safetensors dtype.
        shape: Full, unsharded shape.
        mesh_sizes: Size of each dimension of the device mesh.
        mesh_ranks: Rank at each position of the mesh, flattened.
        placements: Placement for each mesh dimension, as in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    mesh_sizes: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    placements: list[dict[str, Any]]


class _GroupLayout(NamedTuple):
    """Group of ranks that store a tensor, and the tensor's layout on these ranks.

    Attributes:
        ranks: Ranks that store the tensor.
        layout: Dtype and shape of the tensor, and its placements on these ranks.
    """

    ranks: frozenset[int]
    layout: _TensorLayout


class _ItemFile(NamedTuple):
    """File that one rank wrote for an item, such as the model.

    Attributes:
        name: Name of the file in the folder.
        serialization: Serialization format, such as `TorchSerialization`.
    """

    name: str
    serialization: str


class _SavedItem(NamedTuple):
    """Top-level entry of the saved state dict, such as the model or the optimizer.

    Attributes:
        files: The file that each rank wrote for the entry, keyed by rank.
        layouts: Layouts of the sharded tensors, keyed by the path of the tensor in the entry. A
            tensor has one layout for each group of ranks that stores it.
    """

    files: dict[int, _ItemFile]
    layouts: dict[KeyPath, list[_GroupLayout]]


class _Metadata(NamedTuple):
    """Content of `metadata.pkl`.

    Attributes:
        world_size: Number of ranks that saved the checkpoint.
        items: Top-level entries of the state dict that contain sharded tensors, such as the model
            or the optimizer, keyed by name.
    """

    world_size: int
    items: dict[str, _SavedItem]


def _find_checkpoint_folder(source: CheckpointPath) -> AnyPath | None:
    """Find the folder of a checkpoint.

    The path may be the folder, its file `metadata.pkl`, or a file in it with a name such as
    `model_0.pt`.

    Returns:
        The folder. None if the path does not belong to a checkpoint of this format.
    """
    path = source.path if source.path.is_dir() else source.path.parent
    if _METADATA not in list_file_names(path) or not any(
        header_contains(path / _METADATA, mark) for mark in _MARKS
    ):
        return None
    is_part = source.path.is_dir() or re.fullmatch(rf"{re.escape(_METADATA)}|.+_\d+\.pt", source.path.name)
    return path if is_part else None


def _open_torch_checkpointing(source: CheckpointPath, path: AnyPath) -> Checkpoint:
    """Open the checkpoint in the folder `path`, and merge the files of all ranks.

    Sharded tensors are read lazily. Copies of an unsharded tensor, such as a buffer, are read and
    compared.

    Raises:
        CheckpointError: If the checkpoint is damaged, is not supported, or contains no model. Also
            raised if the copies of an unsharded tensor differ.
    """
    folder = CheckpointFolder(path)
    world, items = _read_metadata(path)
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for name, item in items.items():
        for below, leaf in _merge_rank_files(folder, name, item).items():
            key = ".".join(map(str, (name, *below)))
            if key in leaves:
                raise UnsupportedCheckpointError(
                    f"{path}: two values have the same name, {format_untrusted_value(key)}"
                )
            leaves[key], paths[key] = leaf, (name, *below)
    roles = classify_state_dict_keys(
        paths, frozenset(key for key, leaf in leaves.items() if _is_merged_tensor(leaf)), location=str(path)
    )
    if not roles.model:
        raise CheckpointError(
            f"{path / _METADATA}: lists no tensors of a model; specify a checkpoint that contains a model"
        )
    with prefix_checkpoint_errors(path):
        stored = {name: leaves[key].to_tensor() for name, key in roles.model.items()}
    tensors: dict[str, Tensor] = strip_common_prefixes(stored, location=str(path))
    keys_by_name = dict(zip(tensors, roles.model.values(), strict=True))
    first_parts = {
        name: view for name, key in keys_by_name.items() if (view := _get_first_part(leaves[key])) is not None
    }

    def open_optimizer(aliases: Aliases) -> OptimizerState | None:
        if not roles.optimizers:
            return None
        if len(roles.optimizers) > 1:
            names = ", ".join(
                format_untrusted_value(".".join(map(str, each))) for each in sorted(roles.optimizers)[:8]
            )
            raise OptimizerStateError(
                f"{path}: contains several optimizers ({names}), but only one can be converted"
            )
        return build_optimizer_state(
            roles,
            tensors,
            lambda key, name: _to_optimizer_state(leaves[key]),
            lambda key: _to_plain_value(leaves[key]),
            location=str(path),
            order=deduplicate_tied_names(tensors, aliases),
        )

    return Checkpoint(
        format="torch-checkpointing",
        root=source.path,
        tensors=tensors,
        aliases=find_tied_aliases(first_parts, tensors),
        optimizer=open_optimizer,
        metadata={"world_size": world, **_read_step(folder), **read_trainer_metadata(path)},
        companions=find_companions(path),
    )


def _read_metadata(path: AnyPath) -> _Metadata:
    """Read `metadata.pkl`, which lists the saved items and the layouts of their tensors.

    Items without sharded tensors, such as a data loader, are omitted.

    Raises:
        CheckpointError: If the file is damaged, has an unsupported version, or lists no sharded
            tensors.
    """
    file = path / _METADATA
    try:
        data = read_small_file(file, max_bytes=MAX_HEADER)
    except OSError as error:
        raise CheckpointError(f"{file}: {format_os_error(error)}") from None
    table = unpickle_without_code(data, location=str(file), standins={})
    if not isinstance(table, dict) or not isinstance(table.get("metadata"), dict):
        raise DamagedCheckpointError(f"{file}: damaged: the file contains no dict of saved items")
    if table.get("version") != _VERSION:
        version = format_untrusted_value(table.get("version"))
        raise CheckpointError(
            f"{file}: has version {version}, but only version {_VERSION} is supported; save the checkpoint "
            f"again with a torch_checkpointing that writes version {_VERSION}, or update portable-trainer"
        )
    world = table.get("world_size")
    if type(world) is not int or not 0 < world <= MAX_COUNT:
        raise DamagedCheckpointError(
            f"{file}: damaged: world_size is {format_untrusted_value(world)}, not a number from 1 to "
            f"{MAX_COUNT:,}"
        )
    items: dict[str, _SavedItem] = {}
    for name, entry in table["metadata"].items():
        with prefix_checkpoint_errors(file):
            if (item := _parse_item(name, entry, world)).layouts:
                items[name] = item
    if not items:
        raise CheckpointError(
            f"{file}: lists no sharded tensors; save the model with a resharder, such as DefaultResharder"
        )
    return _Metadata(world, items)


def _parse_item(name: Any, entry: Any, world: int) -> _SavedItem:
    """Parse the entry of one item in `metadata.pkl`.

    An item is a saved object with one file per rank, such as the model or the optimizer.

    Args:
        name: Name of the item.
        entry: Unpickled entry of the item.
        world: Number of ranks that saved the checkpoint.

    Raises:
        CheckpointError: If the entry is damaged or does not list a file for each rank.
    """
    if type(name) is not str or not isinstance(entry, dict):
        raise DamagedCheckpointError(
            "damaged: the name of an item is not a string, or its entry is not a dict"
        )
    file_records, layout_records = entry.get("rank_to_layout_info"), entry.get("nested_path_to_metadata")
    if not isinstance(file_records, dict) or not isinstance(layout_records, dict):
        raise DamagedCheckpointError(
            f"damaged: the item {format_untrusted_value(name)} has no rank_to_layout_info or no "
            "nested_path_to_metadata"
        )
    if len(file_records) != world or not all(
        type(rank) is int and 0 <= rank < world for rank in file_records
    ):
        raise DamagedCheckpointError(
            f"damaged: the item {format_untrusted_value(name)} does not list one file for each rank, "
            f"although world_size is {world}"
        )
    return _SavedItem(
        {rank: _parse_item_file(name, rank, layout) for rank, layout in file_records.items()},
        {
            _parse_tensor_path(text): _parse_group_layouts(text, groups, world)
            for text, groups in layout_records.items()
        },
    )


def _parse_item_file(name: str, rank: int, layout: Any) -> _ItemFile:
    """Parse the name and format of the file that contains an item on one rank.

    Args:
        name: Name of the item, such as `model`.
        rank: Rank that wrote the file.
        layout: Record of the file in `metadata.pkl`. If None, the file is `<item>_<rank>.pt`, in
            the format of `torch.save`.

    Raises:
        CheckpointError: If the record has no file name or no known format.
    """
    if layout is None:
        return _ItemFile(f"{name}_{rank}.pt", _TORCH)
    file = layout.get("file_path") if isinstance(layout, dict) else None
    serialization = layout.get("serialization_format") if isinstance(layout, dict) else None
    kind = serialization.get("type") if isinstance(serialization, dict) else None
    if type(file) is not str or kind not in (_TORCH, _SAFETENSORS, *_OTHER_FORMATS):
        raise DamagedCheckpointError(
            f"damaged: the file name or format of the item {format_untrusted_value(name)} on rank {rank} is "
            "missing or unknown"
        )
    return _ItemFile(file, kind)


def _parse_tensor_path(text: Any) -> KeyPath:
    """Parse the path of a tensor within a top-level entry of the state dict.

    The path is a JSON list of keys. The entry is, for example, the model or the optimizer.

    Raises:
        CheckpointError: If the value is not a nonempty list of strings and integers.
    """
    try:
        parts = json.loads(text) if type(text) is str else None
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or not parts or not all(type(part) in (str, int) for part in parts):
        raise DamagedCheckpointError(f"damaged: {format_untrusted_value(text)} is not the path of a tensor")
    return tuple(parts)


def _parse_group_layouts(name: Any, groups: Any, world: int) -> list[_GroupLayout]:
    """Parse the layouts of a tensor, one per group of ranks.

    Raises:
        CheckpointError: If there are no layouts, if a layout is damaged or not supported, or if the
            groups of ranks overlap or contain an invalid rank.
    """
    layouts: list[_GroupLayout] = []
    seen: set[int] = set()
    for group in groups if isinstance(groups, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if not is_shape(ranks) or not seen.isdisjoint(ranks) or max(ranks, default=world) >= world:
            raise DamagedCheckpointError(
                f"damaged: the ranks of {format_untrusted_value(name)} are not distinct numbers below {world}"
            )
        seen.update(ranks)
        layouts.append(
            _GroupLayout(frozenset(ranks), _parse_tensor_layout(name, group.get("sharding_metadata")))
        )
    if not layouts:
        raise DamagedCheckpointError(f"damaged: {format_untrusted_value(name)} is not stored on any rank")
    return layouts


def _parse_tensor_layout(name: Any, packed: Any) -> _TensorLayout:
    """Parse the recorded layout of a sharded tensor on a group of ranks.

    Args:
        name: Path of the tensor, used in error messages.
        packed: Record of the layout in `metadata.pkl`.

    Raises:
        CheckpointError: If the record is damaged, does not describe a DTensor, or contains an
            unsupported dtype.
    """
    kind = packed.get("type") if isinstance(packed, dict) else None
    data = packed.get("data") if isinstance(packed, dict) else None
    if kind != _DTENSOR:
        raise UnsupportedCheckpointError(
            f"{format_untrusted_value(name)}: the type {format_untrusted_value(kind)} of sharding metadata "
            "is not supported"
        )
    mesh = data.get("mesh_spec") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(mesh, dict):
        raise DamagedCheckpointError(
            f"damaged: the sharding metadata of {format_untrusted_value(name)} has no mesh_spec"
        )
    dtype = data.get("dtype")
    converted_dtype = FROM_TORCH.get(dtype.removeprefix("torch.")) if type(dtype) is str else None
    if converted_dtype is None:
        raise UnsupportedCheckpointError(
            f"{format_untrusted_value(name)}: the dtype {format_untrusted_value(dtype)} is not supported"
        )
    shape, sizes, ranks = data.get("global_shape"), mesh.get("mesh_shape"), mesh.get("mesh_data")
    placements = data.get("placements")
    if not is_shape(shape) or not is_shape(sizes) or not is_shape(ranks):
        raise DamagedCheckpointError(
            f"damaged: the shape or device mesh of {format_untrusted_value(name)} is not a list of numbers"
        )
    if prod(sizes) != len(ranks) or len(set(ranks)) != len(ranks):
        raise DamagedCheckpointError(
            f"damaged: the device mesh of {format_untrusted_value(name)} does not list each rank once"
        )
    if not isinstance(placements, list) or not all(isinstance(each, dict) for each in placements):
        raise DamagedCheckpointError(f"damaged: {format_untrusted_value(name)} has no placements")
    return _TensorLayout(converted_dtype, tuple(shape), tuple(sizes), tuple(ranks), placements)


def _merge_rank_files(folder: CheckpointFolder, name: str, item: _SavedItem) -> dict[KeyPath, Any]:
    """Read all ranks' files of an item, and merge their values.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the item, such as `model`.
        item: Files and layouts of the item in `metadata.pkl`.

    Returns:
        The values of the item, keyed by path, with `RankParts` and `RankCopies` for tensors.

    Raises:
        CheckpointError: If a file is missing, damaged, or listed for two ranks, or if it contradicts
            `metadata.pkl` or the other ranks.
    """
    files = {rank: file for rank, (file, kind) in item.files.items() if kind not in _OTHER_FORMATS}
    check_rank_files_complete(folder.path, files, len(item.files), name)
    _check_distinct_files(folder, files)
    merged: dict[KeyPath, Any] = {}
    counts: dict[KeyPath, int] = {}
    for rank, file in sorted(files.items()):
        location = f"{folder.path / file}"
        values = (
            _iter_safetensors_parts(folder, file, rank, item)
            if item.files[rank].serialization == _SAFETENSORS
            else _iter_nested_values(load_rank_file(folder.get_file(file)), location)
        )
        for path, value in values:
            _check_recorded_layout(path, value, item, rank, location)
            counts[path] = counts.get(path, 0) + 1
            _add_rank_value_to(
                merged, path, value, rank, f"{location}: {format_untrusted_value('.'.join(map(str, path)))}"
            )
    for path, groups in item.layouts.items():
        if counts.get(path, 0) != sum(len(ranks) for ranks, _ in groups):
            raise DamagedCheckpointError(
                f"{folder.path}: the ranks whose {name} files contain "
                f"{format_untrusted_value('.'.join(map(str, path)))} differ from the ranks that {_METADATA} "
                "lists"
            )
    return merged


def _check_distinct_files(folder: CheckpointFolder, files: Mapping[int, str]) -> None:
    """Check that no two ranks share a file.

    Raises:
        CheckpointError: If a file is listed twice, possibly under two names, or if a file is missing.
    """
    files_by_identity: dict[object, str] = {}
    for file in files.values():
        other = files_by_identity.setdefault(folder.get_file(file).get_file_identity(), file)
        if other != file or len(set(files.values())) != len(files):
            raise DamagedCheckpointError(
                f"{folder.path / _METADATA}: lists the file {format_untrusted_value(file)} twice"
            )


def _check_recorded_layout(path: KeyPath, value: Any, item: _SavedItem, rank: int, location: str) -> None:
    """Check that a value in a rank's file has the dtype and shape that `metadata.pkl` records.

    Only sharded tensors must be listed in `metadata.pkl`. Other values may be missing from it.

    Args:
        path: Keys that lead to the value within its item. An item is a top-level entry of the state
            dict, such as the model.
        value: Value in the rank's file.
        item: Record of the item in `metadata.pkl`.
        rank: Rank that wrote the file.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If the dtype or shape differs, or if a sharded tensor is not listed.
    """
    layout = _get_layout(item, path, rank)
    if layout is None and isinstance(value, ShardedRecord):
        raise DamagedCheckpointError(
            f"{location}: contains {format_untrusted_value('.'.join(map(str, path)))}, which {_METADATA} "
            "does not list"
        )
    if layout is None or (
        isinstance(value, (ShardedRecord, StoredTensor))
        and (value.dtype, value.shape) == (layout.dtype, layout.shape)
    ):
        return
    description = (
        f"has the dtype {value.dtype} and the shape {list(value.shape)}"
        if isinstance(value, (ShardedRecord, StoredTensor))
        else "is not a tensor"
    )
    raise DamagedCheckpointError(
        f"{location}: {format_untrusted_value('.'.join(map(str, path)))} {description}, but {_METADATA} "
        f"records the dtype {layout.dtype} and the shape {list(layout.shape)}"
    )


def _get_layout(item: _SavedItem, path: KeyPath, rank: int) -> _TensorLayout | None:
    return next((layout for ranks, layout in item.layouts.get(path, ()) if rank in ranks), None)


def _iter_safetensors_parts(
    folder: CheckpointFolder, name: str, rank: int, item: _SavedItem
) -> Iterator[tuple[KeyPath, ShardedRecord]]:
    """Read the parts of sharded tensors in a rank's safetensors file.

    Yields:
        The path of a tensor, and a record of the rank's part. The record contains the position of
        the part in the complete tensor.

    Raises:
        CheckpointError: If the file does not contain exactly the parts that `metadata.pkl` lists,
            or if a part has an unexpected dtype or shape.
    """
    file = folder.get_file(name)
    tensors, _ = read_safetensors_file(file)
    for path in item.layouts:
        layout = _get_layout(item, path, rank)
        if layout is None:
            continue
        part = tensors.pop(".".join(map(str, path)), None)
        location = f"{file.path}: {format_untrusted_value('.'.join(map(str, path)))}"
        if part is None:
            raise DamagedCheckpointError(
                f"{location} is missing from the file, but {_METADATA} lists the tensor"
            )
        offsets, shape = compute_rank_extent(
            layout.shape, layout.mesh_sizes, layout.mesh_ranks, layout.placements, rank, location
        )
        if part.dtype != layout.dtype or part.shape != shape:
            raise DamagedCheckpointError(
                f"{location} has the dtype {part.dtype} and the shape {list(part.shape)}, but {_METADATA} "
                f"records the dtype {layout.dtype} and the shape {list(shape)}"
            )
        yield path, ShardedRecord(PlacedPart.__name__, layout.dtype, layout.shape, PlacedPart(offsets, part))
    if tensors:
        raise DamagedCheckpointError(
            f"{file.path}: contains {format_untrusted_value(next(iter(tensors)))}, which {_METADATA} does "
            "not list"
        )


def _iter_nested_values(content: Any, location: str) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and the value of each leaf in a nested state dict.

    Only dicts are entered. A list is yielded as one value.

    Raises:
        CheckpointError: If the content is not a dict, is nested too deeply, has too many values, or
            has a key that is neither a string nor a small integer.
    """
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{location}: is not a state dict but an object of type {type(content).__name__}; save the "
            "state_dict() of the model"
        )
    remaining_values = MAX_VALUES
    pending: list[tuple[KeyPath, Any]] = [((), content)]
    while pending:
        path, value = pending.pop()
        remaining_values -= 1
        if remaining_values < 0 or len(path) > MAX_CONTAINER_DEPTH:
            raise CheckpointError(
                f"{location}: has more than {MAX_VALUES:,} values or more than {MAX_CONTAINER_DEPTH} levels "
                "of nesting, so it is not a state dict; save the state_dict() of the model"
            )
        if not isinstance(value, dict):
            yield path, value
            continue
        for key, inner in reversed(value.items()):
            if type(key) is not str and (type(key) is not int or abs(key) > MAX_KEY_IN_PATH):
                raise CheckpointError(
                    f"{location}: the key {format_untrusted_value(key)} is neither a string nor an integer "
                    f"from -{MAX_KEY_IN_PATH:,} to {MAX_KEY_IN_PATH:,}; save the state_dict() of the model"
                )
            pending.append(((*path, key), inner))


def _add_rank_value_to(
    merged: dict[KeyPath, Any], path: KeyPath, value: Any, rank: int, location: str
) -> None:
    """Add one value of a rank to the values merged from previous ranks.

    Args:
        merged: Values of the previous ranks. Modified in place.
        path: Keys that lead to the value in the rank's file.
        value: Value of the rank.
        rank: Rank that saved the value.
        location: File and name of the value, used in error messages.

    Raises:
        CheckpointError: If the value is a tensor only on some ranks, or a sharded tensor only on
            some ranks. Also raised if the dtype or shape of a sharded tensor differs between the
            ranks, or if a value is not a tensor and differs.
    """
    previous = merged.get(path)
    if isinstance(value, (ShardedRecord, StoredTensor)):
        if path not in merged:
            previous = merged[path] = (
                RankParts(value, location) if isinstance(value, ShardedRecord) else RankCopies(location)
            )
        if not isinstance(previous, (RankParts, RankCopies)):
            raise DamagedCheckpointError(f"{location} is a tensor only on some ranks")
        previous.add_rank(value, rank)
    elif path not in merged:
        merged[path] = value
    elif isinstance(previous, (RankParts, RankCopies)) or to_json_value(previous) != to_json_value(value):
        raise MixedCheckpointError(f"{location} differs between the ranks")


def _is_merged_tensor(leaf: Any) -> bool:
    """Return whether a value from `_merge_rank_files` is a tensor."""
    return isinstance(leaf, (RankParts, RankCopies))


def _get_first_part(leaf: RankParts | RankCopies) -> StoredTensor | None:
    """Return the first nonempty part of a sharded tensor, if the part is in a `torch.save` file.

    Such a part records its storage and its position in the storage. Two tensors whose first parts
    are the same view of the same storage are tied.

    Returns:
        The part. None if the tensor is not sharded, has no elements, or is stored in safetensors
        files, which do not record storages.
    """
    return (
        leaf.first_part if isinstance(leaf, RankParts) and isinstance(leaf.first_part, StoredTensor) else None
    )


def _to_optimizer_state(leaf: Any) -> Tensor | Scalar | None:
    """Convert a value that was merged from all ranks to an entry of the optimizer state.

    Returns:
        A tensor or a number. None if the value is neither.
    """
    if isinstance(leaf, (RankParts, RankCopies)):
        return leaf.to_tensor()
    return leaf if isinstance(leaf, (int, float)) else None


def _to_plain_value(leaf: Any) -> Any:
    """Convert a tensor that was merged from the files of all ranks to Python numbers.

    Other values are returned unchanged.
    """
    return leaf.to_tensor().tolist() if isinstance(leaf, (RankParts, RankCopies)) else leaf


def _read_step(folder: CheckpointFolder) -> dict[str, int]:
    """Read the training step from the file `step_0.pt` or `step_0.json`.

    Returns:
        `{"step": step}`. Empty if the file is missing or does not contain an integer, or if the JSON
        file is damaged.

    Raises:
        CheckpointError: If `step_0.pt` is damaged.
    """
    name = next((name for name in list_file_names(folder.path) if _STEP.fullmatch(name)), None)
    step = None
    if name is not None and name.endswith(".json"):
        try:
            step = json.loads(read_small_file(folder.path / name))
        except (OSError, ValueError, RecursionError):
            step = None
    elif name is not None:
        step = load_rank_file(folder.get_file(name))
    return {"step": step} if type(step) is int else {}


FORMAT = Format(
    "torch-checkpointing",
    _find_checkpoint_folder,
    _open_torch_checkpointing,
)
