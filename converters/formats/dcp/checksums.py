"""Record checksums for DCP folders, to verify that all files are intact and belong to one save.

DCP's own checksums are not enough. The items of a `.distcp` file contain CRC32s of their data but
no name, so a swap of two files with the same layout would not be noticed. `.metadata` has no
checksum at all. The file `shard_checksums.json`, in the folder of the shards, closes these gaps. It
has two versions.

Version 1 records the CRC32 of each metadata file and of each item's zip directory. The zip
directory contains the CRC32s of the item's data:

    {"version": 1, "metadata": {".metadata": 123}, "items": {"__0_0.distcp": {"0": 456, "7296": 789}}}

Version 2 is used if each rank also wrote a separate metadata file, such as `__0.metadata`. Such a
file is called a table. It has the format of `.metadata`, and lists the chunks that the rank saved,
called pieces. Each piece has its checksum in the additional attribute `checksum`. Checksums of the
items are therefore not needed, and `shard_checksums.json` lists the tables instead:

    {"version": 2, "metadata": {".metadata": 123, "__0.metadata": 456},
     "bytes": {".metadata": 7890, "__0.metadata": 5678},
     "boxes": {"__0.metadata": {"128x64": [[0, 0], [64, 64]]}}}

- `metadata` contains the CRC32 of each metadata file.
- `bytes` contains the size of each metadata file in bytes.
- `boxes` contains a bounding box, `[offsets, sizes]`, for each table and tensor shape. The box
  covers the pieces of all tensors with that shape, so a reader can skip the tables that it does not
  need.

Other tools ignore `shard_checksums.json`. A folder without this file can also be opened, but its
shards cannot be verified.
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
"""Name of the file that contains the checksums of a DCP folder."""
_VERSION = 1
TABLES_VERSION = 2
"""Version of the checksum file if each rank has written its own table of pieces."""


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
    """Content of `shard_checksums.json`, which records checksums of the files of a DCP checkpoint.

    A shard file contains items. Each item is a piece (chunk) of a tensor, or a pickled value,
    stored as a zip archive of `torch.save`.

    The checksum of an item is the CRC32 of its zip directory, which contains the CRC32s of the
    data. In version 1, `shard_checksums.json` lists the checksum of every item. In version 2, each
    rank has written its own metadata file, called a table. The table lists the pieces that the rank
    saved and the checksums of the rank's items. `shard_checksums.json` then describes only
    `.metadata` and the tables, not the items.

    Attributes:
        path: Path of `shard_checksums.json`.
        metadata_checksums: CRC32 of each metadata file, keyed by name.
        items: Checksum of each item, keyed by shard file and then by the offset of the item. None
            in version 2.
        metadata_sizes: Size of each metadata file in bytes. Empty in version 1.
        boxes: Bounding boxes of the stored pieces, keyed by table name and then by tensor shape,
            such as `128x64`. Each box covers the pieces of all tensors with that shape. Empty in
            version 1.
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
                f"{self.path.parent / name}: does not match the checksum in {CHECKSUMS}, so one of the two "
                "files is damaged or from another save"
            )

    def get_item_checksum(self, file: str, offset: int, recorded: Any) -> int:
        """Return the CRC32 of an item's zip directory.

        In version 1 of `shard_checksums.json`, this file contains the CRC32. In version 2, the metadata
        files contain it: `.metadata`, and the table of the rank that saved the item.

        Args:
            file: Name of the shard file.
            offset: Position of the item in the shard file, in bytes.
            recorded: CRC32 in the metadata file, or None if it does not record one. Ignored in
                version 1.

        Raises:
            CheckpointError: If no CRC32 is recorded for the item.
        """
        crc = recorded if self.items is None else self.items.get(file, {}).get(str(offset))
        if type(crc) is not int:
            raise DamagedCheckpointError(
                f"{self.path.parent}: there is no checksum for the data at byte {offset:,} of {file}, so a "
                "file of the checkpoint is damaged or from another save"
            )
        return crc


def read_shard_checksums(folder: CheckpointFolder) -> ShardChecksums | None:
    """Read the checksums of a DCP folder.

    Returns:
        The checksums, or None if the folder has none.

    Raises:
        CheckpointError: If `shard_checksums.json` is damaged or has an unsupported version, or
            if it is missing although the manifest lists it.
    """
    if not (folder.path / CHECKSUMS).is_file():
        if is_listed_in_manifest(folder.path, CHECKSUMS):
            raise DamagedCheckpointError(
                f"{folder.path / CHECKSUMS}: is missing, although {MANIFEST} lists this file"
            )
        return None
    file = folder.get_file(CHECKSUMS)
    table = read_json_object(file)
    if table.get("version") == TABLES_VERSION:
        return _parse_tables_index(file.path, table)
    if table.get("version") != _VERSION:
        raise CheckpointError(
            f"{file.path}: is damaged, or was written by a newer version of this program; copy the "
            "checkpoint again, or update portable-trainer"
        )
    metadata, items = table.get("metadata"), table.get("items")
    tables = (metadata, items, *(items.values() if isinstance(items, dict) else ()))
    if (
        not isinstance(metadata, dict)
        or not isinstance(items, dict)
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise DamagedCheckpointError(f"{file.path}: damaged: metadata or items is missing or invalid")
    return ShardChecksums(file.path, metadata, items)


def _parse_tables_index(path: AnyPath, content: dict[str, Any]) -> ShardChecksums:
    """Parse version 2 of `shard_checksums.json`, which lists one metadata file (table) per rank.

    Args:
        path: Path of the file, used in error messages.
        content: Content of the file. Its keys `metadata` and `bytes` contain the CRC32 and the size
            of `.metadata` and of each table. Its key `boxes` contains the bounding boxes of each
            table.

    Raises:
        CheckpointError: If one of the three keys is missing or damaged, or if they do not list the
            same tables.
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
        raise DamagedCheckpointError(
            f"{path}: damaged: metadata, bytes and boxes are incomplete or contradict each other"
        )
    regions = {
        name: {shape: _parse_region(path, box) for shape, box in table.items()}
        for name, table in boxes.items()
    }
    return ShardChecksums(path, metadata, None, sizes, regions)


def _parse_region(path: AnyPath, box: Any) -> Region:
    """Parse a region from its JSON form `[offsets, sizes]`.

    Args:
        path: Path of the file, used in error messages.
        box: Value from the file.

    Raises:
        CheckpointError: If the value is not a pair of lists of nonnegative integers with the same
            length.
    """
    offsets, sizes = box if isinstance(box, list) and len(box) == 2 else (None, None)
    if not is_shape(offsets) or not is_shape(sizes) or len(offsets) != len(sizes):
        raise DamagedCheckpointError(f"{path}: damaged: an entry of boxes is not a pair of offsets and sizes")
    return Region(tuple(offsets), tuple(sizes))


def read_item_checksums(folder: str | AnyPath, items: Iterable[tuple[str, int, int]]) -> list[int]:
    """Read the CRC32 of each item's zip directory, for `write_shard_checksums`.

    Only a few kilobytes of each item are read: its end, which contains the zip directory, and the
    record `byteorder`.

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
    """Write version 1 of `shard_checksums.json`.

    The file contains `items`, and the CRC32 of each metadata file in the folder.

    Call this function in one process, after all ranks have written their shards and before the
    checkpoint is published. In an object store, an existing file is replaced.

    Args:
        folder: Folder of the metadata.
        items: Results of `read_item_checksums` from all ranks, keyed by shard file and then by the
            offset of the item.

    Raises:
        CheckpointError: If there is no metadata.
        OSError: If a local file already exists or cannot be written.
        RemoteError: If the file cannot be written to an object store.
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
        The name `.metadata`, or the names of the ranks' tables if there is no `.metadata`.
        Empty if the folder has neither. The function does not check whether a table is missing.
    """
    names = [name for name in list_entry_names(folder) if _METADATA.fullmatch(name)]
    return [".metadata"] if ".metadata" in names else names


def has_metadata_name(path: AnyPath) -> bool:
    """Return whether a path has the file name of a DCP metadata file. The file is not read."""
    return is_metadata_name(path.name)


def is_metadata_name(name: str) -> bool:
    """Return whether a file name belongs to a DCP metadata file: `.metadata` or `__<rank>.metadata`."""
    return _METADATA.fullmatch(name) is not None
