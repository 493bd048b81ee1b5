"""Read zarr arrays of versions 2 and 3, as Orbax writes them.

An array has a JSON header and one stored value per chunk. A chunk that contains only the fill value
need not be stored. In version 3, a stored value may be a shard, which contains smaller chunks and,
at its end, an index of their locations. Chunks at the upper edges of an array are stored with the
full chunk shape. Features that Orbax does not use, such as filters, Fortran order, and other
codecs, raise an error that names the feature.

Source: https://zarr-specs.readthedocs.io (version 2; version 3 with the codecs bytes, zstd, gzip,
crc32c, sharding_indexed).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product, starmap
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.crc32c import compute_crc32c
from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.untrusted_values import require_shape
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnsupportedCheckpointError,
    prefix_checkpoint_errors,
)
from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import InMemorySource, SourceSlice, parse_json
from portable.converters.storage.compressed_bytes import CODECS, DecompressedSource
from portable.converters.tensors.dtypes import get_itemsize, get_numpy_dtype_names, to_numpy_dtype
from portable.converters.tensors.tensor import Box, Tensor, View, check_shape, compute_row_major_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.converters.storage.byte_sources import ByteSource
    from portable.converters.tensors.tensor import Shape

V2_HEADER_NAME, V3_HEADER_NAME = ".zarray", "zarr.json"
_ABSENT = (1 << 64) - 1
_MAX_SHARD_CHUNKS = 1 << 24


@dataclass(frozen=True)
class _ArrayHeader:
    """Parsed header of a zarr array.

    The array is divided into equal chunks, and each chunk is stored as one value under a key. If
    the array is sharded, a chunk is a shard: it consists of smaller inner chunks and ends with an
    index of their locations.

    Attributes:
        dtype: Safetensors dtype of the elements.
        shape: Shape of the array.
        chunk_shape: Shape of a chunk, which is stored as one value.
        inner_chunk_shape: Shape of an inner chunk, or `chunk_shape` if the array is not sharded.
        codec: Compression format of the inner chunks, or None.
        is_sharded: Whether each chunk is a shard.
        has_index_crc: Whether the index of each shard ends with a CRC-32C.
        fill_value: Value of all elements in chunks that are not stored.
        format_chunk_key: Function that maps a position in the chunk grid to the key of the stored
            value.
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
    """Name and settings of a codec in the header of a version 3 zarr array."""

    name: str
    settings: dict[str, Any]


class _IndexEntry(NamedTuple):
    """Offset and length of a chunk in its shard, in bytes. Both are `_ABSENT` if the chunk is not stored."""

    offset: int
    length: int


class ChunkBudget:
    """Limit on the number of chunks that are not stored as separate objects.

    Such chunks are inside shards, or contain only the fill value. A header of a few bytes can
    describe any number of them. All arrays of a checkpoint share the limit.

    Args:
        chunks: Maximum number of chunks.
    """

    def __init__(self, chunks: int) -> None:
        self._max_chunks = chunks
        self._num_remaining = chunks

    def reserve_chunks(self, chunks: int, location: str) -> None:
        """Subtract chunks from the number of chunks that the checkpoint may still contain.

        Only chunks that are not stored under a separate key are counted.

        Args:
            chunks: Number of chunks to subtract.
            location: Path of the checkpoint, name of the array, and key, used in error messages.

        Raises:
            CheckpointError: If the checkpoint has more such chunks than are allowed.
        """
        self._num_remaining -= chunks
        if self._num_remaining < 0:
            raise DamagedCheckpointError(
                f"{location}: damaged: the checkpoint has more than {self._max_chunks:,} chunks that are "
                "stored in shards or have no stored values"
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
    """Build a lazy tensor for a zarr array. Its elements are not read yet.

    The store contains one value per key. A value is a chunk, or a shard that contains several
    chunks. The index of a shard is read when one of its chunks is first accessed.

    Args:
        name: Name of the tensor, used in error messages.
        header: Content of the file `.zarray` (version 2) or `zarr.json` (version 3).
        version: Version of the zarr format, 2 or 3.
        find_value: Function that returns the value for a key, such as `0.1` or `c/0/1`. If the
            store lacks the key, the function either returns None, which means that all elements
            have the fill value, or raises a CheckpointError.
        location: Path of the checkpoint, used in error messages.
        max_chunks: Maximum number of keys of the array, including keys that are not stored.
        budget: Limit on the number of chunks that are inside shards or contain only the fill value.
            All arrays of the checkpoint share the limit.

    Raises:
        CheckpointError: If the header is damaged or uses an unsupported feature, or if a chunk is
            missing.
    """
    try:
        parsed = _parse_header(header, version)
    except CheckpointError as error:  # `prefix_checkpoint_errors` is too slow for 100,000 arrays.
        raise type(error)(f"{location}: {name}: {error.args[0]}") from None
    shape = parsed.shape
    grid = [-(-size // step) for size, step in zip(shape, parsed.chunk_shape, strict=True)]
    if prod(grid) > max_chunks:
        raise DamagedCheckpointError(
            f"{location}: {name}: damaged: the array would have {prod(grid):,} chunks, but at most "
            f"{max_chunks:,} are allowed"
        )
    boxes = []
    for position in product(*map(range, grid)):
        key = parsed.format_chunk_key(position)
        value = find_value(key)
        # If the array has a single chunk, the tensor is contiguous.
        if value is not None and parsed.inner_chunk_shape == shape and not parsed.is_sharded:
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
    """Build a `Box` for each chunk in one stored value.

    A box contains the position, the shape and the bytes of a chunk. A stored value is either one
    chunk or a shard, which contains several inner chunks. Inner chunks beyond the upper edge of the
    array are skipped.

    Args:
        header: Header of the array.
        value: Stored value, or None if all elements have the fill value.
        offsets: Position of the value's first element in the array, with one index per dimension.
        location: Array and key of the value, used in error messages.
        budget: Limit on the number of chunks without a separate key, shared by all arrays of
            the checkpoint. These are the inner chunks of shards, and the chunks that contain only
            the fill value. A header of a few bytes can describe any number of them.
    """
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
        if min(sizes, default=1) > 0:  # Skip chunks beyond the upper edge of the array.
            view = partial(_build_chunk_view, header, value, index, number, prod(sizes) * width, location)
            boxes.append(Box(offset, sizes, view if index else view()))
    return boxes


def _clip_chunk_shape(chunk: Shape, shape: Shape, offset: Shape) -> Shape:
    """Return the shape of a chunk at `offset`, clipped to the bounds of the array.

    If the chunk is outside the array, at least one size is zero or negative.
    """
    return tuple(min(step, size - start) for step, size, start in zip(chunk, shape, offset, strict=True))


def _build_chunk_view(
    header: _ArrayHeader,
    value: ByteSource,
    index: _ShardIndex | None,
    chunk_number: int,
    used_bytes: int,
    location: str,
) -> View:
    """Build the view of one chunk.

    The stored value is either the chunk itself or a shard that contains the chunk. For a shard,
    this function reads the index to locate the chunk, unless the index has already been read. The
    chunk itself is not read.

    Args:
        header: Header of the array.
        value: Stored value.
        index: Index of the shard, or None if the value is not a shard.
        chunk_number: Index of the chunk in the shard.
        used_bytes: Number of bytes of the chunk that are inside the array.
        location: Array and key of the value, used in error messages.

    Raises:
        CheckpointError: If the chunk is missing in its shard, or if an uncompressed chunk has a
            wrong size.
    """
    width = get_itemsize(header.dtype)
    source, nbytes = (
        value if index is None else index.get_chunk(chunk_number),
        prod(header.inner_chunk_shape) * width,
    )
    if header.codec is not None:
        source = DecompressedSource(source, header.codec, nbytes, used_bytes, location)
    elif source.nbytes != nbytes:
        raise DamagedCheckpointError(
            f"{location}: damaged: a chunk has {source.nbytes:,} bytes instead of {nbytes:,}"
        )
    return View(source, 0, compute_row_major_strides(header.inner_chunk_shape, width))


class _ShardIndex:
    """Index at the end of a shard, with the offset and length of each chunk.

    The index is read on the first call of `get_chunk`.

    Args:
        value: Stored value of the shard.
        num_chunks: Number of chunks in the shard.
        has_crc: Whether a CRC-32C follows the index.
        location: Array and key of the value, used in error messages.

    Raises:
        CheckpointError: If the shard is too small for an index.
    """

    def __init__(self, value: ByteSource, num_chunks: int, *, has_crc: bool, location: str) -> None:
        if 16 * num_chunks + 4 * has_crc > value.nbytes:
            raise DamagedCheckpointError(
                f"{location}: truncated or damaged: the shard is too small for its chunk index"
            )
        self._value = value
        self._num_chunks = num_chunks
        self._has_crc = has_crc
        self._location = location
        self._entries: list[_IndexEntry] | None = None

    def get_chunk(self, number: int) -> ByteSource:
        """Return the bytes of a chunk as a byte source.

        Raises:
            CheckpointError: If the chunk is not stored, or if the index is damaged.
        """
        if self._entries is None:
            self._entries = self._read_entries()
        offset, length = self._entries[number]
        if offset == _ABSENT:
            raise DamagedCheckpointError(f"{self._location}: chunk {number} of the shard is missing")
        if offset + length > self._value.nbytes:
            raise DamagedCheckpointError(
                f"{self._location}: damaged: chunk {number} would end beyond the end of the shard"
            )
        return SourceSlice(self._value, offset, length)

    def _read_entries(self) -> list[_IndexEntry]:
        """Read the index, and verify its checksum if it has one.

        Raises:
            CheckpointError: If the checksum does not match.
        """
        raw = bytearray(16 * self._num_chunks + 4 * self._has_crc)
        self._value.read_into(memoryview(raw), self._value.nbytes - len(raw), set())
        if self._has_crc and compute_crc32c(memoryview(raw)[:-4]) != struct.unpack("<I", raw[-4:])[0]:
            raise DamagedCheckpointError(
                f"{self._location}: damaged: the checksum of the shard's chunk index does not match"
            )
        pairs = struct.iter_unpack("<QQ", memoryview(raw)[: 16 * self._num_chunks])
        return list(starmap(_IndexEntry, pairs))


@lru_cache(1024)  # The arrays of a model have few different headers.
def _parse_header(header: bytes, version: int) -> _ArrayHeader:
    values = parse_json("its header", header)
    parsed = _parse_version2(values) if version == 2 else _parse_version3(values)
    check_shape("its header", parsed.dtype, parsed.shape)
    return parsed


def _parse_version2(header: Any) -> _ArrayHeader:
    """Parse the header of an array in version 2 of the zarr format.

    The elements must be in C order without filters. They may be compressed with one of `CODECS`.

    Args:
        header: Parsed JSON value of the header.

    Raises:
        CheckpointError: If the header is damaged or uses an unsupported feature.
    """
    fields = _validate_header(header, 2)
    shape, chunk = require_shape(fields.get("shape"), "shape"), require_shape(fields.get("chunks"), "chunks")
    _check_chunk_shape(shape, chunk)
    if fields.get("filters"):
        raise UnsupportedCheckpointError("zarr filters are not supported")
    if fields.get("order", "C") != "C":
        raise UnsupportedCheckpointError(
            f"the zarr order is {format_untrusted_value(fields['order'])}, but only 'C' is supported"
        )
    compressor = fields.get("compressor")
    codec = compressor.get("id") if isinstance(compressor, dict) else None
    if compressor is not None and codec not in CODECS:
        raise UnsupportedCheckpointError(
            f"the zarr compressor is {format_untrusted_value(codec)}, but only {' and '.join(CODECS)} are "
            "supported"
        )
    separator = fields.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise DamagedCheckpointError(
            f"damaged: the chunk separator is {format_untrusted_value(separator)}, but must be '.' or '/'"
        )
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
    """Parse the header of an array in version 3 of the zarr format.

    The codecs must be little-endian `bytes`, optionally followed by one of `CODECS`. They may be
    nested in a single `sharding_indexed` codec. The index of a shard must then be at its end, with
    the codec `bytes` and optionally `crc32c`. Only the chunk grid `regular` and the chunk key
    encoding `default` are supported. Storage transformers are not supported.

    Args:
        header: Content of `zarr.json`, parsed from JSON.

    Raises:
        CheckpointError: If the header is damaged or uses an unsupported feature.
    """
    fields = _validate_header(header, 3)
    shape = require_shape(fields.get("shape"), "shape")
    chunk = require_shape(
        _get_extension_settings(fields.get("chunk_grid"), "regular").get("chunk_shape"), "chunk_shape"
    )
    _check_chunk_shape(shape, chunk)
    separator = _get_extension_settings(fields.get("chunk_key_encoding"), "default").get("separator", "/")
    if separator not in (".", "/"):
        raise DamagedCheckpointError(
            f"damaged: the chunk separator is {format_untrusted_value(separator)}, but must be '.' or '/'"
        )
    if fields.get("storage_transformers"):
        raise UnsupportedCheckpointError("zarr storage transformers are not supported")
    codecs = _parse_codecs(fields.get("codecs"))
    inner, sharded, summed = chunk, False, False
    if codecs and codecs[0].name == "sharding_indexed":
        if len(codecs) > 1:
            raise UnsupportedCheckpointError(
                f"the zarr codec {format_untrusted_value(codecs[1].name)} is not supported after "
                "sharding_indexed"
            )
        sharding = codecs[0].settings
        inner = require_shape(sharding.get("chunk_shape"), "chunk_shape")
        if len(inner) != len(chunk) or any(n < 1 or size % n for size, n in zip(chunk, inner, strict=True)):
            raise DamagedCheckpointError(
                f"damaged: a shard of shape {list(chunk)} cannot be divided evenly into chunks of shape "
                f"{list(inner)}"
            )
        num_chunks = prod(size // n for size, n in zip(chunk, inner, strict=True))
        if num_chunks > _MAX_SHARD_CHUNKS:
            raise DamagedCheckpointError(
                f"damaged: a shard has {num_chunks:,} chunks, but at most {_MAX_SHARD_CHUNKS:,} are allowed"
            )
        if sharding.get("index_location", "end") != "end":
            raise UnsupportedCheckpointError(
                "the zarr shards have their index at the start, but only an index at the end is supported"
            )
        index_codecs = _parse_codecs(sharding.get("index_codecs"))
        indexed = [codec.name for codec in index_codecs]
        if any(codec.settings.get("endian", "little") != "little" for codec in index_codecs):
            raise UnsupportedCheckpointError(
                "the zarr shards have an index in big-endian byte order, which is not supported"
            )
        if indexed not in (["bytes"], ["bytes", "crc32c"]):
            raise UnsupportedCheckpointError(
                f"the zarr index codecs are {_format_names(indexed)}, but only bytes, optionally followed by "
                "crc32c, is supported"
            )
        sharded, summed = True, len(indexed) == 2
        codecs = _parse_codecs(sharding.get("codecs"))
    names = [codec.name for codec in codecs]
    unknown = next((name for name in names if name not in ("bytes", *CODECS)), None)
    if unknown is not None or names[:1] != ["bytes"] or len(names) > 2:
        raise UnsupportedCheckpointError(
            f"the zarr codecs are {_format_names(names)}, but only bytes, optionally followed by "
            f"{' or '.join(CODECS)}, is supported"
        )
    if codecs[0].settings.get("endian", "little") != "little":
        raise UnsupportedCheckpointError("big-endian zarr arrays are not supported")
    dtype = parse_zarr_dtype(fields.get("data_type"))

    def format_key(position: Shape) -> str:
        return str(separator).join(("c", *map(str, position)))

    codec = names[1] if len(names) > 1 else None
    return _ArrayHeader(
        dtype, shape, chunk, inner, codec, sharded, summed, fields.get("fill_value"), format_key
    )


def _validate_header(header: Any, version: int) -> dict[str, Any]:
    """Check that a header is a JSON object of the expected zarr version, and return it.

    Raises:
        CheckpointError: If the header is not an object, or has another version.
    """
    if not isinstance(header, dict) or header.get("zarr_format") != version:
        raise DamagedCheckpointError(
            f"damaged: the header of the array is not a valid zarr version {version} header"
        )
    return header


def _get_extension_settings(value: Any, name: str) -> dict[str, Any]:
    """Return the `configuration` of an extension in the header of a version 3 zarr array.

    An extension is, for example, a codec or a chunk grid. The result is empty if the extension has
    no settings.

    Args:
        value: Record of the extension in the header.
        name: Name that the extension must have, such as `regular` for a chunk grid.

    Raises:
        CheckpointError: If the extension has a different name, which means that it is not
            supported.
    """
    if not isinstance(value, dict) or value.get("name") != name:
        unsupported = value.get("name") if isinstance(value, dict) else value
        raise UnsupportedCheckpointError(
            f"the header has the zarr extension {format_untrusted_value(unsupported)} in a place where only "
            f"{name!r} is supported"
        )
    settings = value.get("configuration", {})
    return settings if isinstance(settings, dict) else {}


def _parse_codecs(value: Any) -> list[_Codec]:
    if not isinstance(value, list) or not all(isinstance(codec, dict) and "name" in codec for codec in value):
        raise DamagedCheckpointError("damaged: the header does not contain a list of codecs")
    return [_Codec(str(codec["name"]), _get_extension_settings(codec, codec["name"])) for codec in value]


def _format_names(names: Sequence[str]) -> str:
    """Format names from a header for an error message."""
    shown = ", ".join(map(format_untrusted_value, names[:8]))
    return f"{shown}, ..." if len(names) > 8 else shown or "(none)"


def _check_chunk_shape(shape: Shape, chunk: Shape) -> None:
    """Check that a chunk is not larger than the array in any dimension.

    Each size of a chunk must be at least 1, also in an empty dimension of the array.

    A chunk may be a shard with many inner chunks. Without this check, the header of a small array
    could declare a huge shard and, with it, any number of chunks.

    Raises:
        CheckpointError: If the chunk is larger than the array, has a size of 0, or has a different
            number of dimensions.
    """
    if len(chunk) != len(shape) or any(
        not 0 < n <= max(1, size) for n, size in zip(chunk, shape, strict=True)
    ):
        raise DamagedCheckpointError(
            f"damaged: chunks of shape {list(chunk)} do not match an array of shape {list(shape)}"
        )


def parse_zarr_dtype(name: Any) -> str:
    """Convert the name of a zarr element type to a safetensors dtype.

    Args:
        name: Name from a header: a type name such as `float32` or `bfloat16`, or a little-endian
            NumPy code such as `<f4`, which version 2 uses.

    Raises:
        CheckpointError: If the element type is not supported.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedCheckpointError(
            f"the zarr element type {format_untrusted_value(name)} is not supported"
        )
    return _DTYPES[name]


def _encode_fill_value(fill: Any, dtype: str) -> bytes:
    """Encode the fill value of an array as the bytes of one element.

    A fill value of `null` is encoded as zero, as in TensorStore. A string, such as `NaN` or
    `Infinity`, is parsed as a float.

    Args:
        fill: Fill value from the array's header.
        dtype: Safetensors dtype of the array.

    Raises:
        CheckpointError: If the value cannot be converted to the dtype.
    """
    try:
        # JSON has no NaN or Infinity, so they are strings.
        value = float(fill) if isinstance(fill, str) else fill or 0
        with np.errstate(all="ignore"):
            return np.array(value).astype(to_numpy_dtype(dtype)).reshape(()).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise UnsupportedCheckpointError(
            f"the fill value {format_untrusted_value(fill)} is not supported"
        ) from None


# Version 2 uses NumPy's codes, such as `<f4`, for the types that NumPy itself supports.
_DTYPES = {
    name: ours
    for kind, ours in get_numpy_dtype_names().items()
    for name in ((kind.name, kind.str) if kind.isbuiltin == 1 else (kind.name,))
}
