"""Location of a run's output (``output_dir``), its lock, and the local folder of this process.

If the location is a URL, each process writes its files to a local folder, and then uploads them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from portable.checkpoint.store import CHECKPOINTS_FOLDER, CheckpointStore
from portable.converters.storage.path_or_url import is_in_store
from portable.converters.storage.safe_open import open_for_writing
from portable.converters.writers.replace_folder import recover_replaced_folder
from portable.errors import UserError, to_one_line
from portable.paths import CONFIG_FILE, FINAL_FOLDER, parse_place_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath
    from portable.output.publisher import Publisher


def open_output(config: RunConfig, rank: int = 0) -> RunOutput:
    """Create the :class:`RunOutput` for ``output_dir``, without accessing the folder.

    Args:
        config: Config of the run.
        rank: Rank of this process.

    Returns:
        The output. No folder has been created, locked, or checked yet.

    Raises:
        UserError: If ``output_dir`` is not a valid path or URL.
    """
    place = parse_place_setting("output_dir", config.output_dir)
    if not is_in_store(place):
        return RunOutput(place, rank)
    from portable.output.publisher import Publisher  # not at the top, because only URLs need it

    checkpoint = config.checkpoint
    publisher = Publisher(
        place, rank, checkpoint.staging_dir, outage_seconds=60 * checkpoint.max_outage_minutes
    )
    return RunOutput(place, rank, publisher)


class RunOutput:
    """Output of a run, in a local folder or at a URL.

    If ``output_dir`` is a local folder, all ranks write to it. If it is a URL, each rank writes to
    a separate local folder, and its :class:`~portable.output.publisher.Publisher` uploads the
    files.

    Args:
        place: Path or URL in ``output_dir``.
        rank: Rank of this process.
        publisher: Publisher of this rank. Required if ``place`` is a URL.

    Attributes:
        work_folder: Local folder for the files of this process. They have the same names at
            ``place``.
        scratch_folder: Local folder for temporary files, which are not uploaded. It may not have
            been created yet.
        agreed_location: URL of the output, which must be equal on all ranks. Empty for a local
            folder, because the path of a shared folder may differ between ranks.
    """

    def __init__(self, place: AnyPath, rank: int, publisher: Publisher | None = None) -> None:
        self.place = place
        self.rank = rank
        self._publisher = publisher
        if publisher is not None:
            self.work_folder, self.scratch_folder, self.agreed_location = (
                publisher.work_folder,
                publisher.scratch_folder,
                str(place),
            )
        else:
            assert not is_in_store(place)
            self.work_folder, self.scratch_folder, self.agreed_location = place, place / ".scratch", ""

    def check_writable(self) -> None:
        """Check that a URL is writable, before the run spends time on anything else.

        Does nothing for a local folder, which is checked when it is locked.

        Raises:
            UserError: If the URL is not writable.
            RunError: If the object store is unavailable.
        """
        if self._publisher is not None:
            self._publisher.check_writable()

    def lock_against_other_runs(self) -> AbstractContextManager[object]:
        """Return a context that locks the output against other runs. Call this method only on rank 0.

        Returns:
            The context. Entering it raises ``UserError`` if another run has the lock or the
            output is not writable, and ``RunError`` if the object store is unavailable.
        """
        return self._lock_and_recover_folder() if self._publisher is None else self._publisher.build_lease()

    @contextmanager
    def _lock_and_recover_folder(self) -> Iterator[None]:
        """Lock the local folder within this context, and clean up after a killed conversion.

        Temporary folders of conversions to ``final``, such as ``.final.tmp-17-abcdef``, are
        deleted. If ``final`` is missing, it is restored from a folder such as
        ``.final.old-17-abcdef``. The temporary folders of
        :func:`~portable.output.export.export_model` are not deleted. A folder that did not exist
        before is removed again if the context ends with a UserError before the run has written its
        config.
        """
        is_new = not self.work_folder.exists()
        with lock_run_folder(self.work_folder):
            recover_replaced_folder(self.work_folder / FINAL_FOLDER)
            try:
                yield
            except UserError:
                if is_new and not (self.work_folder / CONFIG_FILE).exists():
                    # Remove the new folder, because the run was refused before it started.
                    shutil.rmtree(self.work_folder, ignore_errors=True)
                raise

    def prepare_work_folder(self, estimate_shard_bytes: Callable[[], int]) -> None:
        """Create the local folders of a run whose ``output_dir`` is a URL.

        On rank 0, also download the logs of previous launches. Does nothing if ``output_dir`` is a
        local folder. Call this method on all ranks while rank 0 holds the lock of
        :meth:`lock_against_other_runs`.

        Args:
            estimate_shard_bytes: Function that estimates the bytes of this rank's shards of a
                checkpoint.

        Raises:
            UserError: If a local folder cannot be created or has too little space.
            RunError: If the object store is unavailable.
        """
        if self._publisher is not None:
            self._publisher.prepare_local_folders(estimate_shard_bytes)

    def open_checkpoints(self, *, keep: int | None) -> CheckpointStore[Any]:
        """Return the checkpoint store of the run, to read and save checkpoints on this rank.

        Args:
            keep: Number of recent checkpoints to keep. None to keep all checkpoints.
        """
        place = self.place if self._publisher is None else self._publisher.store
        return CheckpointStore(
            place / CHECKPOINTS_FOLDER, keep=keep, rank=self.rank, publisher=self._publisher
        )

    def publish(self) -> None:
        """Upload the new files of this process to ``place``, the URL of the run.

        Does nothing without a publisher, because the files are then already in the output folder.

        Raises:
            RunError: If the upload failed, or another run has started to write to ``place``.
        """
        if self._publisher is not None:
            self._publisher.publish()

    def publish_in_background(self, *, starts_now: bool = False) -> None:
        """Upload the new files of this process in a background thread. A failure only prints a warning.

        Does nothing if ``output_dir`` is a local folder.

        Args:
            starts_now: Whether to always start an upload. Otherwise, nothing is uploaded if the
                last upload is still running or was recent.
        """
        if self._publisher is not None:
            self._publisher.publish_in_background(starts_now=starts_now)

    def close(self) -> None:
        """Upload the remaining files and delete the temporary folders, if ``output_dir`` is a URL.

        Does nothing if ``output_dir`` is a local folder. A failed upload only causes a warning.
        """
        if self._publisher is not None:
            self._publisher.close()


LOCK_FILE = ".lock"


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Lock a folder within this context, and write the process id and host to the lock file.

    The operating system releases the lock when the process ends, even if it is killed.

    Args:
        folder: Output folder. Created if it does not exist.

    Raises:
        UserError: If another process has the lock, or if the folder is not writable.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_for_writing(folder / LOCK_FILE, os.O_RDWR, 0o644)
    except (OSError, ValueError) as error:
        raise _build_unwritable_error(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"output_dir: {folder} is in use by another run ({_describe_holder(descriptor)}); wait for "
                "that run, stop it, or choose another folder"
            ) from error
        except OSError as error:
            raise _build_unwritable_error(folder, error) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError as error:
            raise _build_unwritable_error(folder, error) from error
        yield
    finally:
        os.close(descriptor)


def _describe_holder(descriptor: int) -> str:
    """Describe the process that wrote its ID into the lock file, for an error message."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return to_one_line(f"process {holder['pid']} on {holder['host']}")
    except (ValueError, KeyError, TypeError):  # the process has not yet written the file
        return "an unknown process"


def _build_unwritable_error(folder: Path, error: Exception) -> UserError:
    reason = to_one_line(getattr(error, "strerror", None) or error)
    filename = getattr(error, "filename", None)
    location = (
        f"{folder} ({filename})" if filename is not None and str(filename) != str(folder) else str(folder)
    )
    location = location if len(location) <= 200 else f"{location[:197]}..."
    return UserError(f"output_dir: {location!r} is not writable: {reason}; choose another folder")
