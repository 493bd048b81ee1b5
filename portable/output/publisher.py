"""Upload the files of a run whose ``output_dir`` is a URL.

Each rank of the run writes to a local folder. Its :class:`Publisher` uploads checkpoints as soon as
they are written, and the other files of the run when they have changed. For each checkpoint, rank 0
finally uploads a marker, which makes the checkpoint complete.
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
from portable.converters.storage.completion_markers import mark_folder_complete, mark_folder_incomplete
from portable.converters.storage.folder_operations import copy_file, is_taken, list_files_below
from portable.converters.writers.parallel_jobs import run_jobs_in_threads
from portable.errors import RunError, UserError, to_one_line
from portable.formatting import format_bytes
from portable.output.lease import Lease
from portable.paths import convert_storage_errors
from portable.temporary_folder import get_lasting_folder
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.converters.storage.listed_file import ListedFile
    from portable.converters.storage.object_store import RemotePath

NUM_PARALLEL_UPLOADS = 8  # files that a rank uploads in parallel
RETRY_SECONDS = 30.0  # seconds of retries per request; the next save retries a failed upload
MIN_PAUSE_SECONDS = 30.0  # minimum seconds between background uploads of the changed files
# Background uploads take at most 1/20 of the time, because a growing file is uploaded again completely.
PAUSE_TO_UPLOAD_RATIO = 20


class Publisher:
    """Uploader of one rank's files to the URL of a run.

    Each rank has a separate local folder, so that the ranks do not need a shared file system.

    Args:
        place: URL of the run.
        rank: Rank of this process.
        staging: Local folder for files that are not uploaded yet. None for the system's temporary
            folder.
        outage_seconds: Seconds that the object store may be unavailable before a failed save stops
            the run.

    Attributes:
        store: The same URL as ``place``. Failed requests to it are repeated for ``RETRY_SECONDS``
            seconds.
        work_folder: Local folder for the files of the run. They have the same relative paths at
            ``store``.
        shards_folder: Local folder for checkpoints that are being written.
        scratch_folder: Local folder for temporary files, which are not uploaded. This class does
            not create the folder.
    """

    def __init__(
        self, place: RemotePath, rank: int, staging: str | None, *, outage_seconds: float = 3600.0
    ) -> None:
        self.outage_seconds = outage_seconds
        self._place = place
        self._rank = rank
        self.store = place.with_retry_limit(RETRY_SECONDS)
        self._staging_base = Path(staging or get_lasting_folder()).absolute()
        self._folder_prefix = f"portable-{hashlib.sha256(str(place).encode()).hexdigest()[:16]}-rank-{rank}-"
        # The name is random, so that no other user can create the folder first in a shared temporary folder.
        self._staging_folder = self._staging_base / f"{self._folder_prefix}{uuid.uuid4().hex}"
        # The path ends like the URL, because trackers name the run after the last parts of the path.
        self.work_folder = self._staging_folder / "run" / place.parent.name / place.name
        self.shards_folder = self._staging_folder / "shards"
        self.scratch_folder = self._staging_folder / "scratch"
        self._lease: Lease | None = None
        self._marker_token = ""
        self._uploaded_files: dict[str, ListedFile] = {}
        self._upload_lock = threading.Lock()
        self._next_upload_time = time.monotonic() + MIN_PAUSE_SECONDS
        self._upload_thread: threading.Thread | None = None

    def check_writable(self) -> None:
        """Check that the URL is writable by writing and deleting an object.

        Raises:
            UserError: If the object cannot be written or deleted.
            RunError: If the object store is unavailable.
        """
        probe = self.store / f".probe-{uuid.uuid4().hex}"
        with convert_storage_errors("output_dir"):
            probe.write_bytes(b"")
            probe.unlink()

    def build_lease(self) -> Lease:
        """Create a lease that prevents other runs from writing to the URL. Call this only on rank 0.

        If another run takes over the lease later, uploads by this publisher raise RunError.

        Returns:
            The lease, which is a context manager. The lease is acquired when the caller enters it.
        """
        self._lease = Lease(self.store)
        return self._lease

    def prepare_local_folders(self, estimate_shard_bytes: Callable[[], int]) -> None:
        """Create the local folders. On rank 0, also download the log files of previous launches.

        Local folders that were left by killed launches of this run are deleted. Call this method on
        all ranks while rank 0 has the lease, which prevents other runs from writing to the output
        URL.

        Args:
            estimate_shard_bytes: Function that estimates the bytes of this rank's shards of a
                checkpoint.

        Raises:
            UserError: If a local folder cannot be created or has too little space.
            RunError: If the object store is unavailable.
        """
        try:
            for leftover in self._staging_base.glob(f"{self._folder_prefix}*"):  # left by a killed launch
                shutil.rmtree(leftover, ignore_errors=True)
            self._staging_base.mkdir(parents=True, exist_ok=True)
            self._staging_folder.mkdir(mode=0o700)
            self.shards_folder.mkdir()
            self.work_folder.mkdir(parents=True)
            free = shutil.disk_usage(self.shards_folder).free
        except OSError as error:
            raise UserError(
                f"checkpoint.staging_dir: {self._staging_folder} cannot be created ({to_one_line(error)}); "
                "choose a writable local folder"
            ) from error
        self.store.clear_listings()  # another launch may have written to the URL in the meantime
        needed = estimate_shard_bytes() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if needed > free:
            raise UserError(
                f"checkpoint.staging_dir: {self.shards_folder} has {format_bytes(free)} free, but this "
                f"machine's shards of a checkpoint need about {format_bytes(needed)} before the upload to "
                f"{self._place}; choose a folder with more space"
            )
        if self._rank == 0:
            self._download_logs()

    def _download_logs(self) -> None:
        """Download the log files of previous launches, because this launch appends to them.

        Log files are all ``.jsonl`` and ``.txt`` files at the top level of the run's URL.
        """
        with convert_storage_errors("output_dir"):
            for entry in self.store.iterdir() if self.store.exists() else ():
                if entry.name.endswith((".jsonl", ".txt")) and entry.is_file():
                    copy_file(entry, self.work_folder / entry.name)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def begin_checkpoint(self, final: RemotePath) -> None:
        """Mark a checkpoint as incomplete until :meth:`complete_checkpoint` is called.

        Call this method on rank 0, before any rank uploads.

        Args:
            final: URL of the checkpoint, to which all ranks upload their files.
        """
        self._marker_token = mark_folder_incomplete(final)

    def upload_checkpoint(self, local_folder: Path, final: RemotePath) -> None:
        """Upload this rank's files of a checkpoint, and the changed files of the run.

        Args:
            local_folder: Local folder with the files of the checkpoint.
            final: URL of the checkpoint.

        Raises:
            RemoteError: If the upload failed. Files that were already uploaded remain, and the
                checkpoint is still marked as incomplete.
            RunError: If another run has taken over the lease. The files of the checkpoint are
                then already uploaded.
        """
        _upload_files({local_folder / name: final / name for name in list_files_below(local_folder)})
        self._upload_changed_files()

    def complete_checkpoint(self, final: RemotePath, step: int | None) -> None:
        """Mark a checkpoint as complete. Call this method on rank 0, after all ranks have uploaded.

        Args:
            final: URL of the checkpoint.
            step: Step of the checkpoint, which is stored in the marker.

        Raises:
            RunError: If another run has taken over the lease.
            RemoteError: If another process has begun to write the same checkpoint, or if a
                request to the object store failed.
        """
        self._check_lease_not_taken()
        mark_folder_complete(final, self._marker_token, step=step)

    def _check_lease_not_taken(self) -> None:
        """Raise RunError if another run has taken over the lease. Does nothing on ranks without a lease."""
        if self._lease is not None:
            self._lease.check_not_taken()

    # -- files of the run ------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Upload the files of the run that have changed since their last upload.

        Raises:
            RunError: If the upload failed. Also raised if another run has taken over the lease,
                which is the right to write to the output URL.
        """
        try:
            self._upload_changed_files()
        except (CheckpointError, OSError) as error:
            raise RunError(f"output_dir: {to_one_line(error)}") from error

    def _upload_changed_files(self) -> None:
        """Upload the files of ``work_folder`` that have changed since their last upload, except hidden files.

        Raises:
            RemoteError: If the upload failed.
            RunError: If another run has taken over the lease.
        """
        with self._upload_lock:
            began = time.monotonic()
            try:
                self._check_lease_not_taken()
                # Skip hidden files, because they are temporary and will be renamed.
                names = {n: f for n, f in list_files_below(self.work_folder).items() if "/." not in f"/{n}"}
                changed = {
                    name: file for name, file in names.items() if self._uploaded_files.get(name) != file
                }
                _upload_files({self.work_folder / name: self.store / name for name in changed})
            finally:
                self._next_upload_time = time.monotonic() + max(
                    MIN_PAUSE_SECONDS, PAUSE_TO_UPLOAD_RATIO * (time.monotonic() - began)
                )
            self._uploaded_files.update(changed)

    def publish_in_background(self, *, starts_now: bool = False) -> None:
        """Upload the changed files of the run in a background thread. A failure only prints a warning.

        Args:
            starts_now: Whether to upload even if the last upload is still running or was recent. If
                False, this method does nothing in both cases. An upload counts as recent for
                ``MIN_PAUSE_SECONDS`` seconds, or for ``PAUSE_TO_UPLOAD_RATIO`` times its duration
                if this is longer.
        """
        busy = self._upload_thread is not None and self._upload_thread.is_alive()
        if not starts_now and (busy or time.monotonic() < self._next_upload_time):
            return
        self._upload_thread = threading.Thread(target=self._try_to_publish, name="records", daemon=True)
        self._upload_thread.start()

    def _try_to_publish(self) -> None:
        """Upload the changed files. If the upload fails, print a warning instead of raising an error."""
        try:
            self.publish()
        except RunError as error:
            print_status(f"warning: {to_one_line(error)}; the run will try to upload again later")

    def close(self) -> None:
        """Upload the files that have changed since the last upload, and delete the local folders.

        If the upload fails, this method only prints a warning. It deletes the folders in any case.
        """
        if is_taken(self._staging_folder):
            self._try_to_publish()
            shutil.rmtree(self._staging_folder, ignore_errors=True)


def _upload_files(files: Mapping[Path, RemotePath]) -> None:
    """Upload files in threads. After an error, wait for running uploads and raise the first error.

    Args:
        files: Mapping from local files to their URLs.
    """
    jobs = (lambda _, path=path, target=target: target.upload_file(path) for path, target in files.items())
    run_jobs_in_threads(jobs, lambda _: None, NUM_PARALLEL_UPLOADS)
