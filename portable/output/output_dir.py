"""The output of a run: ``output_dir``, and the local folder in which this process writes its files."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from converters.writers.replace_folder import recover
from portable.checkpoint.store import CheckpointFolder
from portable.errors import UserError
from portable.output.lock import locked
from portable.paths import CONFIG_FILE, FINAL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from portable.checkpoint.store import Checkpoints
    from portable.paths import Place


class Output(ABC):
    """The interface of a local output folder and one in an object store.

    Attributes:
        place: the path or URL of ``output_dir``.
        work: the local folder for this process's files. They appear at ``place`` under the same names, at
            once if it is the same folder, else at :meth:`publish`.
        scratch: a local folder for temporary files, which are not published. It may not exist.
        rank: of this process.
        agreed: the part of ``output_dir`` that must be equal on all ranks. Empty for a local folder: a shared
            folder may have another path on each rank.
    """

    place: Place
    work: Path
    scratch: Path
    rank: int
    agreed = ""

    @abstractmethod
    def check_writable(self) -> None:
        """Check early that ``place`` is writable, if that is cheap."""

    @abstractmethod
    def held(self) -> AbstractContextManager[None]:
        """Lock ``place`` against other runs. Called on rank 0."""

    @abstractmethod
    def open(self, shard_bytes: int) -> None:
        """Prepare ``work`` with the logs of earlier launches. Called on all ranks while rank 0 has the lock.

        Args:
            shard_bytes: estimated size of this rank's shards of a checkpoint.
        """

    @abstractmethod
    def checkpoints(self, *, keep: int | None) -> Checkpoints[Any]:
        """The run's checkpoints, writable by this rank."""

    @abstractmethod
    def publish(self) -> None:
        """Copy this process's new files from ``work`` to ``place``.

        Raises:
            RunError: if it fails.
        """

    @abstractmethod
    def publish_soon(self, *, at_once: bool = False) -> None:
        """Publish in the background, without raising errors.

        Args:
            at_once: start now, rather than some time after the last call.
        """

    @abstractmethod
    def close(self) -> None:
        """Publish the last files and clean up. Never raises."""


class LocalOutput(Output):
    """A folder in a file system shared by all ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.place = self.work = folder
        self.scratch = folder / ".scratch"
        self.rank = rank

    def check_writable(self) -> None:
        """A no-op: taking the lock checks it."""

    @contextmanager
    def held(self) -> Iterator[None]:
        new = not self.work.exists()
        with locked(self.work):
            recover(self.work / FINAL)
            try:
                yield
            except UserError:
                if new and not (self.work / CONFIG_FILE).exists():
                    shutil.rmtree(self.work, ignore_errors=True)  # the run was refused: leave no empty folder
                raise

    def open(self, shard_bytes: int) -> None:
        pass

    def checkpoints(self, *, keep: int | None) -> CheckpointFolder:
        return CheckpointFolder(self.work / "checkpoints", keep=keep, rank=self.rank)

    def publish(self) -> None:
        pass

    def publish_soon(self, *, at_once: bool = False) -> None:
        pass

    def close(self) -> None:
        pass
