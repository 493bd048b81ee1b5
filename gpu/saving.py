"""Writing checkpoints with torch.distributed.checkpoint, in the foreground or behind the training."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from converters import seal_dcp
from gpu.quiet import native_stdout_closed
from portable.quiet import quiet_checkpoint_warnings

if TYPE_CHECKING:
    from pathlib import Path

    from portable.backend import SaveHandle

quiet_checkpoint_warnings()


class Saver:
    """Writes state dicts of plain tensors and DTensors as DCP folders."""

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """A background save talks to the other ranks while the loop does, so it needs a group of its own."""
        if not dist.is_initialized():
            return None
        with native_stdout_closed():
            group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    def save(self, state: dict[str, Any], folder: Path, *, background: bool) -> SaveHandle:
        """Write ``state`` into ``folder``; see :meth:`portable.backend.Engine.save`."""
        writer = FileSystemWriter(folder, sync_files=True)
        options: dict[str, Any] = {"process_group": self._group, "no_dist": self._group is None}
        if not background:
            save(state, storage_writer=writer, **options)
            return _Save(None, folder)
        written: Any = async_save(state, storage_writer=writer, **options)
        return _Save(written if isinstance(written, Future) else written.upload_completion, folder)


class _Save:
    def __init__(self, writing: Future[Any] | None, folder: Path) -> None:
        self._writing = writing
        self._folder = folder
        self._sealed = False

    def done(self) -> bool:
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
        if not self._sealed and (not dist.is_initialized() or dist.get_rank() == 0):
            seal_dcp(self._folder)
        self._sealed = True
