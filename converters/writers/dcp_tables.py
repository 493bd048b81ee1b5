"""Write the metadata of a sharded DCP save without gathering it on one rank.

Each rank describes the pieces that it has written in a separate table, such as `__3.metadata`. The
table has the format that DCP uses for ranks that save without communicating. It consists of three
sections:

    header    the keys of the state dict, with shapes and dtypes; equal on all ranks
    pieces    opcodes that add the pieces of this rank to the containers of the header
    trailer   the end of the pickle

The pieces refer to the header only by fixed positions in the pickle's memo. Rank 0 can therefore
build `.metadata`, which DCP can load at any world size, by concatenating bytes: the header, the
pieces of all ranks, and the trailer. The memory of rank 0 never contains the pieces of all ranks at
once.

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
        key: Key of the item in the state dict.
        offsets: Index of the piece's first element along each dimension of its tensor. None if the
            item is not a tensor.
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
    """Summary of a rank's table. Each rank sends its summary to rank 0.

    The table lists the pieces of tensors that the rank has written. The size of the summary is
    independent of the number of tensors.

    Some pieces in the table are duplicates: another rank lists the same piece. `.metadata` contains
    each piece only once, so it does not list the duplicates.

    Attributes:
        name: Name of the table, such as `__3.metadata`.
        nbytes: Size of the table in bytes.
        crc32: CRC32 of the table.
        header_crc32: CRC32 of the header. Must be equal on all ranks.
        pieces_nbytes: Size in bytes of the section that becomes part of `.metadata`. It lists the
            rank's pieces without duplicates.
        numel: Number of tensor elements in the rank's pieces without duplicates.
        boxes: For each full (unsharded) tensor shape, the smallest box that contains all pieces of
            tensors with this shape, including duplicates. Keyed by `format_shape_key(shape)`, for
            example `"4096x512"`.
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
    """In-memory table that describes the tensor pieces of one rank.

    Attributes:
        header: Section with the keys, shapes, and dtypes of the state dict. Equal on all ranks.
        pieces: Section that describes this rank's pieces, without the duplicates that another rank
            lists. It is copied to `.metadata`, the metadata file of DCP.
        record: Summary of this table, which the rank sends to rank 0.
    """

    header: bytes
    pieces: bytes
    record: TableRecord


class EncodedRankTable(NamedTuple):
    """Table of the pieces that one rank has written, as an object and as the content of a file.

    Attributes:
        table: Table in memory: its summary, and the two sections from which `.metadata` is built.
        content: Content of the table's file.
    """

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
    """Return the total number of elements of all tensors in a state dict.

    Sharded tensors are counted with their full (unsharded) shape.
    """
    return sum(_compute_numel(entry.shape) for entry in keys if entry.dtype is not None)


def write_rank_tables_index(
    folder: AnyPath, records: Sequence[TableRecord], *, metadata_crc32: int, metadata_nbytes: int
) -> None:
    """Write `shard_checksums.json`, which lists the metadata tables of all ranks.

    A rank's table, such as `__3.metadata`, describes the pieces that the rank has written.

    Args:
        folder: Folder of the checkpoint.
        records: Summaries of all tables.
        metadata_crc32: CRC32 of `.metadata`.
        metadata_nbytes: Size of `.metadata` in bytes.

    Raises:
        OSError: If a local file already exists or cannot be written.
        RemoteError: If the object cannot be written to the object store.
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
    """Encode the header section of a table, which is the beginning of a pickle.

    The header contains the keys of the state dict, with their shapes and dtypes. The pickle is
    continued by the next section, which describes the pieces, and ends with `TRAILER`.

    Returns:
        The encoded header, and its pickle memo. The memo maps each memoized value to the opcodes
        that load it again. The next section uses these opcodes to refer to values of the header.
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
    """Encode the pickle opcodes that add a rank's pieces to the metadata.

    The pickle begins with a header (see `_encode_header`), which creates an empty list of chunks
    for each tensor and an empty dict of storage positions. The opcodes add each piece of a tensor
    to the list of this tensor, and the location of each piece to the dict. A value that is not a
    tensor is a single piece, and only its location is added.

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
    """Yield the content of the DCP file `.metadata`, section by section.

    Each rank has a table, which describes the tensor pieces that the rank saved.

    Args:
        first_table: Table of rank 0. Its sections `header` and `pieces` are used.
        other_pieces: Section `pieces` of each other rank's table, in rank order.
    """
    yield first_table.header
    yield first_table.pieces
    yield from other_pieces
    yield TRAILER
