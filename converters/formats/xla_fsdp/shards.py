"""Join the shards of XLA FSDP v1, which are flat or sharded along dim 0."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.containers.untrusted_values import require_mapping, require_shape
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnsupportedCheckpointError,
    prefix_checkpoint_errors,
)
from portable.converters.names.canonical import remove_wrapper_parts
from portable.converters.storage.byte_sources import ConcatenatedSources, SourceSlice
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Box, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]
Metadata = dict[Any, Any]

_SHARD = "_fsdp_shard"
_DOT = "_FSDP_SHARD_SEPARATOR_"
_FLAT = "_fsdp_wrapped_module.flat_param_"
# Shards are padded to a multiple of 128 elements (faster all-gather on TPUs) or of a configured number.
_MULTIPLES = tuple(1 << bit for bit in range(13))


class FlatParameter(NamedTuple):
    """Position and shape of an original parameter in an entry of an XLA FSDP checkpoint.

    The file of each rank stores a dict `model`, whose sharded entries contain the original
    parameters. An entry is either a single parameter or the concatenation of several parameters,
    which torch_xla calls a flat parameter.

    Attributes:
        name: Parameter name, including the prefixes of the XLA FSDP wrappers.
        start: Index of the parameter's first element in the concatenation. 0 if the entry is a
            single parameter.
        shape: Shape of the parameter before sharding.
    """

    name: str
    start: int
    shape: Shape


@dataclass(frozen=True)
class XlaFsdpLayout:
    """Layout of a sharded entry in the `model` dict: one parameter, or several in a flat parameter.

    Attributes:
        shape: Shape of the entry before sharding. For a flat parameter, its length.
        parameters: Original parameters, in the order in which they were flattened.
    """

    shape: Shape
    parameters: tuple[FlatParameter, ...]

    @property
    def is_flat(self) -> bool:
        """Whether the entry differs from its parameter: several parameters, or one in another shape."""
        return len(self.parameters) > 1 or self.parameters[0].shape != self.shape


def parse_layouts(
    metadata_by_file: Sequence[tuple[str, Metadata]], model_keys: Iterable[Any]
) -> dict[str, XlaFsdpLayout]:
    """Parse the layout of each sharded entry in the `model` dict of the rank files.

    Args:
        metadata_by_file: File and `shard_metadata` of every rank. All must agree.
        model_keys: Keys of `model` on the first rank.

    Returns:
        Layouts of the sharded entries, keyed by their keys in `model`.

    Raises:
        CheckpointError: If the ranks differ, if there are no sharded entries, or if `shard_metadata`
            does not describe exactly the sharded entries.
    """
    (location, first), others = metadata_by_file[0], metadata_by_file[1:]
    layouts: dict[str, XlaFsdpLayout] = {}
    flat_names: set[str] = set()
    for key in model_keys:
        head, marker, tail = key.rpartition("." + _SHARD) if isinstance(key, str) else ("", "", "")
        if not marker and isinstance(key, str) and key.startswith(_SHARD):
            tail, marker = key.removeprefix(_SHARD), _SHARD
        if not marker:
            continue
        suffix = _SHARD + tail
        info = _get_shard_info(first, head, suffix, location)
        name, shape = _parse_shard_name(info, suffix, location)
        for other, metadata in others:
            if _get_shard_info(metadata, head, suffix, other) != info:
                raise DamagedCheckpointError(
                    f"{other}: the shard_info of {key!r} differs from the shard_info in {location}"
                )
        full_name = f"{head}.{name}" if head else name
        if _FLAT in name:
            entry = _parse_flatten_info(first, full_name, location)
            layouts[key] = _build_flat_layout(entry, full_name, shape, location)
            flat_names.add(full_name)
            for other, metadata in others:
                if _parse_flatten_info(metadata, full_name, other) != entry:
                    raise DamagedCheckpointError(
                        f"{other}: the flatten_info of {full_name!r} differs from the flatten_info in "
                        f"{location}"
                    )
        else:
            layouts[key] = XlaFsdpLayout(shape, (FlatParameter(full_name, 0, shape),))
    if not layouts:
        raise UnsupportedCheckpointError(f"{location}: contains no sharded parameters")
    for other, metadata in metadata_by_file:
        tables = _get_metadata_table(metadata, "shard_info", other).values()
        count = sum(len(require_mapping(table, "an entry of shard_info", other)) for table in tables)
        if count != len(layouts) or len(_get_metadata_table(metadata, "flatten_info", other)) != len(
            flat_names
        ):
            raise DamagedCheckpointError(
                f"{other}: the parameters in shard_metadata differ from the parameters of the model"
            )
    return layouts


def _get_metadata_table(metadata: Metadata, name: str, location: str) -> dict[Any, Any]:
    """Return a table of `shard_metadata`, such as `shard_info`.

    Raises:
        CheckpointError: If the table is missing or not a dict.
    """
    return require_mapping(metadata.get(name), f"{name} of shard_metadata", location)


def _get_shard_info(metadata: Metadata, head: str, suffix: str, location: str) -> dict[Any, Any]:
    """Return the entry of `shard_info` in `shard_metadata` that describes a shard.

    The shard's key in `model` is `head` and `suffix`, joined by a dot, or only `suffix` if `head`
    is empty.

    Args:
        metadata: The `shard_metadata` of a rank.
        head: Name of the module that contains the shard. Empty for the top-level module.
        suffix: Name of the shard in the module.
        location: File of the rank, used in error messages.

    Raises:
        CheckpointError: If the entry is missing.
    """
    tables = _get_metadata_table(metadata, "shard_info", location)
    info = require_mapping(tables.get(head, {}), "an entry of shard_info", location).get(suffix)
    if not isinstance(info, dict):
        raise DamagedCheckpointError(f"{location}: shard_metadata does not describe {head + '.' + suffix!r}")
    return info


class _OriginalParameter(NamedTuple):
    """Name and shape of a parameter before sharding."""

    name: str
    shape: Shape


def _parse_shard_name(info: dict[Any, Any], suffix: str, location: str) -> _OriginalParameter:
    """Parse the original name and shape of a sharded parameter.

    Args:
        info: Description of the shard in `shard_metadata`.
        suffix: Name of the shard in its module, which encodes the original name.
        location: File of the rank, used in error messages.

    Raises:
        CheckpointError: If the original shape is invalid, or if the original name does not match
            `suffix`.
    """
    name, shape = (
        info.get("_orig_name"),
        require_shape(info.get("_orig_size"), "_orig_size of shard_metadata", location),
    )
    if not isinstance(name, str) or f"{_SHARD}.{name}".replace(".", _DOT) != suffix:
        raise DamagedCheckpointError(
            f"{location}: damaged: shard_metadata records the name {format_untrusted_value(name)} for "
            f"{suffix!r}, but the two names do not match"
        )
    return _OriginalParameter(name.lstrip("."), shape)


class _FlattenInfo(NamedTuple):
    """Entry of `flatten_info`: names, shapes and element counts of the parameters in a flat parameter."""

    names: list[str]
    shapes: list[Shape]
    numels: list[int]


def _parse_flatten_info(metadata: Metadata, name: str, location: str) -> _FlattenInfo:
    """Parse the `flatten_info` entry of a flat parameter.

    Raises:
        CheckpointError: If the entry is missing or damaged.
    """
    entry = _get_metadata_table(metadata, "flatten_info", location).get(name.replace("_fpw_module.", ""))
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        raise DamagedCheckpointError(f"{location}: shard_metadata does not describe {name!r}")
    names, shapes, numels = entry
    if not all(isinstance(part, (list, tuple)) for part in entry) or not (
        len(names) == len(shapes) == len(numels) > 0
    ):
        raise DamagedCheckpointError(
            f"{location}: damaged: the flatten_info of {name!r} is not three lists of the same length"
        )
    if not all(isinstance(item, str) for item in names) or not all(type(item) is int for item in numels):
        raise DamagedCheckpointError(
            f"{location}: damaged: the flatten_info of {name!r} has a name that is not a string or a size "
            "that is not a number"
        )
    return _FlattenInfo(
        list(names),
        [require_shape(shape, f"the shape of {name!r}", location) for shape in shapes],
        list(numels),
    )


def _build_flat_layout(entry: _FlattenInfo, full_name: str, shape: Shape, location: str) -> XlaFsdpLayout:
    """Build the layout of a flat parameter, in which several original parameters are concatenated.

    Args:
        entry: Entry for the flat parameter in `flatten_info`, a section of the checkpoint's
            metadata. It contains the names, shapes and element counts of the original parameters.
        full_name: Name of the flat parameter in the model.
        shape: Shape of the flat parameter before sharding.
        location: File of the rank, used in error messages.

    Raises:
        CheckpointError: If the element count of an original parameter does not match its shape, or
            if the counts do not add up to the length of the flat parameter.
    """
    names, shapes, numels = entry
    head = full_name.rpartition(".")[0]
    parameters: list[FlatParameter] = []
    start = 0
    for name, parameter_shape, numel in zip(names, shapes, numels, strict=True):
        if prod(parameter_shape) != numel:
            raise DamagedCheckpointError(
                f"{location}: damaged: {name!r} has shape {list(parameter_shape)}, but "
                f"flatten_info records the element count {numel}"
            )
        parameters.append(FlatParameter(f"{head}.{name}", start, parameter_shape))
        start += numel
    if shape != (start,):
        raise DamagedCheckpointError(
            f"{location}: {full_name!r} has shape {list(shape)}, but the parameters in "
            f"flatten_info have {start} elements in total"
        )
    return XlaFsdpLayout(shape, tuple(parameters))


def join_shards(
    layout: XlaFsdpLayout, shards: Sequence[tuple[str, Any]], key: str, suffix: str = ""
) -> dict[str, Tensor]:
    """Join the shards of one entry of the `model` dict into the original tensors.

    The entry contains either a single parameter or a flat parameter, in which several original
    parameters are concatenated. An optimizer state of the entry is joined in the same way.

    Args:
        layout: Layout of the original parameters in the entry.
        shards: One pair per rank, in rank order. Each pair contains the path of the rank's file and
            the shard in this file.
        key: Key of the entry in `model`, used in error messages.
        suffix: Suffix of the tensors' names, such as `.exp_avg` for an optimizer state. The keys of
            the result do not include the suffix.

    Returns:
        Tensors, keyed by parameter name. The names include the prefixes of the XLA FSDP wrappers.

    Raises:
        CheckpointError: If a shard is not a tensor, if the shards differ in dtype or shape, or if their
            size does not match the layout and the number of ranks.
    """
    location, first = shards[0]
    key += suffix
    checked_shards: list[StoredTensor] = []
    for file, value in shards:
        if not isinstance(value, StoredTensor) or not isinstance(first, StoredTensor):
            raise DamagedCheckpointError(f"{file}: damaged: {key!r} is not a tensor")
        if (value.dtype, value.shape) != (first.dtype, first.shape):
            raise DamagedCheckpointError(
                f"{file}: {key!r} has the dtype {value.dtype} and the shape {list(value.shape)}, but on rank "
                f"0 the dtype {first.dtype} and the shape {list(first.shape)}"
            )
        checked_shards.append(value)
    with prefix_checkpoint_errors(location):
        if len(first.shape) == 1:
            return _join_flat_shards(layout, checked_shards, key, suffix)
        return {layout.parameters[0].name: _join_row_shards(layout, checked_shards, key, suffix)}


def _join_flat_shards(
    layout: XlaFsdpLayout, stored: Sequence[StoredTensor], key: str, suffix: str
) -> dict[str, Tensor]:
    """Join the shards of a flat entry, and split the result into the original parameters.

    The padding at the end of the joined entry is dropped. Padding to a multiple of a power of two, at
    most 4096, is supported.

    Args:
        layout: Layout of the original parameters in the entry.
        stored: One-dimensional shard of each rank, in order.
        key: Key of the entry, used in error messages.
        suffix: Suffix of the tensors' names, such as `.exp_avg` for an optimizer state. Empty for
            the parameters themselves.

    Returns:
        Tensors, keyed by the names of the original parameters, without the suffix.

    Raises:
        CheckpointError: If the length of the shards does not fit the parameters, or if a shard is
            not contiguous.
    """
    length, numel, world = stored[0].shape[0], prod(layout.shape), len(stored)
    if not any(length == -(-numel // (world * multiple)) * multiple for multiple in _MULTIPLES):
        raise DamagedCheckpointError(
            f"{key!r} has {length:,} elements per rank, which does not match a tensor of {numel:,} elements "
            f"sharded with a world size of {world}"
        )
    if length > 1 and any(shard.strides != (1,) for shard in stored):
        raise CheckpointError(
            f"the shard of {key!r} is not a contiguous tensor; call contiguous() on the tensor, and save the "
            "checkpoint again"
        )
    dtype, width = stored[0].dtype, get_itemsize(stored[0].dtype)
    joined = ConcatenatedSources(
        [
            SourceSlice(view.source, view.offset, length * width)
            for view in (shard.to_byte_view() for shard in stored)
        ]
    )
    return {
        name: Tensor.from_source(remove_wrapper_parts(name) + suffix, dtype, shape, joined, start * width)
        for name, start, shape in layout.parameters
    }


def _join_row_shards(layout: XlaFsdpLayout, stored: Sequence[StoredTensor], key: str, suffix: str) -> Tensor:
    """Join the shards of an entry that is sharded along dim 0.

    The last ranks may contain padding rows, which are dropped.

    Args:
        layout: Layout of the entry, which contains a single parameter.
        stored: Shard of each rank, in order.
        key: Key of the entry, used in error messages.
        suffix: Suffix of the tensor's name, such as `.exp_avg` for an optimizer state. Empty for
            the parameter itself.

    Raises:
        CheckpointError: If the shape of the shards does not fit the parameter.
    """
    rows, *rest = stored[0].shape or (0,)
    if (
        layout.is_flat
        or not rest
        or tuple(rest) != layout.shape[1:]
        or rows != -(-layout.shape[0] // len(stored))
    ):
        raise DamagedCheckpointError(
            f"{key!r} has shape {list(stored[0].shape)} on each rank, which does not match a tensor of shape "
            f"{list(layout.shape)} sharded along dimension 0 with a world size of {len(stored)}"
        )
    boxes = []
    for rank, shard in enumerate(stored):
        low = rank * rows
        size = min(rows, layout.shape[0] - low)
        if size > 0:  # the rest is padding
            boxes.append(Box((low, *[0] * len(rest)), (size, *rest), shard.to_byte_view))
    return Tensor(
        remove_wrapper_parts(layout.parameters[0].name) + suffix, stored[0].dtype, layout.shape, boxes
    )
