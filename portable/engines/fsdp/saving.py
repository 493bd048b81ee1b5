"""Write checkpoints with torch.distributed.checkpoint, in the foreground or in the background."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict_saver import save

from portable.checkpoint.background import in_background
from portable.checkpoint.checksumming_writer import ChecksummingWriter
from portable.engines.staging import WriteHandle, staged
from portable.ranks.collectives import background_group
from portable.terminal import quiet_checkpoint_warnings

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import SavePlanner

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
