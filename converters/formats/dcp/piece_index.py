"""Memory-mapped index of the pieces (chunks) in a DCP folder, written by one process per node.

`.metadata` is a pickle of all pieces of all ranks. With a million pieces, parsing it takes
a minute and gigabytes of memory, although a process that reads a few slices needs only a
few pieces. The index stores the same information as numbers, which are memory-mapped
instead of parsed:

    8 bytes   length of the description
    JSON      files, and for each key its path, dtype and shape, and the position of its rows
    zeros     padding to a multiple of 64 bytes
    int64     for each piece a row: offsets, sizes, file index, offset, length, checksum

The row of a pickled value has only the last four columns. A file index or a checksum of -1
means that there is none. The index itself has no checksum, because only processes of one
user on one machine read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.converters.errors import DamagedCheckpointError
from portable.converters.formats.dcp.checksums import CHECKSUMS, Region, list_metadata_files
from portable.converters.formats.dcp.metadata import (
    ItemLocation,
    TensorEntry,
    ValueEntry,
    format_chunk_key,
    read_folder_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from portable.converters.formats.dcp.metadata import Entry
    from portable.converters.storage.folder import CheckpointFolder

BuildOnce = Callable[[str, Callable[[Path], None]], "Path | None"]
"""Function that writes a file in one process of each node.

Its arguments are a key that identifies the content, and a function that writes the file to a given
path. It returns the path of the file, or None if the processes of this node cannot share files.
"""
_ALIGNMENT = 64
_FACTS = 4
"""Number of columns after the offsets and sizes in a row: file index, offset, length, and checksum."""


class PieceIndex:
    """Memory-mapped index of the pieces (chunks) in a DCP folder.

    Args:
        folder: Folder of the checkpoint.
        path: Path of the index.

    Attributes:
        entries: Entries of all keys of the state dict. Tensor entries do not list any pieces. Use
            `get_entry_for_region` to look up the pieces of a region.

    Raises:
        OSError: If the index cannot be opened.
    """

    def __init__(self, folder: CheckpointFolder, path: Path) -> None:
        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            description = json.loads(file.read(nbytes))
            start = _round_up_to_alignment(file.tell())
            has_rows = file.seek(0, 2) > start
        empty = np.zeros(0, np.int64)
        # Convert to a plain array, because slices of np.memmap are slow.
        self._numbers: npt.NDArray[np.int64] = (
            np.asarray(np.memmap(path, np.int64, "r", start)) if has_rows else empty
        )
        self._files: list[str] = description["files"]
        self._row_positions: dict[str, tuple[int, int]] = {}
        self.entries: dict[str, Entry] = {}
        for key, stored_path, dtype, shape, position, count in description["keys"]:
            key_path = None if stored_path is None else tuple(stored_path)
            if dtype is None:
                (row,) = self._numbers[position : position + _FACTS].reshape(1, _FACTS).tolist()
                self.entries[key] = ValueEntry(folder, key, key_path, self._to_item_location(row))
            else:
                self.entries[key] = TensorEntry(folder, key, key_path, dtype, tuple(shape), (), {})
                self._row_positions[key] = position, count

    def get_entry_for_region(self, key: str, region: Region) -> TensorEntry:
        """Return the entry of a tensor, with the pieces that may overlap with a region.

        Args:
            key: Key of a tensor.
            region: Region of the tensor.
        """
        entry = self.entries[key]
        assert isinstance(entry, TensorEntry)
        dims, (position, count) = len(entry.shape), self._row_positions[key]
        width = 2 * dims + _FACTS
        rows = self._numbers[position : position + count * width].reshape(count, width)
        for axis, (start, size) in enumerate(zip(*region, strict=True)):
            starts = rows[:, axis]
            rows = rows[(starts < start + size) & (starts + rows[:, dims + axis] > start)]
        chunks: list[Region] = []
        items: dict[str, ItemLocation] = {}
        for row in rows.tolist():
            offsets, sizes, facts = tuple(row[:dims]), tuple(row[dims : 2 * dims]), row[2 * dims :]
            chunks.append(Region(offsets, sizes))
            if facts[0] >= 0:
                items[format_chunk_key(offsets)] = self._to_item_location(facts)
        return replace(entry, chunks=tuple(chunks), items=items)

    def _to_item_location(self, facts: list[int]) -> ItemLocation:
        """Convert the last four columns of a row in this index to an `ItemLocation`.

        Args:
            facts: Values of the columns: file index, offset, length, and checksum of a chunk or
                pickled value. A checksum of -1 means that there is none.
        """
        file, offset, length, checksum = facts
        return ItemLocation(self._files[file], offset, length, None if checksum < 0 else checksum)


def write_piece_index(entries: Mapping[str, Entry], path: Path) -> None:
    """Write the index of the pieces in a DCP folder.

    A piece is a chunk of a tensor or a pickled value.

    Args:
        entries: Entries of all tensors and values in the folder, keyed by their keys in the state
            dict.
        path: Path of the new file.

    Raises:
        CheckpointError: If a chunk and its tensor have different numbers of dimensions, or if a
            checksum is not a CRC32.
    """
    files: dict[str, int] = {}
    keys: list[Any] = []
    blocks: list[npt.NDArray[np.int64]] = []
    position = 0

    def encode_item(item: ItemLocation | None) -> tuple[int, ...]:
        if item is None:
            return -1, 0, 0, -1
        checksum = -1 if item.checksum is None else item.checksum
        if item.checksum is not None and not 0 <= checksum < 1 << 32:
            raise DamagedCheckpointError(
                f"{entry.folder.path}: damaged: a recorded checksum of {item.file} ({checksum}) is not a "
                "CRC32"
            )
        return files.setdefault(item.file, len(files)), item.offset, item.length, checksum

    for key, entry in entries.items():
        if isinstance(entry, TensorEntry):
            rows = [
                (*offsets, *sizes, *encode_item(entry.items.get(format_chunk_key(offsets))))
                for offsets, sizes in entry.chunks
                if len(offsets) == len(sizes) == len(entry.shape)
            ]
            if len(rows) < len(entry.chunks):
                raise DamagedCheckpointError(
                    f"{entry.folder.path}: damaged: a chunk of {key!r} has a different number of dimensions "
                    "from the tensor"
                )
            keys.append((key, entry.path, entry.dtype, entry.shape, position, len(rows)))
        else:
            rows = [encode_item(entry.item)]
            keys.append((key, entry.path, None, (), position, 1))
        blocks.append(np.array(rows, np.int64).reshape(-1))  # every number is a size below 2**63
        position += len(blocks[-1])
    description = json.dumps({"files": list(files), "keys": keys}, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(description).to_bytes(8, "little") + description)
        file.write(bytes(_round_up_to_alignment(file.tell()) - file.tell()))
        for block in blocks:
            file.write(block.data)


def open_piece_index(folder: CheckpointFolder, build_once: BuildOnce) -> PieceIndex | None:
    """Open the index of a DCP folder. One process per node reads the metadata and builds the index.

    Args:
        folder: Folder of the checkpoint.
        build_once: Function that writes a file in one process per node.

    Returns:
        The index. None if the processes of this node cannot share files, or if the index cannot be
        opened.

    Raises:
        CheckpointError: If the metadata is damaged.
    """
    path = build_once(
        _describe_metadata_files(folder), lambda path: write_piece_index(read_folder_metadata(folder), path)
    )
    if path is None:
        return None
    try:
        return PieceIndex(folder, path)
    except OSError:  # another process has removed it, because it could not read the checkpoint
        return None


def _describe_metadata_files(folder: CheckpointFolder) -> str:
    """Return a string that changes when a metadata file of the folder changes.

    The string is the cache key of the piece index, so a changed folder gets a new index. It
    contains the path of the folder. For each metadata file, it also contains the name and
    attributes such as the size and the modification time.
    """
    facts: list[object] = [str(folder.path)]
    for name in (*list_metadata_files(folder.path), CHECKSUMS):
        path = folder.path / name
        if not path.is_file():
            continue
        if isinstance(path, Path):
            status = path.stat()
            facts.append((name, status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino))
        else:
            facts.append((name, path.fetch_status()))
    return repr(facts)


def _round_up_to_alignment(position: int) -> int:
    """Round a position in bytes up to a multiple of `_ALIGNMENT`."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT
