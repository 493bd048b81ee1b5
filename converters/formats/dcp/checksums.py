"""What DCP leaves out: a record of which bytes belong to a save.

Items of a `.distcp` file carry checksums of their bytes but no name, so two files of one layout can change
places unnoticed, and `.metadata` carries no checksum at all. A seal is a small JSON file beside the shards
with the CRC32 of each metadata file and of each item's zip directory, which itself holds those of the data:

    {"version": 1, "metadata": {".metadata": 123}, "items": {"__0_0.distcp": {"0": 456, "7296": 789}}}

Other tools ignore it. A folder without one is read as before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from converters.containers.shard_index import read_json
from converters.errors import CheckpointError
from converters.manifest import is_named
from converters.storage.path_or_url import place
from converters.writers.output_file import write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.storage.bytes import Folder
    from converters.storage.path_or_url import Place

SEAL = "shard_checksums.json"
_VERSION = 1


@dataclass(frozen=True)
class Seal:
    """A seal as read: metadata file -> CRC32, and shard file -> offset of an item -> CRC32."""

    path: Place
    metadata: dict[str, Any]
    items: dict[str, dict[str, Any]]

    def check_metadata(self, name: str, data: bytes) -> None:
        """CheckpointError unless this is the metadata file that was sealed."""
        if self.metadata.get(name) != isal_zlib.crc32(data):
            raise CheckpointError(f"{self.path.with_name(name)}: damaged or of another save than {SEAL}")

    def item(self, file: str, offset: int) -> int:
        """The CRC32 of an item's zip directory; CheckpointError where the seal knows no such item."""
        crc = self.items.get(file, {}).get(str(offset))
        if type(crc) is not int:
            raise CheckpointError(f"{self.path}: damaged, or of another save: no item at {offset} of {file}")
        return crc


def read_seal(folder: Folder) -> Seal | None:
    """The seal of a DCP folder, None where there is none; CheckpointError where it is damaged."""
    if not (folder.path / SEAL).is_file():
        if is_named(folder.path, SEAL):
            raise CheckpointError(f"{folder.path / SEAL}: missing, and the checkpoint's manifest names it")
        return None
    file = folder.file(SEAL)
    found = read_json(file, file.read(0, file.nbytes))
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise CheckpointError(f"{file.path}: damaged, or of a newer version")
    metadata, items = found.get("metadata"), found.get("items")
    tables = (metadata, items, *(items.values() if isinstance(items, dict) else ()))
    if (
        not isinstance(metadata, dict)
        or not isinstance(items, dict)
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise CheckpointError(f"{file.path}: damaged, its tables are missing")
    return Seal(file.path, metadata, items)


def item_checksums(folder: str | Place, items: Iterable[tuple[str, int, int]]) -> list[int]:
    """What a seal keeps of items: the CRC32 of the zip directory of each.

    Reads the directories, a few kilobytes each, and none of the tensors.

    Args:
        folder: of the shards; files that no item names need not be there.
        items: file, offset and length of each, as DCP's metadata gives them.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """
    from converters.containers.torchzip import TorchZip
    from converters.storage.bytes import Folder

    opened = Folder(place(folder))
    return [TorchZip(opened.file(name), offset, length).checksum for name, offset, length in items]


def write_seal(folder: str | Place, items: Mapping[str, Mapping[str, int]]) -> None:
    """Seal a DCP save, when every rank has written its shards and before they are published.

    Args:
        folder: of the metadata.
        items: shard file -> offset of an item -> its `item_checksums`; of all ranks.

    Raises:
        CheckpointError: there is no metadata.
        OSError: there is a seal already, or it cannot be written.
    """
    from converters.formats.dcp.metadata import metadata_files

    folder = place(folder)
    metadata = {name: isal_zlib.crc32((folder / name).read_bytes()) for name in metadata_files(folder)}
    if not metadata:
        raise CheckpointError(f"{folder}: holds no DCP metadata to seal")
    document = {"version": _VERSION, "metadata": metadata, "items": items}
    write_file(folder / SEAL, (json.dumps(document) + "\n").encode())
