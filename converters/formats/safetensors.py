"""Read checkpoints in safetensors format: one file, or numbered shards with an index.

The index is `model.safetensors.index.json`, or another file whose name ends with
`.safetensors.index.json`. The format has no checksum, so this reader can check lengths, offsets,
overlaps and the index, but not the values.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Aliases, Checkpoint, OptimizerState, Scalar
from portable.converters.config_and_tokenizer_files import (
    check_single_model,
    find_companions,
    read_trainer_metadata,
)
from portable.converters.containers.shard_index import (
    ADAPTER_FILE_NAME,
    INDEX_FILE_NAME,
    OPTIMIZER_FILE_NAME,
    OPTIMIZER_GROUPS_FILE_NAME,
    SINGLE_FILE_NAME,
    read_indexed_shards,
)
from portable.converters.errors import CheckpointError, DamagedCheckpointError, prefix_checkpoint_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.torch_save.optimizer import check_state_shapes
from portable.converters.formats.torch_save.reader import deduplicate_tied_names, open_optimizer_file
from portable.converters.limits import MAX_HEADER
from portable.converters.names.canonical import split_state_key, strip_common_prefixes
from portable.converters.names.module_order import sort_in_module_order
from portable.converters.storage.byte_sources import parse_json, read_json_object
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names, list_file_names
from portable.converters.tensors.dtypes import SUPPORTED_DTYPES, get_itemsize
from portable.converters.tensors.tensor import Tensor, is_shape

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import CheckpointFile


def _find_model_file(source: CheckpointPath) -> str | None:
    """Find the safetensors file to open, or the index that lists several such files.

    In a folder, the first of these files is selected:

    1. `model.safetensors.index.json`
    2. `model.safetensors`
    3. The only other index
    4. The only other .safetensors file

    Hidden files and files of the optimizer do not count.

    Returns:
        The file name. None if `source` is a file of another type, or if the folder has no such
        file. A folder with several other .safetensors files needs an index.
    """
    path = source.path
    if path.is_file():
        is_named = path.name.endswith((".safetensors", ".safetensors.index.json"))
        return path.name if is_named else None
    for name in (INDEX_FILE_NAME, SINGLE_FILE_NAME):
        if (path / name).is_file():
            return name
    entries = list_file_names(path)
    for suffix in (".safetensors.index.json", ".safetensors"):
        candidates = [
            name for name in entries if name.endswith(suffix) and not name.startswith((".", "optimizer."))
        ]
        if len(candidates) == 1:
            return candidates[0]
    return None


def _explain_incomplete(source: CheckpointPath) -> str | None:
    """Return an error message if a folder has several .safetensors files but no index.

    The function does not search for an index. It is only called if `_find_model_file` has found no
    file to open.

    Returns:
        The message as one line. None for any other path.
    """
    if (
        source.path.is_dir()
        and sum(name.endswith(".safetensors") for name in list_entry_names(source.path)) > 1
    ):
        return (
            f"{source.path}: contains several .safetensors files, but no {INDEX_FILE_NAME}; specify "
            f"one of the files, or add {INDEX_FILE_NAME}"
        )
    return None


def _open_safetensors_checkpoint(source: CheckpointPath, name: str) -> Checkpoint:
    """Open a safetensors file, or the files that an index lists, as a checkpoint.

    If the folder also contains an optimizer state, in `optimizer.safetensors`, `optimizer.pt` or
    `optimizer.bin`, the checkpoint includes it. The state is ignored if the model's file does not
    have a standard name such as `model.safetensors`.

    Args:
        source: Path that the user specified, with options. It is the file or its folder.
        name: Name of the safetensors file or of the index, which ends in `.index.json`.

    Raises:
        CheckpointError: If a file is missing or damaged, or if the folder contains several models.
    """
    root = source.path if source.path.is_dir() else source.path.parent
    folder = CheckpointFolder(root)
    if source.path.is_dir():
        check_single_model(root, name)
    header_metadata: dict[str, str] = {}
    headers: dict[str, dict[str, str]] = {}
    if name.endswith(".index.json"):

        def read_shard(file: CheckpointFile) -> dict[str, Tensor]:
            tensors, metadata = read_safetensors_file(file)
            headers[file.name] = metadata
            return tensors

        tensors = read_indexed_shards(folder, name, read_shard)
        for shard_name in sorted(headers):
            header_metadata |= headers[shard_name]
    else:
        tensors, header_metadata = read_safetensors_file(folder.get_file(name))
    plain = strip_common_prefixes(tensors, location=str(source.path))
    companions = find_companions(source.path)

    def open_optimizer(aliases: Aliases) -> OptimizerState | None:
        if name not in (SINGLE_FILE_NAME, INDEX_FILE_NAME, ADAPTER_FILE_NAME):
            return None
        if (folder.path / OPTIMIZER_FILE_NAME).is_file():
            return _read_safetensors_optimizer(folder, plain)
        # transformers' Trainer and Accelerate write the optimizer to a torch.save file, so look for one.
        ordered_names = [name for name in source.parameter_order if name in plain]
        order = ordered_names or sort_in_module_order(plain, companions.get("config.json"))
        return open_optimizer_file(folder, plain, lambda: order and deduplicate_tied_names(order, aliases))

    return Checkpoint(
        format="safetensors",
        root=source.path,
        tensors=plain,
        optimizer=open_optimizer,
        metadata={**({"header": header_metadata} if header_metadata else {}), **read_trainer_metadata(root)},
        companions=companions,
    )


def _read_safetensors_optimizer(folder: CheckpointFolder, tensors: dict[str, Tensor]) -> OptimizerState:
    """Read the optimizer state that `portable-convert --optimizer` writes to the folder of the model.

    The state is in `optimizer.safetensors`, and the parameter groups are in `optimizer.json`.

    Args:
        folder: Folder of the model.
        tensors: Tensors of the model, keyed by name.

    Raises:
        CheckpointError: If a file is missing or damaged, if a state does not belong to a tensor of the
            model or to a parameter group, or if its shape differs from the shape of its parameter.
    """
    stored, _ = read_safetensors_file(folder.get_file(OPTIMIZER_FILE_NAME))
    state: dict[str, dict[str, Tensor | Scalar]] = {}
    for key, tensor in stored.items():
        parameter, state_name = split_state_key(key, tensors)
        if parameter not in tensors:
            raise DamagedCheckpointError(
                f"{folder.path / OPTIMIZER_FILE_NAME}: {key!r} does not belong to a tensor of the model"
            )
        state.setdefault(parameter, {})[state_name] = tensor
    for parameter, values in state.items():
        check_state_shapes(parameter, values, tensors, str(folder.path / OPTIMIZER_FILE_NAME))
    file = folder.get_file(OPTIMIZER_GROUPS_FILE_NAME)
    groups = read_json_object(file).get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DamagedCheckpointError(f"{file.path}: has no valid param_groups")
    parameter_names = [group.get("params", []) for group in groups]
    if not all(isinstance(names, list) for names in parameter_names):
        raise DamagedCheckpointError(f"{file.path}: the params of a parameter group are not a list")
    grouped = {name for names in parameter_names for name in names if isinstance(name, str)}
    if not state.keys() <= grouped:
        raise DamagedCheckpointError(
            f"{file.path}: param_groups does not list every parameter that has a state in "
            f"{OPTIMIZER_FILE_NAME}"
        )
    return OptimizerState(state, groups)


class SafetensorsContent(NamedTuple):
    """Content of a safetensors file.

    Attributes:
        tensors: Lazy tensors, keyed by name.
        metadata: Strings in `__metadata__` of the header. Empty if it is not a dict of strings.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_safetensors_file(file: CheckpointFile) -> SafetensorsContent:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: If the file is truncated, if the header is damaged or contains an unsupported
            dtype, or if the offsets leave gaps, overlap, or do not fit the shapes.
    """
    if file.nbytes < 8:
        raise DamagedCheckpointError(f"{file.path}: is truncated or not a safetensors file")
    length = int.from_bytes(file.read_bytes(0, 8), "little")
    if length > MAX_HEADER or 8 + length > file.nbytes:
        raise DamagedCheckpointError(
            f"{file.path}: is truncated or not a safetensors file (the header would have {length} bytes)"
        )
    header = parse_json(file.path, file.read_bytes(8, length))
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"{file.path}: the header is not a dict of tensors")
    metadata = header.pop("__metadata__", {})
    data_start = 8 + length
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    with prefix_checkpoint_errors(file.path):
        for name, entry in header.items():
            dtype, shape, start, end = _parse_header_entry(name, entry)
            if end - start != prod(shape) * get_itemsize(dtype):
                raise DamagedCheckpointError(
                    f"{name!r} has {end - start:,} bytes, but the dtype {dtype} and the shape {shape} need "
                    f"{prod(shape) * get_itemsize(dtype):,} bytes"
                )
            if data_start + end > file.nbytes:
                raise DamagedCheckpointError(
                    f"truncated or damaged: {name!r} would end at byte {data_start + end:,}, but the file "
                    f"has {file.nbytes:,} bytes"
                )
            span = file.get_span(data_start + start, end - start, description=repr(name))
            tensors[name] = Tensor.from_source(name, dtype, shape, span)
            spans.append((start, end, name))
    spans.sort()
    bounds = [(0, 0, ""), *spans, (file.nbytes - data_start, file.nbytes - data_start, "")]
    for (_, stop, previous_name), (start, _, _) in pairwise(bounds):
        if stop != start:
            description = f"after {previous_name!r}" if previous_name else "after the header"
            why = "unused bytes" if stop < start else "overlapping tensors"
            raise DamagedCheckpointError(f"{file.path}: truncated or damaged: there are {why} {description}")
    plain = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    return SafetensorsContent(tensors, metadata if plain else {})


class _HeaderEntry(NamedTuple):
    """Header entry of a tensor.

    Attributes:
        dtype: Safetensors dtype.
        shape: Shape of the tensor.
        start: First byte of the tensor, counted from the end of the header.
        stop: End of the tensor, exclusive, counted from the end of the header.
    """

    dtype: str
    shape: list[int]
    start: int
    stop: int


def _parse_header_entry(name: str, entry: Any) -> _HeaderEntry:
    """Parse the header entry of a tensor.

    Raises:
        CheckpointError: If the entry is damaged or has an unsupported dtype.
    """
    try:
        dtype, shape, (low, high) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_valid = type(dtype) is str and type(shape) is list and 0 <= low <= high
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid or not is_shape(shape) or not is_shape((low, high)):
        raise DamagedCheckpointError(
            f"damaged: the header entry of {name!r} has no valid dtype, shape or data_offsets"
        )
    if dtype not in SUPPORTED_DTYPES:
        raise CheckpointError(
            f"{name!r} has the dtype {dtype[:20]!r}, which is not supported; save the tensor with another "
            "dtype"
        )
    return _HeaderEntry(dtype, list(shape), low, high)


FORMAT = Format(
    "safetensors",
    _find_model_file,
    _open_safetensors_checkpoint,
    _explain_incomplete,
)
