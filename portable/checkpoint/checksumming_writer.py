"""Writing DCP folders with a seal: every rank takes the checksums of what it has just written itself.

They travel to the first rank with DCP's own account of the shards, so that no rank need see another's files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from converters import item_checksums, write_seal

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner


@dataclass(frozen=True)
class _Sealed(WriteResult):
    """Where an item was written, and its checksum."""

    checksum: int


class ChecksummingWriter(FileSystemWriter):
    """Writes this rank's shards into ``folder``; on the first rank also the metadata and the seal of all.

    Args:
        folder: exists on this rank's host. That of another rank may be another one.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        places = [result.storage_data for result in written]
        items = [(place.relative_path, place.offset, place.length) for place in places]
        checksums = item_checksums(self._folder, items)
        sealed: Future[list[WriteResult]] = Future()
        sealed.set_result(
            [
                _Sealed(result.index, result.size_in_bytes, result.storage_data, checksum)
                for result, checksum in zip(written, checksums, strict=True)
            ]
        )
        return sealed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        items: dict[str, dict[str, int]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _Sealed)
            place = result.storage_data
            items.setdefault(place.relative_path, {})[str(place.offset)] = result.checksum
        write_seal(self._folder, items)
