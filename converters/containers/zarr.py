"""Zarr arrays of versions 2 and 3, as Orbax writes them: a JSON header, and a value for each chunk.

A chunk of version 3 may be a shard, which holds smaller chunks and, at its end, where each lies. Chunks at
the upper edges are stored whole. What is not here (filters, Fortran order, other codecs) is refused by name.

Source: https://zarr-specs.readthedocs.io (v2; v3 with the codecs bytes, zstd, gzip, crc32c,
sharding_indexed).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.crc32c import compute_crc32c
from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.untrusted_values import require_shape
from portable.converters.errors import CheckpointError, prefix_checkpoint_errors
from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import InMemorySource, SourceSlice, parse_json
from portable.converters.storage.compressed_bytes import CODECS, DecompressedSource
from portable.converters.tensors.dtypes import get_itemsize, get_numpy_dtype_names, to_numpy_dtype
from portable.converters.tensors.tensor import Box, Tensor, View, check_shape, compute_row_major_strides

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.converters.storage.byte_sources import ByteSource
    from portable.converters.tensors.tensor import Shape

V2_HEADER_NAME, V3_HEADER_NAME = ".zarray", "zarr.json"
_ABSENT = (1 << 64) - 1


@dataclass(frozen=True)
class _ArrayHeader:
    """What the JSON of an array says.

    Attributes:
        fill_value: each element of a chunk that is not stored.
        chunk_shape: shape of a stored value.
        inner_chunk_shape: shape of the chunks within it, which is `chunk_shape` where they are not sharded.
        codec: of the inner chunks, None for plain bytes.
        is_sharded: whether an index ends each value.
        has_index_crc: whether a CRC-32C ends each index.
        format_chunk_key: position in the grid -> the name of the value.
    """

    dtype: str
    shape: Shape
    chunk_shape: Shape
    inner_chunk_shape: Shape
    codec: str | None
    is_sharded: bool
    has_index_crc: bool
    fill_value: Any
    format_chunk_key: Callable[[Shape], str]


class _Codec(NamedTuple):
    """A codec of a header of version 3."""

    name: str
    settings: dict[str, Any]


class _IndexEntry(NamedTuple):
    """Location of a chunk in its shard, in bytes. Both values are `_ABSENT` if the chunk is not stored."""

    offset: int
    length: int


class ChunkBudget:
    """How many chunks an array may have beyond its values: a few bytes of a header can claim any number."""

    def __init__(self, chunks: int) -> None:
        self._num_remaining = chunks

    def reserve_chunks(self, chunks: int, location: str) -> None:
        self._num_remaining -= chunks
        if self._num_remaining < 0:
            raise CheckpointError(
                f"{location}: damaged, too many chunks lie within shards, or have no values"
            )


def build_zarr_tensor(
    name: str,
    header: bytes,
    version: int,
    find_value: Callable[[str], ByteSource | None],
    location: str,
    max_chunks: int,
    budget: ChunkBudget,
) -> Tensor:
    """One array.

    Args:
        name: of the tensor, for messages.
        header: the `.zarray` (version 2) or `zarr.json` (version 3).
        find_value: key of a chunk (`0.1`, `c/0/1`) -> its bytes; None for the fill value; CheckpointError
        where
            it is missing.
        location: the checkpoint, for messages.
        max_chunks: the array has at most so many chunks.
        budget: of all arrays of the checkpoint.

    Raises:
        CheckpointError: the header is damaged, or holds something that is not read; a chunk is missing.
    """
    try:
        parsed = _parse_header(header, version)
    except (
        CheckpointError
    ) as error:  # not `prefix_checkpoint_errors`, which takes its time for 100,000 arrays
        raise type(error)(f"{location}: {name}: {error.args[0]}") from None
    shape = parsed.shape
    grid = [-(-size // step) for size, step in zip(shape, parsed.chunk_shape, strict=True)]
    if prod(grid) > max_chunks:
        raise CheckpointError(f"{location}: {name}: damaged, it would have {prod(grid):,} chunks")
    boxes = []
    for position in product(*map(range, grid)):
        key = parsed.format_chunk_key(position)
        value = find_value(key)
        if (
            value is not None and parsed.inner_chunk_shape == shape and not parsed.is_sharded
        ):  # the only chunk
            used = prod(shape) * get_itemsize(parsed.dtype)
            view = _build_chunk_view(parsed, value, None, 0, used, f"{location}: {name}/{key}")
            return Tensor.from_source(name, parsed.dtype, shape, view.source)
        low = tuple(index * step for index, step in zip(position, parsed.chunk_shape, strict=True))
        boxes += _build_boxes(parsed, value, low, f"{location}: {name}/{key}", budget)
    with prefix_checkpoint_errors(location):
        return Tensor(name, parsed.dtype, shape, boxes)


def _build_boxes(
    header: _ArrayHeader, value: ByteSource | None, offsets: Shape, location: str, budget: ChunkBudget
) -> list[Box]:
    """The chunks within one stored value, which begins at `offsets`."""
    if value is None:
        budget.reserve_chunks(1, location)
        with prefix_checkpoint_errors(location):
            fill = InMemorySource(_encode_fill_value(header.fill_value, header.dtype))
        return [
            Box(
                offsets,
                _clip_chunk_shape(header.chunk_shape, header.shape, offsets),
                View(fill, 0, (0,) * len(offsets)),
            )
        ]
    counts = [size // step for size, step in zip(header.chunk_shape, header.inner_chunk_shape, strict=True)]
    if header.inner_chunk_shape != header.chunk_shape:
        budget.reserve_chunks(prod(counts), location)
    index = (
        _ShardIndex(value, prod(counts), has_crc=header.has_index_crc, location=location)
        if header.is_sharded
        else None
    )
    width = get_itemsize(header.dtype)
    boxes = []
    for number, chunk_index in enumerate(product(*map(range, counts))):
        offset = tuple(
            start + place * step
            for start, place, step in zip(offsets, chunk_index, header.inner_chunk_shape, strict=True)
        )
        sizes = _clip_chunk_shape(header.inner_chunk_shape, header.shape, offset)
        if min(sizes, default=1) > 0:  # else beyond the upper edge
            view = partial(_build_chunk_view, header, value, index, number, prod(sizes) * width, location)
            boxes.append(Box(offset, sizes, view if index else view()))
    return boxes


def _clip_chunk_shape(chunk: Shape, shape: Shape, offset: Shape) -> Shape:
    """Of a chunk at `offset`, which may reach beyond the upper edge of the array."""
    return tuple(min(step, size - start) for step, size, start in zip(chunk, shape, offset, strict=True))


def _build_chunk_view(
    header: _ArrayHeader,
    value: ByteSource,
    index: _ShardIndex | None,
    chunk_number: int,
    used_bytes: int,
    location: str,
) -> View:
    """The chunk `chunk_number` of a stored value; reads the index of a shard."""
    width = get_itemsize(header.dtype)
    source, nbytes = (
        value if index is None else index.get_chunk(chunk_number),
        prod(header.inner_chunk_shape) * width,
    )
    if header.codec is not None:
        source = DecompressedSource(source, header.codec, nbytes, used_bytes, location)
    elif source.nbytes != nbytes:
        raise CheckpointError(f"{location}: damaged, a chunk of {nbytes:,} bytes has {source.nbytes:,}")
    return View(source, 0, compute_row_major_strides(header.inner_chunk_shape, width))


class _ShardIndex:
    """Where the chunks of a shard lie: two integers for each at its end, read once."""

    def __init__(self, value: ByteSource, num_chunks: int, *, has_crc: bool, location: str) -> None:
        if 16 * num_chunks + 4 * has_crc > value.nbytes:
            raise CheckpointError(f"{location}: truncated or damaged, a shard has no index")
        self._value = value
        self._num_chunks = num_chunks
        self._has_crc = has_crc
        self._location = location
        self._entries: list[_IndexEntry] | None = None

    def get_chunk(self, number: int) -> ByteSource:
        """The bytes of one chunk."""
        if self._entries is None:
            self._entries = self._read_entries()
        offset, length = self._entries[number]
        if offset == _ABSENT:
            raise CheckpointError(f"{self._location}: a chunk is missing")
        if offset + length > self._value.nbytes:
            raise CheckpointError(f"{self._location}: damaged, the index of a shard is wrong")
        return SourceSlice(self._value, offset, length)

    def _read_entries(self) -> list[_IndexEntry]:
        raw = bytearray(16 * self._num_chunks + 4 * self._has_crc)
        self._value.read_into(memoryview(raw), self._value.nbytes - len(raw), set())
        if self._has_crc and compute_crc32c(memoryview(raw)[:-4]) != struct.unpack("<I", raw[-4:])[0]:
            raise CheckpointError(
                f"{self._location}: damaged, the checksum of a shard's index does not match"
            )
        return list(
            map(_IndexEntry._make, struct.iter_unpack("<QQ", memoryview(raw)[: 16 * self._num_chunks]))
        )


@lru_cache(1024)  # a model has few shapes
def _parse_header(header: bytes, version: int) -> _ArrayHeader:
    values = parse_json("its header", header)
    parsed = _parse_version2(values) if version == 2 else _parse_version3(values)
    check_shape("its header", parsed.dtype, parsed.shape)
    return parsed


def _parse_version2(header: Any) -> _ArrayHeader:
    fields = _validate_header(header, 2)
    shape, chunk = require_shape(fields.get("shape"), "shape"), require_shape(fields.get("chunks"), "chunks")
    _check_chunk_shape(shape, chunk)
    if fields.get("filters"):
        raise CheckpointError("zarr filters are not supported")
    if fields.get("order", "C") != "C":
        raise CheckpointError(f"the zarr order {format_untrusted_value(fields['order'])} is not supported")
    compressor = fields.get("compressor")
    codec = compressor.get("id") if isinstance(compressor, dict) else None
    if compressor is not None and codec not in CODECS:
        raise CheckpointError(f"the zarr compressor {format_untrusted_value(codec)} is not supported")
    separator = fields.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CheckpointError("damaged, its separator is neither . nor /")
    dtype = parse_zarr_dtype(fields.get("dtype"))

    def format_key(position: Shape) -> str:
        return str(separator).join(map(str, position)) or "0"

    fill = fields.get("fill_value")
    return _ArrayHeader(
        dtype,
        shape,
        chunk,
        chunk,
        codec,
        is_sharded=False,
        has_index_crc=False,
        fill_value=fill,
        format_chunk_key=format_key,
    )


def _parse_version3(header: Any) -> _ArrayHeader:
    fields = _validate_header(header, 3)
    shape = require_shape(fields.get("shape"), "shape")
    chunk = require_shape(
        _get_extension_settings(fields.get("chunk_grid"), "regular").get("chunk_shape"), "chunk_shape"
    )
    _check_chunk_shape(shape, chunk)
    separator = _get_extension_settings(fields.get("chunk_key_encoding"), "default").get("separator", "/")
    if separator not in (".", "/"):
        raise CheckpointError("damaged, its separator is neither . nor /")
    if fields.get("storage_transformers"):
        raise CheckpointError("zarr storage transformers are not supported")
    codecs = _parse_codecs(fields.get("codecs"))
    inner, sharded, summed = chunk, False, False
    if codecs and codecs[0].name == "sharding_indexed":
        if len(codecs) > 1:
            raise CheckpointError(
                f"the zarr codec {format_untrusted_value(codecs[1].name)} after sharding_indexed is not "
                "supported"
            )
        sharding = codecs[0].settings
        inner = require_shape(sharding.get("chunk_shape"), "chunk_shape")
        if len(inner) != len(chunk) or any(n < 1 or size % n for size, n in zip(chunk, inner, strict=True)):
            raise CheckpointError("damaged, its chunks do not tile a shard")
        if prod(size // n for size, n in zip(chunk, inner, strict=True)) > 1 << 24:
            raise CheckpointError("damaged, a shard has too many chunks")
        if sharding.get("index_location", "end") != "end":
            raise CheckpointError("a zarr index at the start of a shard is not supported")
        indexed = [codec.name for codec in _parse_codecs(sharding.get("index_codecs"))]
        if indexed not in (["bytes"], ["bytes", "crc32c"]):
            raise CheckpointError(
                f"the zarr index codecs {format_untrusted_value(indexed)} are not supported"
            )
        sharded, summed = True, len(indexed) == 2
        codecs = _parse_codecs(sharding.get("codecs"))
    names = [codec.name for codec in codecs]
    unknown = next((name for name in names if name not in ("bytes", *CODECS)), None)
    if unknown is not None or names[:1] != ["bytes"] or len(names) > 2:
        raise CheckpointError(f"the zarr codecs {format_untrusted_value(names)} are not supported")
    if codecs[0].settings.get("endian", "little") != "little":
        raise CheckpointError("big-endian values are not supported")
    dtype = parse_zarr_dtype(fields.get("data_type"))

    def format_key(position: Shape) -> str:
        return str(separator).join(("c", *map(str, position)))

    codec = names[1] if len(names) > 1 else None
    return _ArrayHeader(
        dtype, shape, chunk, inner, codec, sharded, summed, fields.get("fill_value"), format_key
    )


def _validate_header(header: Any, version: int) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("zarr_format") != version:
        raise CheckpointError(f"damaged, no header of zarr version {version}")
    return header


def _get_extension_settings(value: Any, name: str) -> dict[str, Any]:
    """The settings of a named extension of version 3; refused under another name."""
    if not isinstance(value, dict) or value.get("name") != name:
        raise CheckpointError(
            f"{format_untrusted_value(value)} where zarr's {name!r} is expected is not supported"
        )
    settings = value.get("configuration", {})
    return settings if isinstance(settings, dict) else {}


def _parse_codecs(value: Any) -> list[_Codec]:
    if not isinstance(value, list) or not all(isinstance(codec, dict) for codec in value):
        raise CheckpointError("damaged, it names no codecs")
    return [
        _Codec(str(codec.get("name")), _get_extension_settings(codec, codec["name"]))
        for codec in value
        if "name" in codec
    ]


def _check_chunk_shape(shape: Shape, chunk: Shape) -> None:
    """Refuse chunks that do not fit the array: a few bytes could then stand for any number of them."""
    if len(chunk) != len(shape) or any(
        not 0 < n <= max(1, size) for n, size in zip(chunk, shape, strict=True)
    ):
        raise CheckpointError(f"damaged, chunks of {list(chunk)} in an array of {list(shape)}")


def parse_zarr_dtype(name: Any) -> str:
    """The safetensors name of an element type."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"the element type {format_untrusted_value(name)} is not supported")
    return _DTYPES[name]


def _encode_fill_value(fill: Any, dtype: str) -> bytes:
    """One element with the fill value of a header; TensorStore takes null for zero."""
    try:
        value = float(fill) if isinstance(fill, str) else fill or 0  # NaN, Infinity
        with np.errstate(all="ignore"):
            return np.array(value).astype(to_numpy_dtype(dtype)).reshape(()).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(f"the fill value {format_untrusted_value(fill)} is not supported") from None


# Version 2 has numpy's codes (`<f4`) for the types that numpy knows.
_DTYPES = {
    name: ours
    for kind, ours in get_numpy_dtype_names().items()
    for name in ((kind.name, kind.str) if kind.isbuiltin == 1 else (kind.name,))
}
