"""Write a checkpoint as torch.distributed.checkpoint (DCP) files, in the form of a save by one rank.

The keys are those of `get_state_dict` (`model.<name>`, `optim.state.<name>.<state>`,
`optim.param_groups.<i>.<key>`), so `torch.distributed.checkpoint.load` reads them at any world size.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.config_and_tokenizer_files import prepare_companions
from portable.converters.errors import CheckpointError
from portable.converters.formats.dcp.reader import read_tensors
from portable.converters.names.tied_weights import OTHER_HEAD, find_implied_ties
from portable.converters.storage.safe_open import read_small_table
from portable.converters.tensors.dtypes import TO_TORCH
from portable.converters.tensors.entry import OutputTensor
from portable.converters.writers.conversion import (
    Choices,
    list_model_entries,
    list_optimizer_entries,
    require_optimizer,
    split_into_shards,
    to_plain_groups,
)
from portable.converters.writers.plan import ConversionPlan, Part, PlannedFile
from portable.converters.writers.torchzip_writer import (
    PickledCall,
    PickledGlobal,
    PickledObject,
    build_size,
    encode_pickle,
    plan_torch_file,
)

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint

Key = tuple[str | int, ...]
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


def plan_dcp(checkpoint: Checkpoint, choices: Choices) -> ConversionPlan:
    """The plan of `--to dcp`: `.metadata` and `__0_<i>.distcp`."""
    paths: dict[str, Key] = {}
    entries: list[OutputTensor] = []

    def add(path: Key, entry: OutputTensor) -> None:
        key = ".".join(map(str, path))
        if key in paths:
            raise CheckpointError(f"{checkpoint.root}: two tensors would be called {key!r}")
        paths[key] = path
        entries.append(OutputTensor(key, entry.dtype, entry.tensor))

    model = list_model_entries(checkpoint, choices.dtype)
    for entry in model:
        add(("model", entry.name), entry)
    values: dict[Key, Any] = {}
    if choices.optimizer:
        optimizer = require_optimizer(checkpoint)
        for name, state_name, entry in list_optimizer_entries(optimizer, checkpoint.root):
            add(("optim", "state", name, state_name), entry)
        for i, group in enumerate(to_plain_groups(optimizer)):
            values |= {("optim", "param_groups", i, state_name): value for state_name, value in group.items()}
    files: list[PlannedFile] = []
    positions: dict[str, _Position] = {}
    paths |= {".".join(map(str, path)): path for path in values}
    small = [(".".join(map(str, path)), value) for path, value in values.items()]
    for i, run in enumerate(split_into_shards(entries, choices.max_shard_size)):
        name, parts, offset = f"__0_{i}.distcp", list[Part](), 0
        for key, value in (*small, *((entry.name, entry) for entry in run)):
            file_parts = plan_torch_file(value)
            length = PlannedFile(name, tuple(file_parts)).nbytes
            positions[key] = _Position(name, offset, length)
            parts += file_parts
            offset += length
        small = []
        files.append(PlannedFile(name, tuple(parts)))
    tensors = {entry.name: entry for entry in entries}
    # A tied parameter has two keys with the same bytes, because `dcp.load` needs all keys of the state dict.
    for alias, owner in {**_find_missing_aliases(checkpoint), **checkpoint.aliases}.items():
        owner_key, key = f"model.{owner}", f"model.{alias}"
        paths[key], positions[key], tensors[key] = ("model", alias), positions[owner_key], tensors[owner_key]
    documents, companions = prepare_companions(checkpoint, model)
    documents = {".metadata": encode_pickle(_build_metadata(tensors, paths, positions)), **documents}
    return ConversionPlan(tuple(files), documents, companions, read_tensors)


def _find_missing_aliases(checkpoint: Checkpoint) -> dict[str, str]:
    """Find the tied parameters that published files leave out, although the model's state dict has them."""
    config = {**read_small_table(checkpoint.companions.get("config.json")), **checkpoint.config}
    ties = find_implied_ties(checkpoint.tensors, checkpoint.aliases, config)
    return {alias: owner for alias, owner in ties.items() if alias != OTHER_HEAD}


def _build_metadata(
    tensors: dict[str, OutputTensor], paths: dict[str, Key], positions: dict[str, _Position]
) -> PickledObject:
    described: dict[str, PickledObject] = {}
    stored: dict[PickledObject, PickledObject] = {}
    for key in paths:
        file, offset, length = positions[key]
        index: dict[str, Any] = {"fqn": key, "index": None}
        if key in tensors:
            described[key] = _build_tensor_metadata(tensors[key])
            index |= {"index": 0, "offset": build_size((0,) * len(tensors[key].tensor.shape))}
        else:
            described[key] = PickledObject(PickledGlobal(_METADATA, "BytesStorageMetadata"), {})
        info = {"relative_path": file, "offset": offset, "length": length}
        stored[PickledObject(PickledGlobal(_METADATA, "MetadataIndex"), index)] = PickledObject(
            PickledGlobal(_FILES, "_StorageInfo"), info
        )
    fields = {
        "state_dict_metadata": described,
        "planner_data": paths,
        "storage_data": stored,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return PickledObject(PickledGlobal(_METADATA, "Metadata"), fields)


def _build_tensor_metadata(entry: OutputTensor) -> PickledObject:
    shape = entry.tensor.shape
    chunk = {"offsets": build_size((0,) * len(shape)), "sizes": build_size(shape)}
    properties = (
        PickledGlobal("torch", TO_TORCH[entry.dtype]),
        PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        PickledCall(PickledGlobal(_METADATA, "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    fields = {
        "properties": PickledObject(PickledGlobal(_METADATA, "TensorProperties"), properties),
        "size": build_size(shape),
        "chunks": [PickledObject(PickledGlobal(_METADATA, "ChunkStorageMetadata"), chunk)],
    }
    return PickledObject(PickledGlobal(_METADATA, "TensorStorageMetadata"), fields)
