"""safetensors: one file, or numbered shards with `model.safetensors.index.json`.

The format has no checksum: lengths, offsets, overlaps and the index are checked, values cannot be.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Aliases, Checkpoint, OptimizerState, Scalar
from portable.converters.config_and_tokenizer_files import (
    check_one_model,
    find_companions,
    read_trainer_metadata,
)
from portable.converters.containers.shard_index import ADAPTER, GROUPS, INDEX, OPTIMIZER, SINGLE, read_index
from portable.converters.errors import CheckpointError, prefix_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.torch_save.reader import drop_aliases, open_optimizer_file
from portable.converters.limits import MAX_HEADER
from portable.converters.names.canonical import split_state_key, strip_prefixes
from portable.converters.names.module_order import sort_by_module
from portable.converters.storage.byte_sources import read_json, read_table
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import files_in, names_in
from portable.converters.tensors.dtypes import SUPPORTED, get_itemsize
from portable.converters.tensors.tensor import Tensor, is_shape

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import SourceFile


def _find(source: CheckpointPath) -> str | None:
    """The index, `model.safetensors`, or the only .safetensors file."""
    path = source.path
    if path.is_file():
        is_named = path.name.endswith((".safetensors", ".safetensors.index.json"))
        return path.name if is_named else None
    for name in (INDEX, SINGLE):
        if (path / name).is_file():
            return name
    entries = files_in(path)
    for suffix in (".safetensors.index.json", ".safetensors"):
        candidates = [
            name for name in entries if name.endswith(suffix) and not name.startswith((".", "optimizer."))
        ]
        if len(candidates) == 1:
            return candidates[0]
    return None


def _explain_incomplete(source: CheckpointPath) -> str | None:
    if source.path.is_dir() and sum(name.endswith(".safetensors") for name in names_in(source.path)) > 1:
        return f"{source.path}: several .safetensors files and no {INDEX}; give one of them, or add it"
    return None


def _open(source: CheckpointPath, name: str) -> Checkpoint:
    root = source.path if source.path.is_dir() else source.path.parent
    folder = Folder(root)
    if source.path.is_dir():
        check_one_model(root, name)
    extra: dict[str, str] = {}
    headers: dict[str, dict[str, str]] = {}
    if name.endswith(".index.json"):

        def read_shard(file: SourceFile) -> dict[str, Tensor]:
            tensors, metadata = read_file(file)
            headers[file.name] = metadata
            return tensors

        tensors = read_index(folder, name, read_shard)
        for shard_name in sorted(headers):
            extra |= headers[shard_name]
    else:
        tensors, extra = read_file(folder.file(name))
    plain = strip_prefixes(tensors, location=str(source.path))
    companions = find_companions(source.path)

    def open_optimizer(aliases: Aliases) -> OptimizerState | None:
        if name not in (SINGLE, INDEX, ADAPTER):
            return None
        if (folder.path / OPTIMIZER).is_file():
            return _read_optimizer(folder, plain)
        # The Trainer's and Accelerate's plain checkpoints.
        ordered_names = [name for name in source.order if name in plain]
        order = ordered_names or sort_by_module(plain, companions.get("config.json"))
        return open_optimizer_file(folder, plain, lambda: order and drop_aliases(order, aliases))

    return Checkpoint(
        format="safetensors",
        root=source.path,
        tensors=plain,
        optimizer=open_optimizer,
        metadata={**({"header": extra} if extra else {}), **read_trainer_metadata(root)},
        companions=companions,
    )


def _read_optimizer(folder: Folder, tensors: dict[str, Tensor]) -> OptimizerState:
    """The optimizer state that `portable-convert --optimizer` writes beside the model."""
    stored, _ = read_file(folder.file(OPTIMIZER))
    state: dict[str, dict[str, Tensor | Scalar]] = {}
    for key, tensor in stored.items():
        parameter, state_name = split_state_key(key, tensors)
        if parameter not in tensors:
            raise CheckpointError(
                f"{folder.path / OPTIMIZER}: {key!r} does not belong to a tensor of the model"
            )
        state.setdefault(parameter, {})[state_name] = tensor
    file = folder.file(GROUPS)
    groups = read_table(file).get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{file.path}: holds no param_groups")
    parameter_names = [group.get("params", []) for group in groups]
    if not all(isinstance(names, list) for names in parameter_names):
        raise CheckpointError(f"{file.path}: its param_groups do not list their parameters")
    grouped = {name for names in parameter_names for name in names if isinstance(name, str)}
    if not state.keys() <= grouped:
        raise CheckpointError(f"{file.path}: does not name every parameter with state in {OPTIMIZER}")
    return OptimizerState(state, groups)


class SafetensorsContent(NamedTuple):
    """Content of one safetensors file.

    Attributes:
        tensors: Tensors by name, read when their values are needed.
        metadata: Strings of the header's `__metadata__`; empty if it has another form.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_file(file: SourceFile) -> SafetensorsContent:
    """Read the header of one file.

    Raises:
        CheckpointError: truncated, or the offsets leave gaps, overlap or do not fit the shapes.
    """
    if file.nbytes < 8:
        raise CheckpointError(f"{file.path}: truncated, not a safetensors file")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER or 8 + length > file.nbytes:
        raise CheckpointError(
            f"{file.path}: truncated or not a safetensors file (a header of {length} bytes)"
        )
    header = read_json(file.path, file.read(8, length))
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: the header is not a table of tensors")
    extra = header.pop("__metadata__", {})
    start = 8 + length
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    with prefix_errors(file.path):
        for name, entry in header.items():
            dtype, shape, low, high = _read_entry(name, entry)
            if high - low != prod(shape) * get_itemsize(dtype):
                raise CheckpointError(f"{name!r} has {high - low} bytes for {dtype} {shape}")
            if start + high > file.nbytes:
                location = f"byte {start + high} of {file.nbytes}"
                raise CheckpointError(f"truncated or damaged, {name!r} would end at {location}")
            span = file.span(start + low, high - low, what=repr(name))
            tensors[name] = Tensor.from_source(name, dtype, shape, span)
            spans.append((low, high, name))
    spans.sort()
    bounds = [(0, 0, ""), *spans, (file.nbytes - start, file.nbytes - start, "")]
    for (_, stop, left), (low, _, right) in pairwise(bounds):
        if stop != low:
            description = f"after {left!r}" if left else f"before {right!r}"
            why = "unused bytes" if stop < low else "overlapping tensors"
            raise CheckpointError(f"{file.path}: {why} {description}; truncated or damaged")
    plain = isinstance(extra, dict) and all(isinstance(value, str) for value in extra.values())
    return SafetensorsContent(tensors, extra if plain else {})


class _HeaderEntry(NamedTuple):
    dtype: str
    shape: list[int]
    start: int
    stop: int


def _read_entry(name: str, entry: Any) -> _HeaderEntry:
    """Parse one header entry; its positions are bytes after the header."""
    try:
        dtype, shape, (low, high) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = type(dtype) is str and type(shape) is list and 0 <= low <= high
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or not is_shape(shape) or not is_shape((low, high)):
        raise CheckpointError(f"damaged header entry for {name!r}")
    if dtype not in SUPPORTED:
        raise CheckpointError(f"{name!r} has the element type {dtype[:20]!r}, not supported")
    return _HeaderEntry(dtype, list(shape), low, high)


FORMAT = Format(
    "safetensors",
    _find,
    _open,
    _explain_incomplete,
)
