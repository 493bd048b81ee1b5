"""Write the metadata of a sharded DCP save without gathering it on one rank.

Each rank describes the pieces that it has written in a separate table, such as `__3.metadata`. The
table has the format that DCP uses for ranks that save without communicating. It consists of three
sections:

    header    the keys of the state dict, with shapes and dtypes; equal on all ranks
    pieces    opcodes that add the pieces of this rank to the containers of the header
    trailer   the end of the pickle

The pieces refer to the header only by fixed positions in the pickle's memo. Rank 0 can therefore
build `.metadata`, which DCP can load at any world size, by concatenating bytes: the header, the
pieces of all ranks, and the trailer. The pieces of all ranks are never in its memory at once.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py; Lib/pickletools.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from isal import isal_zlib

from portable.converters.formats.dcp.checksums import CHECKSUMS, TABLES_VERSION
from portable.converters.storage.output_file import write_new_file
from portable.converters.tensors.dtypes import TO_TORCH
from portable.converters.writers.torchzip_writer import (
    PickledCall,
    PickledGlobal,
    PickledObject,
    append_memo_put,
    append_pickled,
    build_torch_size,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.torchzip_writer import PickleMemo

Dims = tuple[int, ...]
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_INDEX_CLASS, _CHUNK_CLASS = (
    PickledGlobal(_METADATA, "MetadataIndex"),
    PickledGlobal(_METADATA, "ChunkStorageMetadata"),
)
_STORAGE_INFO_CLASS = PickledGlobal(_FILES, "_StorageInfo")
# Values that the header stores in the memo for the pieces, in addition to its keys and containers.
_MEMOIZED_CONSTANTS = (
    _INDEX_CLASS, _CHUNK_CLASS, _STORAGE_INFO_CLASS, build_torch_size(()).function, "fqn", "offset",
    "offsets", "sizes", "relative_path", "length", "checksum",
)  # fmt: skip
_STORAGE_DATA = ("storage_data",)
TRAILER = b"b."
"""Last bytes of a table and of `.metadata`."""


@dataclass(frozen=True)
class KeyEntry:
    """Key of a state dict, with the dtype and shape of its tensor.

    Attributes:
        key: Flattened key, such as `model.layers.0.weight`.
        path: Path that was flattened to the key: keys of nested dicts and indices of lists.
        dtype: Safetensors dtype. None if the value is not a tensor.
        shape: Unsharded shape of a tensor.
    """

    key: str
    path: tuple[str | int, ...]
    dtype: str | None = None
    shape: Dims = ()


@dataclass(frozen=True)
class WrittenPiece:
    """Item in a shard file: a piece of a tensor, or another value.

    Attributes:
        key: Key of the state dict.
        offsets: Position of the piece in its tensor. None if the item is not a tensor.
        sizes: Shape of the piece.
        offset: Position of the item in the file in bytes.
        length: Size of the item in the file in bytes.
        checksum: CRC32 of the item. See `portable.converters.read_item_checksums`.
    """

    key: str
    offsets: Dims | None
    sizes: Dims
    offset: int
    length: int
    checksum: int


class Box(NamedTuple):
    """Rectangular part of a tensor.

    Attributes:
        offsets: First index of the part in each dimension.
        sizes: Shape of the part.
    """

    offsets: Dims
    sizes: Dims


@dataclass(frozen=True)
class TableRecord:
    """Summary of a rank's table, which each rank sends to rank 0.

    Its size is independent of the number of tensors.

    Attributes:
        name: Name of the table, such as `__3.metadata`.
        nbytes: Size of the table in bytes.
        crc32: CRC32 of the table.
        header_crc32: CRC32 of the header. Must be equal on all ranks.
        pieces_nbytes: Size of the table's pieces section in bytes, which is copied to `.metadata`.
        numel: Number of tensor elements that these pieces contain.
        boxes: For each unsharded shape, the smallest box that contains all pieces of the tensors with
            this shape. Keyed by `format_shape_key(shape)`.
    """

    name: str
    nbytes: int
    crc32: int
    header_crc32: int
    pieces_nbytes: int
    numel: int
    boxes: dict[str, Box] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTable:
    """In-memory table of one rank.

    Attributes:
        header: Header section of the table, equal on all ranks.
        pieces: Pieces section of the table, which is copied to `.metadata`.
        record: Summary of the table for rank 0.
    """

    header: bytes
    pieces: bytes
    record: TableRecord


class EncodedRankTable(NamedTuple):
    """Table of one rank, and the encoded content of its file."""

    table: RankTable
    content: bytes


def build_rank_table(
    table_name: str,
    shard_file: str,
    keys: Sequence[KeyEntry],
    owned_pieces: Sequence[WrittenPiece],
    copied_pieces: Sequence[WrittenPiece] = (),
) -> EncodedRankTable:
    """Build the table for the pieces that a rank has written to one shard file.

    Args:
        table_name: Name of the table, such as `__3.metadata`.
        shard_file: Name of the shard file.
        keys: All keys of the state dict, in the same order on all ranks.
        owned_pieces: Pieces that are listed in `.metadata`.
        copied_pieces: Pieces that another rank lists in its `owned_pieces`. They are listed in this
            rank's table but not in `.metadata`, so that this rank can load them without reading other
            tables.

    Returns:
        The table, and the content of its file.
    """
    header, memo = _encode_header(keys)
    shapes = {entry.key: entry.shape for entry in keys}
    owned_bytes, copied_bytes = (
        _encode_pieces(shard_file, owned_pieces, memo),
        _encode_pieces(shard_file, copied_pieces, memo),
    )
    content = header + owned_bytes + copied_bytes + TRAILER
    boxes: dict[str, Box] = {}
    for piece in (*owned_pieces, *copied_pieces):
        if piece.offsets is not None and 0 not in piece.sizes:
            shape = format_shape_key(shapes[piece.key])
            boxes[shape] = _extend_box(boxes.get(shape), piece.offsets, piece.sizes)
    numel = sum(_compute_numel(piece.sizes) for piece in owned_pieces if piece.offsets is not None)
    record = TableRecord(
        table_name,
        len(content),
        isal_zlib.crc32(content),
        isal_zlib.crc32(header),
        len(owned_bytes),
        numel,
        boxes,
    )
    return EncodedRankTable(RankTable(header, owned_bytes, record), content)


def format_shape_key(shape: Dims) -> str:
    """Format a tensor shape as a key of `TableRecord.boxes`, such as `"4096x512"`."""
    return "x".join(map(str, shape))


def count_elements(keys: Iterable[KeyEntry]) -> int:
    """Return the total number of elements in the unsharded tensors of a state dict."""
    return sum(_compute_numel(entry.shape) for entry in keys if entry.dtype is not None)


def write_rank_tables_index(
    folder: AnyPath, records: Sequence[TableRecord], *, metadata_crc32: int, metadata_nbytes: int
) -> None:
    """Write `shard_checksums.json`, which lists the tables of all ranks.

    Args:
        folder: Folder of the checkpoint.
        records: Summaries of all tables.
        metadata_crc32: CRC32 of `.metadata`.
        metadata_nbytes: Size of `.metadata` in bytes.
    """
    document = {
        "version": TABLES_VERSION,
        "metadata": {".metadata": metadata_crc32, **{record.name: record.crc32 for record in records}},
        "bytes": {".metadata": metadata_nbytes, **{record.name: record.nbytes for record in records}},
        "boxes": {record.name: record.boxes for record in records},
    }
    write_new_file(folder / CHECKSUMS, (json.dumps(document, separators=(",", ":")) + "\n").encode())


def _compute_numel(sizes: Dims) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _extend_box(box: Box | None, offsets: Dims, sizes: Dims) -> Box:
    """Return the smallest box that contains both `box` and a piece.

    Args:
        box: Box to extend. If None, the result is the box of the piece.
        offsets: First index of the piece in each dimension.
        sizes: Shape of the piece.
    """
    if box is None:
        return Box(offsets, sizes)
    low = tuple(map(min, box.offsets, offsets))
    stops = zip(*box, offsets, sizes, strict=True)
    high = (max(a + b, c + d) for a, b, c, d in stops)
    return Box(low, tuple(stop - start for start, stop in zip(low, high, strict=True)))


def _encode_header(keys: Sequence[KeyEntry]) -> tuple[bytes, PickleMemo]:
    """Encode the header section of a table.

    Returns:
        The encoded header, and a memo of opcodes that refer to the header's values. The pieces use
        these opcodes.
    """
    out, memo = bytearray(b"\x80\x02"), dict["Hashable", bytes]()
    for constant in _MEMOIZED_CONSTANTS:
        append_pickled(constant, out, memo)
        out += b"0"
    append_pickled(PickledGlobal(_METADATA, "Metadata"), out, memo)
    out += b")\x81}("
    append_pickled("state_dict_metadata", out, memo)
    out += b"}("
    for entry in keys:
        append_pickled(entry.key, out, memo)
        if entry.dtype is None:
            append_pickled(PickledObject(PickledGlobal(_METADATA, "BytesStorageMetadata"), {}), out, memo)
            continue
        append_pickled(PickledGlobal(_METADATA, "TensorStorageMetadata"), out, memo)
        out += b")\x81}("
        for constant, value in (
            ("properties", _build_tensor_properties(entry.dtype)),
            ("size", build_torch_size(entry.shape)),
        ):
            append_pickled(constant, out, memo)
            append_pickled(value, out, memo)
        append_pickled("chunks", out, memo)
        out += b"]"
        append_memo_put(("chunks", entry.key), out, memo)
        out += b"ub"
    out += b"u"
    append_pickled("planner_data", out, memo)
    append_pickled({entry.key: entry.path for entry in keys}, out, memo)
    append_pickled("storage_meta", out, memo)
    out += b"N"
    append_pickled("version", out, memo)
    append_pickled("1.0.0", out, memo)
    append_pickled("storage_data", out, memo)
    out += b"}"
    append_memo_put(_STORAGE_DATA, out, memo)
    out += b"u"
    return bytes(out), memo


def _build_tensor_properties(dtype: str) -> PickledObject:
    properties = (
        PickledGlobal("torch", TO_TORCH[dtype]),
        PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        PickledCall(PickledGlobal(_METADATA, "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return PickledObject(PickledGlobal(_METADATA, "TensorProperties"), properties)


def _encode_pieces(shard_file: str, pieces: Sequence[WrittenPiece], header_memo: PickleMemo) -> bytes:
    """Encode the opcodes that add pieces to the containers created by the header.

    Args:
        shard_file: Name of the file that contains the pieces.
        pieces: Pieces to encode.
        header_memo: Memo that `_encode_header` returned. It is not changed.

    Returns:
        The opcodes, or empty bytes if there are no pieces.
    """
    if not pieces:
        return b""
    memo = dict(header_memo)
    out = bytearray()
    append_pickled(shard_file, out, memo)
    out += b"0"
    for piece in pieces:
        index: dict[str, object] = {"fqn": piece.key}
        if piece.offsets is not None:
            index["offset"] = build_torch_size(piece.offsets)
            out += memo["chunks", piece.key]
            chunk = {"offsets": build_torch_size(piece.offsets), "sizes": build_torch_size(piece.sizes)}
            append_pickled(PickledObject(_CHUNK_CLASS, chunk), out, memo)
            out += b"a0"
        out += memo[_STORAGE_DATA]
        append_pickled(PickledObject(_INDEX_CLASS, index), out, memo)
        stored = {
            "relative_path": shard_file,
            "offset": piece.offset,
            "length": piece.length,
            "checksum": piece.checksum,
        }
        append_pickled(PickledObject(_STORAGE_INFO_CLASS, stored), out, memo)
        out += b"s0"
    return bytes(out)


def iter_metadata_bytes(first_table: RankTable, other_pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of `.metadata`, section by section.

    Args:
        first_table: Table of rank 0.
        other_pieces: Pieces sections of the other tables, in the order of the ranks.
    """
    yield first_table.header
    yield first_table.pieces
    yield from other_pieces
    yield TRAILER
