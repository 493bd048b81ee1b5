"""Read the metadata of other ranks only when it is needed.

Each rank writes a table of the pieces (chunks) that it saved. `.metadata` describes the pieces of
all ranks. In a job with a thousand ranks, this is a thousand times as much as one rank needs. A
rank that resumes begins with one table. If the world size has not changed, this is its own table.
When it reads a slice that this table does not cover, it uses `shard_checksums.json` to choose the
other tables to read.

Checkpoints written by previous versions or by other programs have no tables. One process per node
parses their `.metadata` and writes an index, and the other processes map the index
(`portable.converters.formats.dcp.piece_index`).
"""

from __future__ import annotations

from math import prod
from threading import RLock
from typing import TYPE_CHECKING

from portable.converters.errors import DamagedCheckpointError
from portable.converters.formats.dcp.checksums import Region, read_shard_checksums
from portable.converters.formats.dcp.metadata import TensorEntry, read_metadata_file
from portable.converters.formats.dcp.piece_index import PieceIndex, open_piece_index
from portable.converters.tensors.tensor import Box, Tensor, check_shape
from portable.converters.tensors.tiling import check_boxes_cover_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.converters.formats.dcp.checksums import ShardChecksums
    from portable.converters.formats.dcp.metadata import Dims, Entry
    from portable.converters.formats.dcp.piece_index import BuildOnce
    from portable.converters.storage.folder import CheckpointFolder

_COMPLETE_TABLE = ".metadata"


class ShardTables:
    """Tables of a checkpoint, one per rank. A table is only read if a requested slice needs it.

    Args:
        folder: Folder of the checkpoint.
        checksums: The `shard_checksums.json` that lists the tables, or None if the folder has none.
        first_table: Name and content of the table that has already been read.
        build_once: Function that writes a file in one process per node, for the index of `.metadata`.

    Attributes:
        entries: All keys of the state dict, as in the first table.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        checksums: ShardChecksums | None,
        first_table: tuple[str, dict[str, Entry] | PieceIndex],
        build_once: BuildOnce | None = None,
    ) -> None:
        self._folder = folder
        self._checksums = checksums
        self._build_once = build_once
        self._lock = RLock()
        name, table = first_table
        self.entries = table.entries if isinstance(table, PieceIndex) else table
        self._tables_read: dict[str, dict[str, Entry] | PieceIndex] = {name: table}

    def find_overlapping_boxes(
        self, key: str, build_boxes: Callable[[TensorEntry], list[Box]], region: Region | None
    ) -> list[Box]:
        """Find the pieces of a tensor that overlap with a region. Read tables that list them if necessary.

        Args:
            key: Key of the tensor.
            build_boxes: Function that builds the boxes of an entry.
            region: Region to cover. If None, the complete tensor.

        Returns:
            The pieces, without duplicates.

        Raises:
            CheckpointError: If a table is missing or damaged, or if pieces leave gaps or overlap.
        """
        entry = self.entries[key]
        assert isinstance(entry, TensorEntry)
        region = region or Region((0,) * len(entry.shape), entry.shape)
        with self._lock:
            boxes = self._build_boxes_from_read_tables(key, build_boxes, region)
            if sum(prod(clipped.sizes) for clipped in _clip_boxes_to_region(boxes, region)) < prod(
                region.sizes
            ):
                self._read_tables_for_region(entry.shape, region)
                boxes = self._build_boxes_from_read_tables(key, build_boxes, region)
        check_boxes_cover_once(
            f"{self._folder.path}: {key}", region.sizes, _clip_boxes_to_region(boxes, region)
        )
        return boxes

    def _build_boxes_from_read_tables(
        self, key: str, build_boxes: Callable[[TensorEntry], list[Box]], region: Region
    ) -> list[Box]:
        """Build the boxes of a tensor's pieces from the tables that have been read.

        Pieces outside the region and duplicates are omitted.

        Args:
            key: Key of the tensor.
            build_boxes: Function that builds the boxes of an entry.
            region: Region that the boxes must overlap with.

        Raises:
            CheckpointError: If tables disagree about the dtype or shape.
        """
        boxes: dict[str, Box] = {}
        for table in self._tables_read.values():
            entry = (
                table.get_entry_for_region(key, region) if isinstance(table, PieceIndex) else table.get(key)
            )
            if not isinstance(entry, TensorEntry) or (entry.dtype, entry.shape) != _get_dtype_and_shape(
                self.entries[key]
            ):
                raise DamagedCheckpointError(
                    f"{self._folder.path}: the ranks' metadata disagree about {key!r}"
                )
            for box in build_boxes(entry):
                # Use text as the key, because a file could contain numbers whose hashes collide.
                boxes.setdefault(repr((box.offsets, box.sizes)), box)
        return [
            box
            for box in boxes.values()
            if _intersect_regions(Region(box.offsets, box.sizes), region) is not None
        ]

    def _read_tables_for_region(self, shape: Dims, region: Region) -> None:
        """Read the tables that may list pieces in a region.

        If they are larger than `.metadata`, read `.metadata` or its index instead. Does nothing if the
        complete metadata has already been read, or if the folder has no tables.

        Args:
            shape: Shape of the tensor.
            region: Region of the tensor.
        """
        if _COMPLETE_TABLE in self._tables_read or self._checksums is None:
            return
        shape_key = "x".join(map(str, shape))
        names = [
            name
            for name, boxes in self._checksums.boxes.items()
            if name not in self._tables_read
            and shape_key in boxes
            and _intersect_regions(boxes[shape_key], region) is not None
        ]
        table_sizes = self._checksums.metadata_sizes
        if sum(table_sizes[name] for name in (*self._tables_read, *names)) > table_sizes[_COMPLETE_TABLE]:
            index = None if self._build_once is None else open_piece_index(self._folder, self._build_once)
            if index is not None:
                self._tables_read[_COMPLETE_TABLE] = index
                return
            names = [_COMPLETE_TABLE]
        for name in names:
            self._tables_read[name] = read_metadata_file(self._folder, name, self._checksums)


class TableBackedTensor(Tensor):
    """Tensor that looks up its boxes when it is read.

    Args:
        name: Name of the tensor, used in error messages.
        dtype: Safetensors dtype.
        shape: Full, unsharded shape.
        find_boxes: Function that returns the boxes that overlap with a region. If the region is None,
            it returns all boxes.
    """

    __slots__ = ("_find_boxes", "_last_lookup")

    def __init__(
        self, name: str, dtype: str, shape: Sequence[int], find_boxes: Callable[[Region | None], list[Box]]
    ) -> None:
        self._set_fields(name, dtype, check_shape(name, dtype, shape), ())
        self._boxes = None
        self._find_boxes = find_boxes
        self._last_lookup: tuple[Region, list[Box]] | None = None

    @property
    def boxes(self) -> Sequence[Box]:
        """Pieces of the complete tensor. Together, they cover each element exactly once.

        Reads all necessary tables.
        """
        if self._boxes is None:
            self._set_fields(self.name, self.dtype, self.shape, self._find_boxes(None))
        assert self._boxes is not None
        return self._boxes

    @property
    def pieces(self) -> int:
        """Number of boxes, or 0 for an empty tensor."""
        return len(self.boxes)

    def find_overlapping_boxes(self, starts: Dims, sizes: Dims) -> Sequence[Box]:
        """Return the boxes that overlap with a region. Read tables if necessary.

        The last result is cached, because reading a large slice calls this method several times with the
        same region.
        """
        if self._boxes is not None or not starts:
            return super().find_overlapping_boxes(starts, sizes)
        # A slice is read in several regions if it is larger than a buffer.
        if self._last_lookup is None or self._last_lookup[0] != (starts, sizes):
            region = Region(starts, sizes)
            self._last_lookup = region, self._find_boxes(region)
        return self._last_lookup[1]

    def release(self) -> None:
        """Release the data cached by previous reads. The tensor can still be read afterward."""
        for box in (*(self._boxes or ()), *(self._last_lookup[1] if self._last_lookup else ())):
            box.release()


def open_shard_tables(
    folder: CheckpointFolder, rank: tuple[int, int] | None, build_once: BuildOnce | None
) -> ShardTables | None:
    """Open the metadata of a checkpoint, and read only the part that this rank requires.

    If the checkpoint has tables and the reader is one of several ranks, only one table is read at
    first. It belongs to the rank at a similar position in the previous job. Otherwise, one process per
    node writes an index of `.metadata`, which is memory-mapped.

    Args:
        folder: Folder of the checkpoint.
        rank: Rank and world size of the reader. None if the reader needs all pieces.
        build_once: Function that writes a file in one process per node. None if the processes of a node
            cannot share files.

    Returns:
        The tables. None if neither tables nor an index can be used. The caller then has to read the
        complete metadata.

    Raises:
        CheckpointError: If the first table, or `.metadata`, is missing or damaged.
    """
    checksums = read_shard_checksums(folder)
    names = [] if checksums is None else sorted(checksums.boxes, key=lambda name: (len(name), name))
    if rank is not None and names and (rank[1] > 1 or len(names) == 1):
        name = names[rank[0] * len(names) // rank[1]]
        first = name, read_metadata_file(folder, name, checksums)
        return ShardTables(folder, checksums, first, build_once)
    index = None if build_once is None else open_piece_index(folder, build_once)
    return None if index is None else ShardTables(folder, checksums, (_COMPLETE_TABLE, index))


def _get_dtype_and_shape(entry: Entry) -> tuple[str, Dims] | None:
    """Return the dtype and shape of a tensor's entry, or None if the entry is a pickled value."""
    return (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else None


def _intersect_regions(box: Region, region: Region) -> Region | None:
    """Return the intersection of a box and a region, with offsets relative to the region.

    None if the intersection is empty or the numbers of dimensions differ.
    """
    if len(box.offsets) != len(region.offsets):
        return None
    lows, sizes = [], []
    for offset, size, start, extent in zip(*box, *region, strict=True):
        low, high = max(offset, start), min(offset + size, start + extent)
        if low >= high:
            return None
        lows.append(low - start)
        sizes.append(high - low)
    return Region(tuple(lows), tuple(sizes))


def _clip_boxes_to_region(boxes: Sequence[Box], region: Region) -> list[Region]:
    """Clip boxes to a region, and omit those outside it.

    The offsets of the results are relative to the region.
    """
    clipped = (_intersect_regions(Region(box.offsets, box.sizes), region) for box in boxes)
    return [overlap for overlap in clipped if overlap is not None]
