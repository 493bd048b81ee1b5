"""Write checkpoints with torch.distributed.checkpoint, with checksums, in the foreground or background.

Every rank computes the checksums of the shards that it writes. DCP gathers them on rank 0 with its own
metadata, so no rank needs to read another rank's files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from converters import item_checksums, write_shard_checksums
from portable.checkpoint.store import in_background
from portable.engines.staging import WriteHandle, staged
from portable.ranks.collectives import background_group
from portable.terminal import quiet_checkpoint_warnings

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from portable.backend import SaveHandle

quiet_checkpoint_warnings()


class Saver:
    """Writes state dicts as DCP folders.

    Args:
        planner: for a state that is in host memory already; None for one of plain tensors and DTensors.
    """

    def __init__(self, planner: type[SavePlanner] | None = None) -> None:
        self._planner = planner

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return background_group()

    def save(self, state: dict[str, Any], folder: Path, *, background: bool) -> SaveHandle:
        """Write ``state`` into ``folder``; see :meth:`portable.backend.Engine.save`."""
        group = self._group  # a collective: create it before a thread needs it
        if background and self._planner is None:
            state = staged(state)

        def write() -> None:
            save(
                state,
                storage_writer=ChecksummingWriter(folder),
                planner=None if self._planner is None else self._planner(),
                process_group=group,
                no_dist=group is None,
            )

        if background:
            return WriteHandle(in_background(write, name="checkpoint"))
        write()
        return WriteHandle(None)


@dataclass(frozen=True)
class _ChecksummedResult(WriteResult):
    """The position of an item in the files, and its checksum."""

    checksum: int


class ChecksummingWriter(FileSystemWriter):
    """Writes this rank's shards into ``folder``; rank 0 also writes the metadata and all checksums.

    Args:
        folder: must exist on this rank's host. Other ranks may use other folders.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        stored = [result.storage_data for result in written]
        items = [(item.relative_path, item.offset, item.length) for item in stored]
        checksums = item_checksums(self._folder, items)
        results: Future[list[WriteResult]] = Future()
        results.set_result(
            [
                _ChecksummedResult(result.index, result.size_in_bytes, result.storage_data, checksum)
                for result, checksum in zip(written, checksums, strict=True)
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        items: dict[str, dict[str, int]] = {}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, _ChecksummedResult)
            stored = result.storage_data
            items.setdefault(stored.relative_path, {})[str(stored.offset)] = result.checksum
        write_shard_checksums(self._folder, items)
