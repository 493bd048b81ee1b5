"""A run's output: the folder or URL of ``output_dir``, and where this process writes what goes there."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from converters.storage.object_store import RemotePath
from converters.writers.replace_folder import recover
from portable.checkpoint.store import CheckpointFolder
from portable.errors import UserError
from portable.output.existing_run import CONFIG_FILE, FINAL
from portable.output.lock import locked
from portable.paths import place_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from portable.checkpoint.store import Checkpoints
    from portable.config import RunConfig
    from portable.paths import Place


class Output(ABC):
    """What differs between an output folder here and one in an object store.

    Attributes:
        place: what ``output_dir`` names.
        work: where this process writes files. All that it writes there ends up at ``place``, under the same
            names: at once, because it is the same folder, or at :meth:`publish`.
        rank: of this process.
        agreed: what of ``output_dir`` must be the same on all ranks; nothing where each may see a folder that
            all share under another name.
    """

    place: Place
    work: Path
    rank: int
    agreed = ""

    @abstractmethod
    def check_writable(self) -> None:
        """Find out before any work whether ``place`` can be written to, where that is cheap."""

    @abstractmethod
    def held(self) -> AbstractContextManager[None]:
        """Keep other runs away from ``place``; on rank 0."""

    @abstractmethod
    def open(self, shard_bytes: int) -> None:
        """Make ``work`` ready, with the records of earlier legs; all ranks, when rank 0 holds ``place``.

        Args:
            shard_bytes: about as many bytes this rank will write of a checkpoint.
        """

    @abstractmethod
    def checkpoints(self, *, keep: int | None) -> Checkpoints[Any]:
        """The run's checkpoints, for this rank to write to."""

    @abstractmethod
    def publish(self) -> None:
        """Have everything at ``place`` that this process has written into ``work``.

        Raises:
            RunError: it cannot be written there.
        """

    @abstractmethod
    def publish_soon(self, *, at_once: bool = False) -> None:
        """Have it there before long; does not wait, and does not mind if it fails this time.

        Args:
            at_once: begin now, else when a while has passed since the last time.
        """

    @abstractmethod
    def close(self) -> None:
        """Nothing more will be written; never raises."""


class LocalOutput(Output):
    """A folder that all ranks see."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.place = self.work = folder
        self.rank = rank

    def check_writable(self) -> None:
        """The lock will show."""

    @contextmanager
    def held(self) -> Iterator[None]:
        new = not self.work.exists()
        with locked(self.work):
            recover(self.work / FINAL)
            try:
                yield
            except UserError:
                if new and not (self.work / CONFIG_FILE).exists():
                    shutil.rmtree(self.work, ignore_errors=True)  # refused: leave things as they were
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


def open_output(config: RunConfig, rank: int = 0) -> Output:
    """The output of a run, as ``output_dir`` names it.

    Raises:
        UserError: it cannot be used.
    """
    place = place_of("output_dir", config.output_dir)
    if isinstance(place, RemotePath):
        from portable.output.remote_output_dir import RemoteOutput

        return RemoteOutput(place, rank, config.checkpoint.staging_dir)
    return LocalOutput(place, rank)
