"""Write safetensors files for `from_pretrained`.

For `--to dcp-safetensors`, the files are numbered and have an index, and their headers contain the
metadata of torch's `HuggingFaceStorageWriter`. Tied tensors are written under all of their names,
as in a model's state dict. Both `HuggingFaceStorageReader` and `from_pretrained` can therefore open
the folder. The optimizer state is written as in other safetensors outputs, because torch's format
does not support it.

Source: https://github.com/huggingface/safetensors ("Format"); `save_pretrained` of transformers for
the index; torch/distributed/checkpoint/hf_storage.py, filesystem.py, _hf_utils.py.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from portable.converters.adapters.names import FINGERPRINT_KEY
from portable.converters.config_and_tokenizer_files import plan_companion_files
from portable.converters.containers.shard_index import (
    ADAPTER_FILE_NAME,
    DCP_INFO_KEY,
    DCP_OFFSETS_KEY,
    OPTIMIZER_FILE_NAME,
    OPTIMIZER_GROUPS_FILE_NAME,
    SINGLE_FILE_NAME,
)
from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.limits import MAX_HEADER
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.output_file import BLOCK_BYTES
from portable.converters.storage.path_or_url import parse_path_or_url
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.writers.conversion import (
    ContentOptions,
    convert_param_groups_to_plain,
    list_model_entries,
    list_optimizer_entries,
    require_optimizer_state,
    split_into_shards,
    write_plan_atomically,
)
from portable.converters.writers.plan import ConversionPlan, PlannedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Unpack

    from portable.converters.adapters.adapter import StoredAdapter
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.entry import OutputTensor
    from portable.converters.tensors.tensor import Tensor
    from portable.converters.writers.conversion import Options


def plan_safetensors(checkpoint: Checkpoint, choices: ContentOptions, *, dcp: bool = False) -> ConversionPlan:
    """Plan the output of `--to safetensors` or `--to dcp-safetensors`.

    If the checkpoint specifies the file of each tensor, these files are kept and `max_shard_size`
    is ignored. This does not apply to `dcp-safetensors`.

    Args:
        checkpoint: Checkpoint to convert.
        choices: Options for the content of the output.
        dcp: Whether to plan the output of `--to dcp-safetensors`. This output contains tied tensors
            under all of their names, and always has numbered files and an index.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the checkpoint has no tensors, if the requested optimizer state is
            missing, or if an option or a tensor name is not valid.
    """
    entries = list_model_entries(checkpoint, choices.dtype, aliases=dcp)
    documents, companions = plan_companion_files(checkpoint, entries)
    fixed_shards = {} if dcp else _assign_tensors_to_shards(checkpoint, entries)
    shards = list(fixed_shards.values()) or split_into_shards(entries, choices.max_shard_size)
    if len(shards) == 1 and not dcp:
        files = [_plan_safetensors_file(SINGLE_FILE_NAME, shards[0])]
    else:
        names = list(fixed_shards) or [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
        files = [
            _plan_safetensors_file(name, shard, _build_dcp_header_metadata(shard) if dcp else {})
            for name, shard in zip(names, shards, strict=True)
        ]
        shard_of = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        documents["model.safetensors.index.json"] = _encode_json(index)
    return _build_plan_with_optimizer(
        checkpoint, files, documents, companions, includes_optimizer=choices.optimizer
    )


def _assign_tensors_to_shards(
    checkpoint: Checkpoint, entries: Iterable[OutputTensor]
) -> dict[str, list[OutputTensor]]:
    """Assign tensors to the output files that the checkpoint specifies.

    Returns:
        Tensors in each file, keyed by file name. Tensors without a specified file are assigned to the
        last file. Empty if the checkpoint does not specify any files.
    """
    names = sorted(set(checkpoint.shards.values()))
    assigned: dict[str, list[OutputTensor]] = {name: [] for name in names}
    for entry in entries if names else ():
        assigned[checkpoint.shards.get(entry.name, names[-1])].append(entry)
    return {name: shard for name, shard in assigned.items() if shard}


plan_dcp_safetensors = partial(plan_safetensors, dcp=True)


def _build_dcp_header_metadata(entries: Sequence[OutputTensor]) -> dict[str, str]:
    """Build the header metadata that torch's `HuggingFaceStorageWriter` writes.

    The metadata contains the offsets of each stored tensor in the unsharded tensor. All offsets are 0,
    because the tensors are not sharded.
    """
    table = {entry.name: {DCP_OFFSETS_KEY: [0] * len(entry.tensor.shape)} for entry in entries}
    return {DCP_INFO_KEY: json.dumps(table), "DCP_VERSION": "1.0"}


def plan_adapter(adapter: StoredAdapter, choices: ContentOptions) -> ConversionPlan:
    """Plan the output of `write_adapter`: one file with all weights, regardless of `max_shard_size`.

    Args:
        adapter: Adapter to write.
        choices: Options for the content of the output.
    """
    checkpoint = adapter.checkpoint
    fingerprint = adapter.base_fingerprint
    header_metadata = {} if fingerprint is None else {FINGERPRINT_KEY: fingerprint}
    files = [
        _plan_safetensors_file(
            ADAPTER_FILE_NAME, list_model_entries(checkpoint, choices.dtype), header_metadata
        )
    ]
    return _build_plan_with_optimizer(
        checkpoint,
        files,
        dict(checkpoint.documents),
        checkpoint.companions,
        includes_optimizer=choices.optimizer,
    )


def _build_plan_with_optimizer(
    checkpoint: Checkpoint,
    files: list[PlannedFile],
    documents: dict[str, bytes],
    companions: Mapping[str, AnyPath],
    *,
    includes_optimizer: bool,
) -> ConversionPlan:
    """Build a plan from model files and, if requested, the checkpoint's optimizer state.

    Args:
        checkpoint: Checkpoint to convert.
        files: Planned model files. The optimizer state file is appended in place.
        documents: Contents of other small files, keyed by file name. The file with the parameter groups
            is added in place.
        companions: Paths of the companion files to copy, keyed by file name.
        includes_optimizer: Whether to write the optimizer state.
    """
    if includes_optimizer:
        optimizer = require_optimizer_state(checkpoint)
        files.append(
            _plan_safetensors_file(
                OPTIMIZER_FILE_NAME,
                [state.entry for state in list_optimizer_entries(optimizer, checkpoint.root)],
            )
        )
        documents[OPTIMIZER_GROUPS_FILE_NAME] = _encode_json(
            {"param_groups": convert_param_groups_to_plain(optimizer)}
        )
    names_written = [file.name for file in files]

    def reopen_tensors(folder: AnyPath) -> dict[str, Tensor]:
        from portable.converters.formats.safetensors import read_safetensors_file

        written = CheckpointFolder(folder)
        tensors: dict[str, Tensor] = {}
        for name in names_written:
            tensors.update(read_safetensors_file(written.get_file(name))[0])
        return tensors

    return ConversionPlan(tuple(files), documents, companions, reopen_tensors)


def write_adapter(
    adapter: StoredAdapter,
    out: str | AnyPath,
    *,
    dtype: str = "keep",
    optimizer: bool = False,
    **options: Unpack[Options],
) -> ConversionPlan:
    """Write an adapter in the format of peft.

    The output contains `adapter_model.safetensors`, `adapter_config.json`, and the tokenizer files.

    Args:
        adapter: Adapter to write.
        out: Path or URL of the output folder.
        dtype: Target dtype of the weights. See `ContentOptions`.
        optimizer: Whether to also write the optimizer state. See `ContentOptions`.
        **options: Additional options. See `Options`. The option `expand`, which allows an output
            that is much larger than the source, is True unless the caller sets it.

    Returns:
        The plan of the files that were written.

    Raises:
        CheckpointError: If the adapter cannot be written. See `write_checkpoint`.
    """
    choices = ContentOptions(dtype, optimizer=optimizer)
    options.setdefault("expand", True)
    return write_plan_atomically(
        adapter.checkpoint, partial(plan_adapter, adapter, choices), parse_path_or_url(out), **options
    )


def _plan_safetensors_file(
    name: str, entries: Iterable[OutputTensor], header_metadata: Mapping[str, str] | None = None
) -> PlannedFile:
    """Plan a single safetensors file.

    The tensors are sorted by the size of their dtypes, in descending order. Each tensor is
    therefore aligned to the size of its elements.

    Raises:
        CheckpointError: If two tensors have the same name, or if the header is too long.
    """
    # Write wide dtypes first, because readers view the bytes as elements, which must be aligned.
    ordered = sorted(entries, key=lambda entry: -get_itemsize(entry.dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(header_metadata or {})}}
    offset = 0
    for entry in ordered:
        if entry.name in header:
            raise CheckpointError(
                f"{name}: two tensors would have the name {entry.name!r} in the output; rename one of the "
                "tensors in the checkpoint"
            )
        offsets = [offset, offset + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.tensor.shape),
            "data_offsets": offsets,
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * _compute_header_padding(8 + len(text), ordered)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"{name}: there are too many tensors for one file (the header would have {len(text):,} bytes, "
            f"at most {MAX_HEADER:,} are allowed); lower --max-shard-size"
        )
    return PlannedFile(name, (len(text).to_bytes(8, "little") + text, *ordered))


def _compute_header_padding(header_nbytes: int, entries: Iterable[OutputTensor]) -> int:
    """Compute the header padding in bytes that lets a file share disk blocks with its source.

    The tensors are copied from source files. If two files contain the same data, some file systems
    (XFS, btrfs) can store the data only once. This requires that the data has the same offset
    within a block in both files. The padding is chosen so that this is true for most of the tensor
    data. It also aligns the end of the header to 8 bytes.

    Args:
        header_nbytes: Size of the header without padding, in bytes.
        entries: Tensors of the file, in order.
    """
    shared_bytes_by_padding = {-header_nbytes % 8: 0}
    offset = header_nbytes
    for entry in entries:
        span = entry.tensor.find_span(located=True) if entry.dtype == entry.tensor.dtype else None
        if span is not None and (spaces := (span.offset - offset) % BLOCK_BYTES) % 8 == -header_nbytes % 8:
            shared_bytes_by_padding[spaces] = shared_bytes_by_padding.get(spaces, 0) + entry.nbytes
        offset += entry.nbytes
    return max(shared_bytes_by_padding, key=lambda spaces: (shared_bytes_by_padding[spaces], -spaces))


def _encode_json(value: Any) -> bytes:
    """Encode a value as indented JSON.

    Raises:
        OptimizerStateError: If a string is not valid Unicode. The message is about the optimizer's
            parameter groups, because the names of tensors have already been checked.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise OptimizerStateError(
            "the parameter groups of the optimizer contain a string that is not valid Unicode"
        ) from None
