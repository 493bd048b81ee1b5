"""Write torch.distributed.checkpoint (DCP) files with the layout of a single-rank save.

The files have the keys of `get_state_dict` (`model.<name>`, `optim.state.<name>.<state>`,
`optim.param_groups.<i>.<key>`), so `torch.distributed.checkpoint.load` reads them at any world
size.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.config_and_tokenizer_files import plan_companion_files
from portable.converters.errors import CheckpointError
from portable.converters.formats.dcp.reader import open_tensors
from portable.converters.names.tied_weights import UNNAMED_HEAD, find_implied_ties
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.dtypes import TO_TORCH
from portable.converters.tensors.entry import OutputTensor
from portable.converters.writers.conversion import (
    ContentOptions,
    convert_param_groups_to_plain,
    list_model_entries,
    list_optimizer_entries,
    require_optimizer_state,
    split_into_shards,
)
from portable.converters.writers.plan import ConversionPlan, FilePart, PlannedFile
from portable.converters.writers.torchzip_writer import (
    PickledCall,
    PickledGlobal,
    PickledObject,
    build_torch_size,
    encode_pickle,
    plan_torch_file,
)

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint

KeyPath = tuple[str | int, ...]
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class _Position(NamedTuple):
    """Position of an item in the shard files.

    Attributes:
        file: Name of the file.
        offset: First byte of the item in the file.
        length: Size of the item in bytes.
    """

    file: str
    offset: int
    length: int


def plan_dcp(checkpoint: Checkpoint, choices: ContentOptions) -> ConversionPlan:
    """Plan the output of `--to dcp`: `.metadata` and the shard files `__0_<i>.distcp`.

    Tied parameters have several keys in `.metadata`, which refer to the same bytes.

    Args:
        checkpoint: Checkpoint to convert.
        choices: Options for the content of the output.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the checkpoint has no tensors, if the requested optimizer state is
            missing, or if two tensors have the same key.
    """
    paths: dict[str, KeyPath] = {}
    entries: list[OutputTensor] = []

    def add_entry(key_path: KeyPath, entry: OutputTensor) -> None:
        key = ".".join(map(str, key_path))
        if key in paths:
            raise CheckpointError(
                f"{checkpoint.root}: two tensors would have the name {key!r} in the output; rename one of "
                "the tensors in the checkpoint"
            )
        paths[key] = key_path
        entries.append(OutputTensor(key, entry.dtype, entry.tensor))

    model = list_model_entries(checkpoint, choices.dtype)
    for entry in model:
        add_entry(("model", entry.name), entry)
    values: dict[KeyPath, Any] = {}
    if choices.optimizer:
        optimizer = require_optimizer_state(checkpoint)
        for name, state_name, entry in list_optimizer_entries(optimizer, checkpoint.root):
            add_entry(("optim", "state", name, state_name), entry)
        for group_index, group in enumerate(convert_param_groups_to_plain(optimizer)):
            values |= {
                ("optim", "param_groups", group_index, group_key): value for group_key, value in group.items()
            }
    files: list[PlannedFile] = []
    positions: dict[str, _Position] = {}
    paths |= {".".join(map(str, path)): path for path in values}
    remaining_values = [(".".join(map(str, path)), value) for path, value in values.items()]
    for shard_index, shard_entries in enumerate(split_into_shards(entries, choices.max_shard_size)):
        name, parts, offset = f"__0_{shard_index}.distcp", list[FilePart](), 0
        for key, value in (*remaining_values, *((entry.name, entry) for entry in shard_entries)):
            file_parts = plan_torch_file(value)
            length = PlannedFile(name, tuple(file_parts)).nbytes
            positions[key] = _Position(name, offset, length)
            parts += file_parts
            offset += length
        remaining_values = []
        files.append(PlannedFile(name, tuple(parts)))
    tensors = {entry.name: entry for entry in entries}
    # A tied parameter has two keys that refer to the same bytes, because `dcp.load` needs all keys.
    for alias, owner in {**_find_unpublished_aliases(checkpoint), **checkpoint.aliases}.items():
        owner_key, key = f"model.{owner}", f"model.{alias}"
        paths[key], positions[key], tensors[key] = ("model", alias), positions[owner_key], tensors[owner_key]
    documents, companions = plan_companion_files(checkpoint, model)
    documents = {".metadata": encode_pickle(_build_dcp_metadata(tensors, paths, positions)), **documents}
    return ConversionPlan(tuple(files), documents, companions, open_tensors)


def _find_unpublished_aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Find the tied parameters in the model's state dict that published files omit.

    The output heads of encoders such as BERT are skipped, because their names are unknown.

    Returns:
        Mapping from each alias to the name of its tensor.
    """
    config = {**read_json_object_or_empty(checkpoint.companions.get("config.json")), **checkpoint.config}
    ties = find_implied_ties(checkpoint.tensors, checkpoint.aliases, config)
    return {alias: owner for alias, owner in ties.items() if alias != UNNAMED_HEAD}


def _build_dcp_metadata(
    tensors: dict[str, OutputTensor], paths: dict[str, KeyPath], positions: dict[str, _Position]
) -> PickledObject:
    """Build the content of `.metadata`.

    Args:
        tensors: Tensors, keyed by flattened key.
        paths: Path of each item in the nested state dict: its dict keys and list indices. Keyed by
            flattened key. Includes items that are not tensors.
        positions: Position of each item in the shard files, keyed by flattened key.
    """
    tensor_metadata: dict[str, PickledObject] = {}
    storage_data: dict[PickledObject, PickledObject] = {}
    for key in paths:
        file, offset, length = positions[key]
        index: dict[str, Any] = {"fqn": key, "index": None}
        if key in tensors:
            tensor_metadata[key] = _build_tensor_metadata(tensors[key])
            index |= {"index": 0, "offset": build_torch_size((0,) * len(tensors[key].tensor.shape))}
        else:
            tensor_metadata[key] = PickledObject(PickledGlobal(_METADATA, "BytesStorageMetadata"), {})
        info = {"relative_path": file, "offset": offset, "length": length}
        storage_data[PickledObject(PickledGlobal(_METADATA, "MetadataIndex"), index)] = PickledObject(
            PickledGlobal(_FILES, "_StorageInfo"), info
        )
    fields = {
        "state_dict_metadata": tensor_metadata,
        "planner_data": paths,
        "storage_data": storage_data,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return PickledObject(PickledGlobal(_METADATA, "Metadata"), fields)


def _build_tensor_metadata(entry: OutputTensor) -> PickledObject:
    """Build the metadata of an unsharded tensor."""
    shape = entry.tensor.shape
    chunk = {"offsets": build_torch_size((0,) * len(shape)), "sizes": build_torch_size(shape)}
    properties = (
        PickledGlobal("torch", TO_TORCH[entry.dtype]),
        PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        PickledCall(PickledGlobal(_METADATA, "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    fields = {
        "properties": PickledObject(PickledGlobal(_METADATA, "TensorProperties"), properties),
        "size": build_torch_size(shape),
        "chunks": [PickledObject(PickledGlobal(_METADATA, "ChunkStorageMetadata"), chunk)],
    }
    return PickledObject(PickledGlobal(_METADATA, "TensorStorageMetadata"), fields)
