"""Read the metadata of other ranks only when it is needed.

Each rank writes a table of the pieces (chunks) that it saved. `.metadata` describes the pieces of
all ranks. In a job with a thousand ranks, this is a thousand times as much as one rank needs.

A rank that resumes reads only one table at first. If the world size has not changed, this is the
rank's own table. Otherwise, it is the table at the same relative position among all tables. When
the rank reads a slice that this table does not cover, it uses `shard_checksums.json` to choose the
other tables to read.

Checkpoints written by previous versions or by other programs have no tables. One process per node
parses their `.metadata` and writes an index. The other processes memory-map the index
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
    """Metadata tables of a checkpoint, one per rank. A table lists the pieces that one rank saved.

    A table is only read if a requested slice needs it.

    Args:
        folder: Folder of the checkpoint.
        checksums: The `shard_checksums.json` that lists the tables, or None if the folder has none.
        first_table: Name and content of a table that the caller has already read. The content may
            also be a `PieceIndex`, an index of `.metadata` that lists the pieces of all ranks.
        build_once: Function with which one process per node writes the index of `.metadata` to a
            file. It returns the file's path in all processes of the node. If None, each process
            reads `.metadata` itself.

    Attributes:
        entries: Entry of each key of the state dict, from the first table. A tensor entry does not
            list the pieces in other tables.
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
        """Find the stored pieces of a tensor that overlap with a region.

        If each rank saved a table of its pieces, and the tables that have been read do not cover
        the region, further tables are read. Checkpoints of older versions or other programs have
        no such tables. Their `.metadata` lists all pieces.

        Args:
            key: Key of the tensor.
            build_boxes: Function that builds a `Box` for each piece that a tensor's entry lists.
            region: Region to cover. If None, the complete tensor.

        Returns:
            Boxes of the pieces, without duplicates. They are not clipped to the region.

        Raises:
            CheckpointError: If a table is missing or damaged, if tables describe the tensor
                differently, or if pieces leave gaps or overlap in the region.
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
        """Build a `Box` for each piece of a tensor that overlaps with a region.

        Only the metadata tables that have already been read are searched. A piece that several
        tables list is returned once.

        Args:
            key: Key of the tensor.
            build_boxes: Function that builds a `Box` for each piece that a tensor's entry lists.
            region: Region that the boxes must overlap with.

        Raises:
            CheckpointError: If a table does not contain the tensor, or if tables disagree about its
                dtype or shape.
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
                    f"{self._folder.path}: the ranks' metadata files describe {key!r} differently"
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
        """Read the tables that may list pieces in a region of a tensor.

        A table is the metadata file of one rank, which lists the pieces (chunks) that the rank
        saved. `.metadata` lists all pieces. If the tables to read and those already read are
        together larger than `.metadata`, `.metadata` or its index is read instead.

        Nothing is read if the complete metadata has already been read, or if the folder has no
        tables.

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
    """Tensor that looks up its stored pieces only when it is read.

    Each piece is a `Box`, that is, a rectangular region of the tensor with its elements.

    Args:
        name: Name of the tensor, used in error messages.
        dtype: Safetensors dtype.
        shape: Full, unsharded shape.
        find_boxes: Function that returns the boxes that overlap with a region. If the region is
            None, it returns all boxes.
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
        """Stored pieces of the complete tensor. Together, they cover each element exactly once.

        The first access may be slow, because it looks up all pieces. If the metadata tables that
        have been read do not list all pieces, the other ranks' tables that may list pieces of the
        tensor are read. `.metadata` is read instead if it is smaller than the tables already read
        and these further tables together. Empty pieces are omitted.

        Raises:
            CheckpointError: If a table is missing or damaged, or if pieces leave gaps or overlap.
        """
        if self._boxes is None:
            self._set_fields(self.name, self.dtype, self.shape, self._find_boxes(None))
        assert self._boxes is not None
        return self._boxes

    @property
    def pieces(self) -> int:
        """Number of stored pieces of the tensor, or 0 for an empty tensor.

        Empty pieces are not counted. Like `boxes`, the first access looks up all pieces.
        """
        return len(self.boxes)

    def find_overlapping_boxes(self, starts: Dims, sizes: Dims) -> Sequence[Box]:
        """Return the boxes that overlap with a region.

        Each box is one saved piece of the tensor. If necessary, this method reads further metadata
        tables, which list the pieces. The last result is cached, because reading a large slice
        calls this method several times with the same region. If `boxes` has already been accessed,
        the result may contain further boxes, because only dimension 0 is compared.
        """
        if self._boxes is not None or not starts:
            return super().find_overlapping_boxes(starts, sizes)
        # A slice is read in several regions if it is larger than a buffer.
        last_lookup = self._last_lookup  # another thread may replace it
        if last_lookup is None or last_lookup[0] != (starts, sizes):
            region = Region(starts, sizes)
            self._last_lookup = last_lookup = region, self._find_boxes(region)
        return last_lookup[1]

    def release(self) -> None:
        """Release the data cached by previous reads. The tensor can still be read afterward."""
        for box in (*(self._boxes or ()), *(self._last_lookup[1] if self._last_lookup else ())):
            box.release()


def open_shard_tables(
    folder: CheckpointFolder, rank: tuple[int, int] | None, build_once: BuildOnce | None
) -> ShardTables | None:
    """Open the metadata of a checkpoint, and read only the part that this rank requires.

    A checkpoint may contain a metadata file for each rank that saved it. Such a file is called a
    table. Each reader begins with one table: with `T` tables, reader `r` of `R` begins with table
    `r * T // R`. For example, with 4 tables and 2 readers, reader 1 begins with table 2 (counted
    from 0).

    The complete file `.metadata` is used instead if there are no tables, if the reader needs all
    pieces, or if there is only one reader but several tables. One process per node then
    writes an index of `.metadata`, and all processes of the node memory-map the index.

    Args:
        folder: Folder of the checkpoint.
        rank: Rank and world size of the reader. None if the reader needs all pieces.
        build_once: Function that writes a file in one process per node and returns its path to all
            processes of the node. None if the processes of a node cannot share files.

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
