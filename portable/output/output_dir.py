"""The output of a run: ``output_dir``, its lock, and the local folder that this process writes into."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from converters.storage.path_or_url import in_store
from converters.storage.safe_open import open_without_links
from converters.writers.replace_folder import recover
from portable.checkpoint.store import Checkpoints
from portable.errors import UserError, one_line
from portable.paths import CONFIG_FILE, FINAL, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from converters.storage.path_or_url import Place
    from portable.config import RunConfig


def open_output(config: RunConfig, rank: int = 0) -> Output:
    """Return the output that ``output_dir`` names.

    Raises:
        UserError: if it cannot be used.
    """
    place = place_of("output_dir", config.output_dir)
    if not in_store(place):
        return Output(place, rank)
    from portable.output.mirror import Mirror  # a run on a disk does without

    checkpoint = config.checkpoint
    return Mirror(place, rank, checkpoint.staging_dir, outage_seconds=60 * checkpoint.max_outage_minutes)


class Output:
    """A local output folder, which all ranks share; see :class:`~portable.output.mirror.Mirror` for a URL.

    Args:
        place: the path of ``output_dir``.
        rank: of this process.

    Attributes:
        work: the local folder for this process's files. They appear at ``place`` under the same names, at
            once if it is the same folder, else at :meth:`publish`.
        scratch: a local folder for temporary files, which are not published. It may not exist.
        agreed: the part of ``output_dir`` that must be equal on all ranks. Empty for a local folder: a shared
            folder may have another path on each rank.
    """

    place: Place
    agreed = ""

    def __init__(self, place: Path, rank: int) -> None:
        self.place = self.work = place
        self.scratch = place / ".scratch"
        self.rank = rank

    def check_writable(self) -> None:
        """Check early that a store is writable. Of a folder, taking the lock checks it."""

    def held(self) -> AbstractContextManager[object]:
        """Lock ``place`` against other runs. Called on rank 0."""
        return self._locked()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        new = not self.work.exists()
        with locked(self.work):
            recover(self.work / FINAL)
            try:
                yield
            except UserError:
                if new and not (self.work / CONFIG_FILE).exists():
                    shutil.rmtree(self.work, ignore_errors=True)  # the run was refused: leave no empty folder
                raise

    def open(self, shard_bytes: Callable[[], int]) -> None:
        """Prepare ``work`` with the logs of earlier launches. Called on all ranks while rank 0 has the lock.

        Args:
            shard_bytes: estimates the size of this rank's shards of a checkpoint.
        """

    def checkpoints(self, *, keep: int | None) -> Checkpoints[Any]:
        """The run's checkpoints, writable by this rank."""
        return Checkpoints(self.place / "checkpoints", keep=keep, rank=self.rank)

    def publish(self) -> None:
        """Copy this process's new files from ``work`` to ``place``.

        Raises:
            RunError: if it fails.
        """

    def publish_soon(self, *, at_once: bool = False) -> None:
        """Publish in the background, without raising errors.

        Args:
            at_once: start now, rather than some time after the last call.
        """

    def close(self) -> None:
        """Publish the last files and clean up. Never raises."""


LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` within this context. The system releases the lock when the process ends.

    Raises:
        UserError: if another process has the lock, or ``folder`` is not writable.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_without_links(folder / LOCK_FILE, os.O_RDWR, 0o644)
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace").strip()
            raise UserError(
                f"output_dir: {folder} is in use by another run ({holder or 'unknown'}); "
                "wait for it, stop it or choose another folder"
            ) from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: Exception) -> UserError:
    reason = one_line(getattr(error, "strerror", None) or error)
    at = getattr(error, "filename", None)
    where = f"{folder} ({at})" if at is not None and str(at) != str(folder) else str(folder)
    where = where if len(where) <= 200 else f"{where[:197]}..."
    return UserError(f"output_dir: {where!r} is not writable: {reason}; choose another folder")
