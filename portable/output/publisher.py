"""Uploads of a run in an object store.

Each rank of such a run writes to a local folder. Its :class:`Publisher` uploads the checkpoints, once they
are written, and the files of the run that have changed. A marker that is uploaded last completes a
checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError
from portable.converters.storage.completion_markers import begin, complete
from portable.converters.storage.folder_operations import copy_file, files_below, is_taken
from portable.converters.writers.parallel_jobs import run_jobs
from portable.errors import RunError, UserError, to_one_line
from portable.formatting import format_bytes
from portable.output.lease import Lease
from portable.paths import convert_storage_errors
from portable.temporary_folder import get_lasting_folder
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.converters.storage.listed_file import Object
    from portable.converters.storage.object_store import RemotePath

UPLOADS = 8  # files that a rank uploads in parallel
PATIENCE = 30.0  # seconds for which a request of a save is repeated: the next save tries again
PAUSE = 30.0  # minimum seconds between uploads of records
SHARE = 20  # these take at most 1/20 of the time, because a file that grows is uploaded again as a whole


class Publisher:
    """Uploads the files of one rank to the URL of a run.

    Every rank has a local folder of its own, so that the ranks do not need a shared file system.

    Args:
        place: URL of the run.
        rank: Rank of this process.
        staging: Local folder for files that are not uploaded yet. None for the system's temporary folder.
        outage_seconds: Time in seconds for which the object store may be unavailable before a failed save
            stops the run.

    Attributes:
        store: URL of the run, for requests that are repeated for a limited time.
        work: Local folder for the files of the run, which appear under the same names at ``store``.
        shards: Local folder for checkpoints that are being written.
        scratch: Local folder for temporary files, which are not uploaded. It may not exist.
    """

    def __init__(
        self, place: RemotePath, rank: int, staging: str | None, *, outage_seconds: float = 3600.0
    ) -> None:
        self.outage_seconds = outage_seconds
        self._place = place
        self._rank = rank
        self.store = place.patient(PATIENCE)
        self._base = Path(staging or get_lasting_folder()).absolute()
        self._prefix = f"portable-{hashlib.sha256(str(place).encode()).hexdigest()[:16]}-rank-{rank}-"
        # Nobody else can guess this name and make the folder first, where all may write.
        self._staging = self._base / f"{self._prefix}{uuid.uuid4().hex}"
        # Trackers and plots name the run by the last parts of the URL.
        self.work = self._staging / "run" / place.parent.name / place.name
        self.shards = self._staging / "shards"
        self.scratch = self._staging / "scratch"
        self._lease: Lease | None = None
        self._token = ""
        self._sent: dict[str, Object] = {}
        self._sending = threading.Lock()
        self._next = time.monotonic() + PAUSE
        self._sender: threading.Thread | None = None

    def check_writable(self) -> None:
        """Write and delete an object."""
        probe = self.store / f".probe-{uuid.uuid4().hex}"
        with convert_storage_errors("output_dir"):
            probe.write_bytes(b"")
            probe.unlink()

    def build_lease(self) -> Lease:
        """Build the lease of the URL. While another run holds it, uploads fail. Called on rank 0."""
        self._lease = Lease(self.store)
        return self._lease

    def open(self, shard_bytes: Callable[[], int]) -> None:
        """Create the local folders, and download the log files of earlier launches.

        Called on all ranks while rank 0 has the lease.

        Args:
            shard_bytes: Function that estimates the size of this rank's shards of a checkpoint.

        Raises:
            UserError: If the local folder cannot be created or has too little space.
        """
        try:
            for leftover in self._base.glob(f"{self._prefix}*"):  # of a killed launch
                shutil.rmtree(leftover, ignore_errors=True)
            self._base.mkdir(parents=True, exist_ok=True)
            self._staging.mkdir(mode=0o700)
            self.shards.mkdir()
            self.work.mkdir(parents=True)
            free = shutil.disk_usage(self.shards).free
        except OSError as error:
            raise UserError(
                f"checkpoint.staging_dir: {self._staging} cannot be created ({to_one_line(error)}); choose a "
                "writable local folder"
            ) from error
        self.store.refresh()  # another launch may have written since
        needed = shard_bytes() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if needed > free:
            raise UserError(
                f"checkpoint.staging_dir: {self.shards} has {format_bytes(free)} free, but this machine's "
                f"shards of a checkpoint need about {format_bytes(needed)} before the upload to "
                f"{self._place}; choose a folder with more space"
            )
        if self._rank == 0:
            self._fetch_records()

    def _fetch_records(self) -> None:
        """Download the log files, to which every launch of the run appends."""
        with convert_storage_errors("output_dir"):
            for entry in self.store.iterdir() if self.store.exists() else ():
                if entry.name.endswith((".jsonl", ".txt")) and entry.is_file():
                    copy_file(entry, self.work / entry.name)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def begin_checkpoint(self, final: RemotePath) -> None:
        """Mark a checkpoint as being uploaded. Called on rank 0, before any rank uploads."""
        self._token = begin(final)

    def upload_checkpoint(self, written: Path, final: RemotePath) -> None:
        """Upload this rank's files of a checkpoint, and the changed files of the run.

        Raises:
            RemoteError: If the upload failed. Uploaded files remain, and the checkpoint is marked as
                incomplete.
        """
        _upload({written / name: final / name for name in files_below(written)})
        self._upload_changed()

    def complete_checkpoint(self, final: RemotePath, step: int | None) -> None:
        """Mark a checkpoint as complete. Called on rank 0, after all ranks have uploaded.

        Raises:
            RunError: If another run has taken the lease.
        """
        self._check_lease()
        complete(final, self._token, step=step)

    def _check_lease(self) -> None:
        """Raise RunError if another run has taken the lease."""
        if self._lease is not None:
            self._lease.check()

    # -- files of the run ------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Upload the changed files of the run.

        Raises:
            RunError: If the upload failed, or another run has taken the lease.
        """
        try:
            self._upload_changed()
        except (CheckpointError, OSError) as error:
            raise RunError(f"output_dir: {to_one_line(error)}") from error

    def _upload_changed(self) -> None:
        """Upload the changed files of the run. Raises RemoteError if the upload failed."""
        with self._sending:
            began = time.monotonic()
            try:
                self._check_lease()
                # Hidden files are temporary and will be renamed.
                names = {n: f for n, f in files_below(self.work).items() if "/." not in f"/{n}"}
                changed = {name: file for name, file in names.items() if self._sent.get(name) != file}
                _upload({self.work / name: self.store / name for name in changed})
            finally:
                self._next = time.monotonic() + max(PAUSE, SHARE * (time.monotonic() - began))
            self._sent.update(changed)

    def publish_soon(self, *, at_once: bool = False) -> None:
        """Upload the changed files of the run in the background, without raising errors.

        Args:
            at_once: Whether to start now, and not some time after the last upload.
        """
        busy = self._sender is not None and self._sender.is_alive()
        if not at_once and (busy or time.monotonic() < self._next):
            return
        self._sender = threading.Thread(target=self._try_to_publish, name="records", daemon=True)
        self._sender.start()

    def _try_to_publish(self) -> None:
        try:
            self.publish()
        except RunError as error:
            tell(f"warning: {to_one_line(error)}; trying again later")

    def close(self) -> None:
        """Upload the last files, and delete the local folder. Never raises."""
        if is_taken(self._staging):
            self._try_to_publish()
            shutil.rmtree(self._staging, ignore_errors=True)


def _upload(files: Mapping[Path, RemotePath]) -> None:
    """Upload files in parallel. The first error is raised after the running uploads have ended."""
    jobs = (lambda _, path=path, target=target: target.upload_file(path) for path, target in files.items())
    run_jobs(jobs, lambda _: None, UPLOADS)
