"""Zarr arrays of versions 2 and 3, as Orbax writes them: a JSON header, and a value for each chunk.

A chunk of version 3 may be a shard, which holds smaller chunks and, at its end, where each lies. Chunks at
the upper edges are stored whole. What is not here (filters, Fortran order, other codecs) is refused by name.

Source: https://zarr-specs.readthedocs.io (v2; v3 with the codecs bytes, zstd, gzip, crc32c,
sharding_indexed).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from converters.containers.crc32c import crc32c
from converters.containers.pickle_reader import shown
from converters.errors import CheckpointError
from converters.storage.bytes import Deferred, Slice
from converters.storage.compressed import CODECS, Compressed
from converters.tensors.dtypes import FROM_NUMPY, itemsize
from converters.tensors.tensor import MAX_DIMS, Box, Tensor, View, possible_shape, row_major

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.storage.bytes import Source
    from converters.tensors.tensor import Shape

V2, V3 = ".zarray", "zarr.json"
_ABSENT = (1 << 64) - 1


@dataclass(frozen=True)
class _Header:
    """What the JSON of an array says.

    Attributes:
        chunk: shape of a stored value.
        inner: shape of the chunks within it, which is `chunk` where they are not sharded.
        codec: of the inner chunks, None for plain bytes.
        sharded: whether an index ends each value.
        summed: whether a CRC-32C ends each index.
        key: position in the grid -> the name of the value.
    """

    dtype: str
    shape: Shape
    chunk: Shape
    inner: Shape
    codec: str | None
    sharded: bool
    summed: bool
    key: Callable[[Shape], str]


def read_zarr(
    name: str, header: Any, version: int, values: Callable[[str], Source], where: str, limit: int
) -> Tensor:
    """One array.

    Args:
        name: of the tensor, for messages.
        header: the parsed `.zarray` (version 2) or `zarr.json` (version 3).
        values: key of a chunk (`0.1`, `c/0/1`) -> its bytes; CheckpointError where it is missing.
        where: the checkpoint, for messages.
        limit: the array has at most so many chunks.

    Raises:
        CheckpointError: the header is damaged, or holds something that is not read; a chunk is missing.
    """
    try:
        found = _version2(header) if version == 2 else _version3(header)
    except _RefusedError as error:
        raise CheckpointError(f"{where}: {name}: {error}") from None
    shape = possible_shape(name, found.dtype, found.shape)
    grid = [-(-size // step) for size, step in zip(shape, found.chunk, strict=True)]
    if prod(grid) > limit:
        raise CheckpointError(f"{where}: {name}: damaged, it would have {prod(grid):,} chunks")
    boxes = []
    for position in product(*map(range, grid)):
        key = found.key(position)
        low = tuple(at * step for at, step in zip(position, found.chunk, strict=True))
        for offset, view in _inner_chunks(found, values(key), low, f"{where}: {name}/{key}"):
            sizes = tuple(
                min(step, size - at) for step, size, at in zip(found.inner, shape, offset, strict=True)
            )
            boxes.append(Box(offset, sizes, view))
    return Tensor(name, found.dtype, shape, boxes)


def _inner_chunks(header: _Header, value: Source, low: Shape, where: str) -> Iterator[tuple[Shape, View]]:
    """Where each chunk of one stored value begins in the array, and its elements."""
    strides = row_major(header.inner, itemsize(header.dtype))
    nbytes = prod(header.inner) * itemsize(header.dtype)
    counts = [whole // step for whole, step in zip(header.chunk, header.inner, strict=True)]
    index = _Index(value, prod(counts), summed=header.summed, where=where) if header.sharded else None
    for number, at in enumerate(np.ndindex(*counts)):
        offset = tuple(low[d] + at[d] * header.inner[d] for d in range(len(low)))
        if any(start >= size for start, size in zip(offset, header.shape, strict=True)):
            continue  # beyond the upper edge
        sizes = [
            min(n, size - start) for n, size, start in zip(header.inner, header.shape, offset, strict=True)
        ]
        used = prod(sizes) * itemsize(header.dtype)
        yield offset, View(_chunk(header, value, index, number, nbytes, used, where), 0, strides)


def _chunk(
    header: _Header, value: Source, index: _Index | None, number: int, nbytes: int, used: int, where: str
) -> Source:
    if header.codec is None:
        if index is None and value.nbytes != nbytes:
            raise CheckpointError(f"{where}: damaged, a chunk of {nbytes:,} bytes has {value.nbytes:,}")
        return value if index is None else Deferred(nbytes, lambda: index.chunk(number, nbytes))

    def stored() -> Source:
        return value if index is None else index.chunk(number)

    return Compressed(stored, header.codec, nbytes, used, where)


class _Index:
    """Where the chunks of a shard lie: two integers for each at its end, read once."""

    def __init__(self, value: Source, count: int, *, summed: bool, where: str) -> None:
        self._value = value
        self._count = count
        self._summed = summed
        self._where = where
        self._read: list[tuple[int, int]] | None = None

    def chunk(self, number: int, nbytes: int | None = None) -> Source:
        """The bytes of one chunk; refused if they are not `nbytes`."""
        if self._read is None:
            self._read = self._table()
        offset, length = self._read[number]
        if offset == _ABSENT:
            raise CheckpointError(f"{self._where}: a chunk is missing")
        if offset + length > self._value.nbytes or (nbytes is not None and length != nbytes):
            raise CheckpointError(f"{self._where}: damaged, the index of a shard is wrong")
        return Slice(self._value, offset, length)

    def _table(self) -> list[tuple[int, int]]:
        nbytes = 16 * self._count + 4 * self._summed
        if nbytes > self._value.nbytes:
            raise CheckpointError(f"{self._where}: truncated or damaged, a shard has no index")
        raw = bytearray(nbytes)
        self._value.read_into(memoryview(raw), self._value.nbytes - nbytes, set())
        if self._summed and crc32c(memoryview(raw)[:-4]) != struct.unpack("<I", raw[-4:])[0]:
            raise CheckpointError(f"{self._where}: damaged, the checksum of a shard's index does not match")
        return list(struct.iter_unpack("<QQ", memoryview(raw)[: 16 * self._count]))


class _RefusedError(Exception):
    """Why a header cannot be read."""


def _version2(header: Any) -> _Header:
    fields = _fields(header, 2)
    shape, chunk = _shape(fields, "shape"), _shape(fields, "chunks")
    _check_chunk(shape, chunk)
    if fields.get("filters"):
        raise _RefusedError("zarr filters are not supported")
    if fields.get("order", "C") != "C":
        raise _RefusedError(f"the zarr order {shown(fields['order'])} is not supported")
    compressor = fields.get("compressor")
    codec = compressor.get("id") if isinstance(compressor, dict) else None
    if compressor is not None and codec not in CODECS:
        raise _RefusedError(f"the zarr compressor {shown(codec)} is not supported")
    separator = fields.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise _RefusedError("damaged, its separator is neither . nor /")
    dtype = _dtype(fields.get("dtype"))

    def key(position: Shape) -> str:
        return str(separator).join(map(str, position)) or "0"

    return _Header(dtype, shape, chunk, chunk, codec, sharded=False, summed=False, key=key)


def _version3(header: Any) -> _Header:
    fields = _fields(header, 3)
    shape = _shape(fields, "shape")
    chunk = _shape(_configuration(fields.get("chunk_grid"), "regular"), "chunk_shape")
    _check_chunk(shape, chunk)
    separator = _configuration(fields.get("chunk_key_encoding"), "default").get("separator", "/")
    if separator not in (".", "/"):
        raise _RefusedError("damaged, its separator is neither . nor /")
    if fields.get("storage_transformers"):
        raise _RefusedError("zarr storage transformers are not supported")
    codecs = _codecs(fields.get("codecs"))
    inner, sharded, summed = chunk, False, False
    if codecs and codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            raise _RefusedError(
                f"the zarr codec {shown(codecs[1][0])} after sharding_indexed is not supported"
            )
        sharding = codecs[0][1]
        inner = _shape(sharding, "chunk_shape")
        if len(inner) != len(chunk) or any(n < 1 or whole % n for whole, n in zip(chunk, inner, strict=True)):
            raise _RefusedError("damaged, its chunks do not tile a shard")
        if prod(whole // n for whole, n in zip(chunk, inner, strict=True)) > 1 << 24:
            raise _RefusedError("damaged, a shard has too many chunks")
        if sharding.get("index_location", "end") != "end":
            raise _RefusedError("a zarr index at the start of a shard is not supported")
        indexed = [name for name, _ in _codecs(sharding.get("index_codecs"))]
        if indexed not in (["bytes"], ["bytes", "crc32c"]):
            raise _RefusedError(f"the zarr index codecs {shown(indexed)} are not supported")
        sharded, summed = True, len(indexed) == 2
        codecs = _codecs(sharding.get("codecs"))
    names = [name for name, _ in codecs]
    unknown = next((name for name in names if name not in ("bytes", *CODECS)), None)
    if unknown is not None or names[:1] != ["bytes"] or len(names) > 2:
        raise _RefusedError(f"the zarr codecs {shown(names)} are not supported")
    if codecs[0][1].get("endian", "little") != "little":
        raise _RefusedError("big-endian values are not supported")
    dtype = _dtype(fields.get("data_type"))

    def key(position: Shape) -> str:
        return str(separator).join(("c", *map(str, position)))

    return _Header(dtype, shape, chunk, inner, names[1] if len(names) > 1 else None, sharded, summed, key)


def _fields(header: Any, version: int) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("zarr_format") != version:
        raise _RefusedError(f"damaged, no header of zarr version {version}")
    return header


def _configuration(value: Any, name: str) -> dict[str, Any]:
    """The settings of a named extension of version 3; refused under another name."""
    if not isinstance(value, dict) or value.get("name") != name:
        raise _RefusedError(f"{shown(value)} where zarr's {name!r} is expected is not supported")
    settings = value.get("configuration", {})
    return settings if isinstance(settings, dict) else {}


def _codecs(value: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list) or not all(isinstance(codec, dict) for codec in value):
        raise _RefusedError("damaged, it names no codecs")
    return [
        (str(codec.get("name")), _configuration(codec, codec["name"])) for codec in value if "name" in codec
    ]


def _shape(fields: dict[str, Any], name: str) -> Shape:
    shape = fields.get(name)
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise _RefusedError(f"damaged, it has no {name}")
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in shape):
        raise _RefusedError(f"damaged, its {name} is {shown(shape)}")
    return tuple(shape)


def _check_chunk(shape: Shape, chunk: Shape) -> None:
    """Refuse chunks that do not fit the array: a few bytes could then stand for any number of them."""
    if len(chunk) != len(shape) or any(
        not 0 < n <= max(1, size) for n, size in zip(chunk, shape, strict=True)
    ):
        raise _RefusedError(f"damaged, chunks of {list(chunk)} in an array of {list(shape)}")


def _dtype(name: Any) -> str:
    """The safetensors name of an element type."""
    if isinstance(name, str):
        kind = getattr(ml_dtypes, name, None) if name in _SPECIAL else None
        try:
            kind = np.dtype(kind if kind is not None else name)
        except TypeError:
            kind = None
        if kind is not None and kind in FROM_NUMPY and name[:1] != ">":
            return FROM_NUMPY[kind]
    raise _RefusedError(f"the element type {shown(name)} is not supported")


_SPECIAL = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"})
