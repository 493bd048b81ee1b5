"""Write a checkpoint as safetensors files that `from_pretrained` loads.

For DCP the files are numbered and have an index, their headers hold what torch's
`HuggingFaceStorageWriter` adds, and tied tensors have all their names, as the state of a live model has.
So `HuggingFaceStorageReader` and `from_pretrained` both open the folder. The optimizer's state, which that
format lacks, is written likewise.

Source: https://github.com/huggingface/safetensors ("Format"); the index is transformers' `save_pretrained`'s;
torch/distributed/checkpoint/hf_storage.py, filesystem.py, _hf_utils.py.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from portable.converters.adapters.names import FINGERPRINT
from portable.converters.config_and_tokenizer_files import prepare_companions
from portable.converters.containers.shard_index import ADAPTER, GROUPS, INFO, OFFSETS, OPTIMIZER, SINGLE
from portable.converters.errors import CheckpointError
from portable.converters.limits import MAX_HEADER
from portable.converters.storage.folder import Folder
from portable.converters.storage.output_file import BLOCK_BYTES
from portable.converters.storage.path_or_url import place
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.writers.conversion import (
    Choices,
    carry_out,
    list_model_entries,
    list_optimizer_entries,
    require_optimizer,
    split_into_shards,
    to_plain_groups,
)
from portable.converters.writers.plan import ConversionPlan, PlannedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Unpack

    from portable.converters.adapters.adapter import StoredAdapter
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import Place
    from portable.converters.tensors.entry import OutputTensor
    from portable.converters.tensors.tensor import Tensor
    from portable.converters.writers.conversion import Options


def plan_safetensors(checkpoint: Checkpoint, choices: Choices, *, dcp: bool = False) -> ConversionPlan:
    """The plan of `--to safetensors`; with `dcp`, of `--to dcp-safetensors`."""
    entries = list_model_entries(checkpoint, choices.dtype, aliases=dcp)
    documents, companions = prepare_companions(checkpoint, entries)
    fixed_shards = {} if dcp else _assign_fixed_shards(checkpoint, entries)
    runs = list(fixed_shards.values()) or split_into_shards(entries, choices.max_shard_size)
    if len(runs) == 1 and not dcp:
        files = [_plan_file(SINGLE, runs[0])]
    else:
        names = list(fixed_shards) or [
            f"model-{i:05d}-of-{len(runs):05d}.safetensors" for i in range(1, len(runs) + 1)
        ]
        files = [
            _plan_file(name, run, _build_sharding_metadata(run) if dcp else {})
            for name, run in zip(names, runs, strict=True)
        ]
        shard_of = {entry.name: name for name, run in zip(names, runs, strict=True) for entry in run}
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        documents["model.safetensors.index.json"] = _to_json_bytes(index)
    return _with_optimizer(checkpoint, files, documents, companions, wanted=choices.optimizer)


def _assign_fixed_shards(
    checkpoint: Checkpoint, entries: Iterable[OutputTensor]
) -> dict[str, list[OutputTensor]]:
    """Assign tensors to the output files that the checkpoint specifies.

    Returns:
        Tensors of each file, keyed by file name. Tensors without a specified file are in the last file. Empty
        if the checkpoint does not specify any files.
    """
    names = sorted(set(checkpoint.shards.values()))
    assigned: dict[str, list[OutputTensor]] = {name: [] for name in names}
    for entry in entries if names else ():
        assigned[checkpoint.shards.get(entry.name, names[-1])].append(entry)
    return {name: shard for name, shard in assigned.items() if shard}


plan_dcp_safetensors = partial(plan_safetensors, dcp=True)


def _build_sharding_metadata(entries: Sequence[OutputTensor]) -> dict[str, str]:
    """Where each tensor of a file begins in the whole: at its start."""
    table = {entry.name: {OFFSETS: [0] * len(entry.tensor.shape)} for entry in entries}
    return {INFO: json.dumps(table), "DCP_VERSION": "1.0"}


def plan_adapter(adapter: StoredAdapter, choices: Choices) -> ConversionPlan:
    """The plan of `write_adapter`: one file, whatever `max_shard_size`."""
    checkpoint = adapter.checkpoint
    recorded = adapter.base_fingerprint
    about = {} if recorded is None else {FINGERPRINT: recorded}
    files = [_plan_file(ADAPTER, list_model_entries(checkpoint, choices.dtype), about)]
    return _with_optimizer(
        checkpoint, files, dict(checkpoint.documents), checkpoint.companions, wanted=choices.optimizer
    )


def _with_optimizer(
    checkpoint: Checkpoint,
    files: list[PlannedFile],
    documents: dict[str, bytes],
    companions: Mapping[str, Place],
    *,
    wanted: bool,
) -> ConversionPlan:
    if wanted:
        optimizer = require_optimizer(checkpoint)
        files.append(
            _plan_file(
                OPTIMIZER, [state.entry for state in list_optimizer_entries(optimizer, checkpoint.root)]
            )
        )
        documents[GROUPS] = _to_json_bytes({"param_groups": to_plain_groups(optimizer)})
    names_written = [file.name for file in files]

    def reopen_tensors(folder: Place) -> dict[str, Tensor]:
        from portable.converters.formats.safetensors import read_file

        written = Folder(folder)
        tensors: dict[str, Tensor] = {}
        for name in names_written:
            tensors.update(read_file(written.file(name))[0])
        return tensors

    return ConversionPlan(tuple(files), documents, companions, reopen_tensors)


def write_adapter(
    adapter: StoredAdapter,
    out: str | Place,
    *,
    dtype: str = "keep",
    optimizer: bool = False,
    **options: Unpack[Options],
) -> ConversionPlan:
    """Write an adapter as peft saves it: `adapter_model.safetensors`, `adapter_config.json`, the tokenizer.

    The arguments, and what is raised, are those of `write_checkpoint`.
    """
    choices = Choices(dtype, optimizer=optimizer)
    options.setdefault("expand", True)
    return carry_out(adapter.checkpoint, partial(plan_adapter, adapter, choices), place(out), **options)


def _plan_file(
    name: str, entries: Iterable[OutputTensor], about: Mapping[str, str] | None = None
) -> PlannedFile:
    # Wide dtypes first: readers view the bytes as elements, so tensors must be aligned to their width.
    ordered = sorted(entries, key=lambda entry: -get_itemsize(entry.dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(about or {})}}
    offset = 0
    for entry in ordered:
        if entry.name in header:
            raise CheckpointError(f"{name}: two tensors would be called {entry.name!r}")
        offsets = [offset, offset + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.tensor.shape),
            "data_offsets": offsets,
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * _compute_padding(8 + len(text), ordered)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"{name}: too many tensors for one file; lower --max-shard-size")
    return PlannedFile(name, (len(text).to_bytes(8, "little") + text, *ordered))


def _compute_padding(size: int, entries: Iterable[OutputTensor]) -> int:
    """How many spaces go after a header of `size` bytes, so that as much data as possible can be shared.

    Where files share blocks (XFS, btrfs), data begins at the same place in a block as in the source.
    """
    shared = {-size % 8: 0}
    offset = size
    for entry in entries:
        span = entry.tensor.find_span(located=True) if entry.dtype == entry.tensor.dtype else None
        if span is not None and (spaces := (span.offset - offset) % BLOCK_BYTES) % 8 == -size % 8:
            shared[spaces] = shared.get(spaces, 0) + entry.nbytes
        offset += entry.nbytes
    return max(shared, key=lambda spaces: (shared[spaces], -spaces))


def _to_json_bytes(value: Any) -> bytes:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CheckpointError("the optimizer's groups hold a string that is not valid Unicode") from None
