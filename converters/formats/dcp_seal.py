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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from converters.errors import CheckpointError
from converters.outfile import write_file
from converters.shard_index import read_json

if TYPE_CHECKING:
    from converters.storage import Folder

SEAL = "shard_checksums.json"
_VERSION = 1


@dataclass(frozen=True)
class Seal:
    """A seal as read: metadata file -> CRC32, and shard file -> offset of an item -> CRC32."""

    path: Path
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


def seal_dcp(folder: str | Path) -> None:
    """Seal the DCP shards in `folder`, when every rank has written its own and before they are published.

    Reads the directory of each item, a few kilobytes, and none of the tensors. One process does it.

    Raises:
        CheckpointError: the shards are incomplete or damaged.
        OSError: there is a seal already, or it cannot be written.
    """
    from converters.formats.dcp import open_item
    from converters.formats.dcp_metadata import metadata_files, read_metadata
    from converters.storage import Folder

    opened = Folder(Path(folder))
    metadata = {}
    for name in metadata_files(opened.path):
        file = opened.file(name)
        metadata[name] = isal_zlib.crc32(file.read(0, file.nbytes))
    if not metadata:
        raise CheckpointError(f"{folder}: holds no DCP metadata to seal")
    items: dict[str, dict[str, int]] = {}
    for entry in read_metadata(opened).values():
        for item in entry.items.values():
            items.setdefault(item.file, {})[str(item.offset)] = open_item(entry, item).checksum
    document = {"version": _VERSION, "metadata": metadata, "items": items}
    write_file(opened.path / SEAL, (json.dumps(document) + "\n").encode())
