"""DeepSpeed's checkpoint files, written in the foreground or behind the training.

DeepSpeed decides what goes into which file and hands it to its *checkpoint engine*. For a save in the
background ours copies it, in host memory: what no later step can change is then serialised and written, with
the same ``torch.save``, while the training goes on.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpu.staging import staged
from portable.checkpoint.background import in_background
from portable.ranks.collectives import background_group
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from concurrent.futures import Future

    from portable.backend import SaveHandle


class ZeroSaver:
    """Has a DeepSpeed engine save through host memory."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._staged = _StagingEngine(engine.checkpoint_engine.zipfile_serialization)
        engine.checkpoint_engine = self._staged

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return background_group()

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write a checkpoint into ``folder``; see :meth:`portable.backend.Engine.save`.

        State that is swapped to a disk is copied in the foreground: the next step overwrites its files.
        """
        group = self._group  # made by all ranks at once, before any thread needs it
        self._staged.hold = background
        try:
            with native_stdout_closed():
                self._engine.save_checkpoint(str(folder))
        finally:
            files = self._staged.take()
        rank = self._engine.global_rank

        def write() -> None:
            self._write_together(files, folder, rank, group)

        if background:
            return _Save(in_background(write, name="checkpoint"))
        write()
        return _Save(None)

    def _write_together(
        self, files: list[_File], folder: Path, rank: int, group: dist.ProcessGroup | None
    ) -> None:
        """Write this rank's files; return when all ranks have, and fail if one could not."""
        failure: Exception | None = None
        try:
            while files:
                files.pop(0).write()  # and forget its copy
            for path in folder.rglob("*"):
                if path.is_file() and _is_of(rank, path.name):
                    _sync(path)
        except Exception as error:
            failure = error
        if group is not None:
            failed = torch.tensor(float(failure is not None))
            dist.all_reduce(failed, group=group)
            if failed and failure is None:
                raise OSError(f"{int(failed)} of {dist.get_world_size()} ranks could not write their files")
        if failure is not None:
            raise failure


class _File:
    """What belongs into a file that is still to be written."""

    def __init__(self, path: Path, content: Any, zipfile_serialization: bool) -> None:
        self.path = path
        self._content = content
        self._zipfile = zipfile_serialization

    def write(self) -> None:
        with self.path.open("wb") as file:  # of Python's, of which errors say what the system said
            torch.save(self._content, file, _use_new_zipfile_serialization=self._zipfile)


class _StagingEngine:
    """A checkpoint engine of DeepSpeed's that can keep a copy of what it is given to save in host memory.

    Attributes:
        hold: keep the files for :meth:`take`; else they are written at once.

    It has the methods of ``deepspeed.runtime.checkpoint_engine.CheckpointEngine``, which is not imported
    here, so that this module can be without DeepSpeed.
    """

    name = "portable"

    def __init__(self, zipfile_serialization: bool) -> None:
        self._zipfile = zipfile_serialization
        self._files: list[_File] = []
        self.hold = False

    def take(self) -> list[_File]:
        """The files of the checkpoint that was saved last, which are forgotten here."""
        files, self._files = self._files, []
        return files

    def save(self, state_dict: Any, path: str) -> None:
        content = staged(state_dict) if self.hold else state_dict
        file = _File(Path(path), content, self._zipfile)
        if self.hold:
            self._files.append(file)
        else:
            file.write()

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError("checkpoints are read through converters.open_checkpoint")

    def create(self, info: Any) -> None:
        """A checkpoint begins."""

    def commit(self, info: Any) -> bool:
        """A checkpoint is complete, as far as DeepSpeed goes."""
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        return True

    def set_commit_info(self, info: Any) -> None:
        """For engines that commit later."""

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None:
        """Nothing is held."""


class _Save:
    def __init__(self, writing: Future[None] | None) -> None:
        self._writing = writing

    def done(self) -> bool:
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


def _is_of(rank: int, name: str) -> bool:
    """Whether ``rank`` wrote the file: those of a rank carry its number, the others are rank 0's."""
    return f"pp_rank_{rank}_" in name or (rank == 0 and "pp_rank_" not in name)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
