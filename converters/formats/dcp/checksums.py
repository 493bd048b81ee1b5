"""Record checksums for DCP folders, to verify that all files are intact and belong to one save.

The items of a `.distcp` file contain CRC32s of their data but no name, so a swap of two files with
the same layout would not be noticed. `.metadata` has no checksum at all. `shard_checksums.json`, in
the folder of the shards, records the CRC32 of each metadata file and of each item's zip directory.
The zip directory contains the CRC32s of the item's data:

    {"version": 1, "metadata": {".metadata": 123}, "items": {"__0_0.distcp": {"0": 456, "7296": 789}}}

In version 2, each rank has written a table of its pieces (chunks), `__0.metadata`, in the format of
`.metadata`. Each piece in a table has its checksum as an additional attribute, `checksum`. The file
lists the tables:

    {"version": 2, "metadata": {".metadata": 123, "__0.metadata": 456},
     "bytes": {".metadata": 7890, "__0.metadata": 5678},
     "boxes": {"__0.metadata": {"128x64": [[0, 0], [64, 64]]}}}

`boxes` helps a reader to choose the tables that it needs. For each shape of a tensor, it contains
the offsets and sizes of the smallest box around all pieces of such tensors in a table.

Other tools ignore the file. This reader also opens a folder without it, but cannot check its
content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from isal import isal_zlib

from portable.converters.containers.torchzip import TorchZip
from portable.converters.errors import CheckpointError, DamagedCheckpointError
from portable.converters.manifest import MANIFEST, is_listed_in_manifest
from portable.converters.storage.byte_sources import read_json_object
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names
from portable.converters.storage.output_file import write_new_file
from portable.converters.storage.path_or_url import parse_path_or_url
from portable.converters.tensors.tensor import is_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from portable.converters.storage.path_or_url import AnyPath


CHECKSUMS = "shard_checksums.json"
"""Name of the file with the checksums."""
_VERSION = 1
TABLES_VERSION = 2
"""Version of the file if each rank has written a table."""


class Region(NamedTuple):
    """Rectangular region of a tensor.

    Attributes:
        offsets: First index along each dimension.
        sizes: Number of elements along each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ShardChecksums:
    """Content of `shard_checksums.json`.

    Attributes:
        path: Path of the file.
        metadata_checksums: CRC32 of each metadata file, keyed by name.
        items: CRC32 of each item, keyed by shard file and then by the offset of the item. None in
            version 2, because the metadata files contain these CRC32s.
        metadata_sizes: Size of each metadata file in bytes. Empty in version 1.
        boxes: Smallest region that contains all pieces in a table, keyed by table and then by the shape
            of the tensors. Empty in version 1.
    """

    path: AnyPath
    metadata_checksums: dict[str, Any]
    items: dict[str, dict[str, Any]] | None
    metadata_sizes: dict[str, int] = field(default_factory=dict)
    boxes: dict[str, dict[str, Region]] = field(default_factory=dict)

    def check_metadata_file(self, name: str, data: bytes) -> None:
        """Check the CRC32 of a metadata file.

        Args:
            name: Name of the metadata file.
            data: Complete content of the file.

        Raises:
            CheckpointError: If the CRC32 differs or is not recorded.
        """
        if self.metadata_checksums.get(name) != isal_zlib.crc32(data):
            raise DamagedCheckpointError(
                f"{self.path.parent / name}: is damaged, or from another save ({CHECKSUMS})"
            )

    def get_item_checksum(self, file: str, offset: int, recorded: Any) -> int:
        """Return the CRC32 of an item's zip directory.

        Args:
            file: Name of the shard file.
            offset: Position of the item in bytes.
            recorded: CRC32 in the metadata file, or None if the metadata file does not record it.

        Raises:
            CheckpointError: If no such item is recorded.
        """
        crc = recorded if self.items is None else self.items.get(file, {}).get(str(offset))
        if type(crc) is not int:
            raise DamagedCheckpointError(
                f"{self.path}: is damaged, or from another save: there is no item at byte {offset} of {file}"
            )
        return crc


def read_shard_checksums(folder: CheckpointFolder) -> ShardChecksums | None:
    """Read the checksums of a DCP folder.

    Returns:
        The checksums, or None if the folder has none.

    Raises:
        CheckpointError: If the file is damaged, or if it is missing although the manifest lists it.
    """
    if not (folder.path / CHECKSUMS).is_file():
        if is_listed_in_manifest(folder.path, CHECKSUMS):
            raise DamagedCheckpointError(
                f"{folder.path / CHECKSUMS}: is missing, although {MANIFEST} names it"
            )
        return None
    file = folder.get_file(CHECKSUMS)
    table = read_json_object(file)
    if table.get("version") == TABLES_VERSION:
        return _parse_tables_index(file.path, table)
    if table.get("version") != _VERSION:
        raise CheckpointError(
            f"{file.path}: is damaged, or was written by a newer version of this program; copy the "
            "checkpoint again, or update portable-train"
        )
    metadata, items = table.get("metadata"), table.get("items")
    tables = (metadata, items, *(items.values() if isinstance(items, dict) else ()))
    if (
        not isinstance(metadata, dict)
        or not isinstance(items, dict)
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise DamagedCheckpointError(f"{file.path}: damaged: the tables are missing")
    return ShardChecksums(file.path, metadata, items)


def _parse_tables_index(path: AnyPath, content: dict[str, Any]) -> ShardChecksums:
    """Parse version 2 of `shard_checksums.json`, which lists one table per rank.

    Args:
        path: Path of the file, used in error messages.
        content: Content of the file.

    Raises:
        CheckpointError: If the lists of tables are damaged or disagree.
    """
    metadata, sizes, boxes = (content.get(name) for name in ("metadata", "bytes", "boxes"))
    if (
        not isinstance(metadata, dict)
        or not isinstance(sizes, dict)
        or not isinstance(boxes, dict)
        or ".metadata" not in metadata
        or not all(type(size) is int for size in sizes.values())
        or not metadata.keys() == sizes.keys() == {".metadata", *boxes}
        or not all(is_metadata_name(name) and isinstance(table, dict) for name, table in boxes.items())
    ):
        raise DamagedCheckpointError(f"{path}: damaged: the tables are missing")
    regions = {
        name: {shape: _parse_region(path, box) for shape, box in table.items()}
        for name, table in boxes.items()
    }
    return ShardChecksums(path, metadata, None, sizes, regions)


def _parse_region(path: AnyPath, box: Any) -> Region:
    """Parse a region from JSON, a list of its offsets and its sizes.

    Raises:
        CheckpointError: If the value is not a list of two shapes with the same length.
    """
    offsets, sizes = box if isinstance(box, list) and len(box) == 2 else (None, None)
    if not is_shape(offsets) or not is_shape(sizes) or len(offsets) != len(sizes):
        raise DamagedCheckpointError(f"{path}: damaged: an entry is not a pair of offsets and sizes")
    return Region(tuple(offsets), tuple(sizes))


def read_item_checksums(folder: str | AnyPath, items: Iterable[tuple[str, int, int]]) -> list[int]:
    """Read the CRC32 of each item's zip directory, for `write_shard_checksums`.

    Only the directories are read, a few kilobytes each, and no tensor data.

    Args:
        folder: Folder of the shards. Only the files in `items` need to exist.
        items: File, offset and length in bytes of each item, as in DCP's metadata.

    Returns:
        The CRC32s, in the order of `items`.

    Raises:
        CheckpointError: If a shard is missing or damaged.
    """
    opened = CheckpointFolder(parse_path_or_url(folder))
    return [TorchZip(opened.get_file(name), offset, length).checksum for name, offset, length in items]


def write_shard_checksums(folder: str | AnyPath, items: Mapping[str, Mapping[str, int]]) -> None:
    """Write `shard_checksums.json`.

    Call this function in one process, after all ranks have written their shards and before the
    checkpoint is published.

    Args:
        folder: Folder of the metadata.
        items: Results of `read_item_checksums` from all ranks, keyed by shard file and then by the
            offset of the item.

    Raises:
        CheckpointError: If there is no metadata.
        OSError: If the file already exists or cannot be written.
    """
    folder = parse_path_or_url(folder)
    metadata = {name: isal_zlib.crc32((folder / name).read_bytes()) for name in list_metadata_files(folder)}
    if not metadata:
        raise CheckpointError(
            f"{folder}: contains no DCP metadata; write the checkpoint before its checksums"
        )
    document = {"version": _VERSION, "metadata": metadata, "items": items}
    write_new_file(folder / CHECKSUMS, (json.dumps(document) + "\n").encode())


# One `.metadata`, or one file per rank if the ranks saved without communicating.
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


def list_metadata_files(folder: AnyPath) -> list[str]:
    """List the metadata files in a DCP folder.

    Returns:
        The name `.metadata`, or the names of the ranks' tables if there is no `.metadata`. Empty if the
        folder is not a complete DCP folder.
    """
    names = [name for name in list_entry_names(folder) if _METADATA.fullmatch(name)]
    return [".metadata"] if ".metadata" in names else names


def has_metadata_name(path: AnyPath) -> bool:
    """Return whether a path has the file name of a DCP metadata file. The file is not read."""
    return is_metadata_name(path.name)


def is_metadata_name(name: str) -> bool:
    """Return whether a file name belongs to a DCP metadata file: `.metadata` or `__<rank>.metadata`."""
    return _METADATA.fullmatch(name) is not None
