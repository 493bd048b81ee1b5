"""Write a checkpoint as torch.distributed.checkpoint (DCP) files, in the form of a save by one rank.

The keys are those of `get_state_dict` (`model.<name>`, `optim.state.<name>.<state>`,
`optim.param_groups.<i>.<key>`), so `torch.distributed.checkpoint.load` reads them at any world size.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.containers.pickle_reader import plain
from converters.errors import CheckpointError
from converters.formats.dcp.reader import read_tensors
from converters.storage.path_or_url import place
from converters.tensors.dtypes import TO_TORCH
from converters.writers.config_json import with_dtype
from converters.writers.conversion import (
    Entry,
    Part,
    Plan,
    PlannedFile,
    carry_out,
    model_entries,
    optimizer_entries,
    required_optimizer,
    shards,
)
from converters.writers.targets import Target
from converters.writers.torchzip_writer import Call, Made, Name, pickle, tensor_parts, value_bytes

if TYPE_CHECKING:
    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place

Key = tuple[str | int, ...]
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


def plan_dcp(
    checkpoint: Checkpoint,
    *,
    dtype: str = "keep",
    max_shard_size: int = 5_000_000_000,
    optimizer: bool = False,
) -> Plan:
    """The plan of `write_dcp`, with the same arguments and errors."""
    paths: dict[str, Key] = {}
    entries: list[Entry] = []

    def add(path: Key, entry: Entry) -> None:
        key = ".".join(map(str, path))
        if key in paths:
            raise CheckpointError(f"{checkpoint.root}: two tensors would be called {key!r}")
        paths[key] = path
        entries.append(Entry(key, entry.dtype, entry.tensor))

    model = model_entries(checkpoint, dtype)
    for entry in model:
        add(("model", entry.name), entry)
    values: dict[Key, Any] = {}
    if optimizer:
        found = required_optimizer(checkpoint)
        for name, what, entry in optimizer_entries(found, checkpoint.root):
            add(("optim", "state", name, what), entry)
        for i, group in enumerate(plain(found.param_groups, limit=10_000_000)):
            for what, value in group.items():
                # torch uses a tuple, which `plain` turns into a list.
                values["optim", "param_groups", i, what] = tuple(value) if what == "betas" else value
    files: list[PlannedFile] = []
    positions: dict[str, tuple[str, int, int]] = {}
    for i, run in enumerate(shards(entries, max_shard_size)):
        name, parts, at = f"__0_{i}.distcp", list[Part](), 0
        for path, value in values.items() if i == 0 else ():
            key = ".".join(map(str, path))
            data = value_bytes(value)
            paths[key] = path
            positions[key] = name, at, len(data)
            parts.append(data)
            at += len(data)
        for entry in run:
            made = tensor_parts(entry)
            length = PlannedFile(name, tuple(made)).nbytes
            positions[entry.name] = name, at, length
            parts += made
            at += length
        files.append(PlannedFile(name, tuple(parts)))
    changed, companions = with_dtype(checkpoint.companions, model, checkpoint.config)
    documents = {".metadata": pickle(_metadata(entries, paths, positions)), **changed, **checkpoint.documents}
    return Plan(tuple(files), documents, companions, read_tensors)


def write_dcp(
    checkpoint: Checkpoint,
    out: str | Place,
    *,
    dtype: str = "keep",
    max_shard_size: int = 5_000_000_000,
    optimizer: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    verify: bool = False,
    expand: bool = False,
) -> Plan:
    """Write `out/.metadata` and `out/__0_<i>.distcp`, and the companions.

    Args:
        dtype: keep, float32, bfloat16 or float16 (fp32, bf16, fp16), for floating model tensors of at least
            one dimension.
        max_shard_size: bytes of a `.distcp` file; a tensor larger than that gets a file of its own.
        optimizer: also write the optimizer's state and parameter groups.
        overwrite: replace `out` where it exists.
        progress: show a progress bar if stderr is a terminal.
        verify: read everything back and compare before `out` appears.
        expand: allow an output much larger than the source, where tensors share bytes.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, the disk is full, or the object store is
            unreachable. `out` is then unchanged.
    """

    def make_plan() -> Plan:
        return plan_dcp(checkpoint, dtype=dtype, max_shard_size=max_shard_size, optimizer=optimizer)

    return carry_out(
        checkpoint,
        make_plan,
        place(out),
        overwrite=overwrite,
        progress=progress,
        verify=verify,
        expand=expand,
    )


def _metadata(
    entries: list[Entry], paths: dict[str, Key], positions: dict[str, tuple[str, int, int]]
) -> Made:
    tensors = {entry.name: entry for entry in entries}
    described: dict[str, Made] = {}
    stored: dict[Made, Made] = {}
    for key in paths:
        file, offset, length = positions[key]
        index: dict[str, Any] = {"fqn": key, "index": None}
        if key in tensors:
            described[key] = _tensor(tensors[key])
            index |= {"index": 0, "offset": _size((0,) * len(tensors[key].tensor.shape))}
        else:
            described[key] = Made(Name(_METADATA, "BytesStorageMetadata"), {})
        info = {"relative_path": file, "offset": offset, "length": length}
        stored[Made(Name(_METADATA, "MetadataIndex"), index)] = Made(Name(_FILES, "_StorageInfo"), info)
    fields = {
        "state_dict_metadata": described,
        "planner_data": paths,
        "storage_data": stored,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return Made(Name(_METADATA, "Metadata"), fields)


def _tensor(entry: Entry) -> Made:
    shape = entry.tensor.shape
    chunk = {"offsets": _size((0,) * len(shape)), "sizes": _size(shape)}
    properties = (
        Name("torch", TO_TORCH[entry.dtype]),
        Call(Name("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    fields = {
        "properties": Made(Name(_METADATA, "TensorProperties"), properties),
        "size": _size(shape),
        "chunks": [Made(Name(_METADATA, "ChunkStorageMetadata"), chunk)],
    }
    return Made(Name(_METADATA, "TensorStorageMetadata"), fields)


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (shape,))


TARGET = Target(plan_dcp, "`torch.distributed.checkpoint.load`, at any world size")
