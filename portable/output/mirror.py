"""Brings what a run writes into a local folder of each rank to an object store.

A run in a bucket works in a local folder, as any other. Its mirror uploads a checkpoint once it is written,
and what has grown of the records; a marker, written last, makes a checkpoint whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError
from converters.storage.completion_markers import begin, complete
from converters.storage.places import copy_file, files_below, is_taken
from converters.writers.parallel import in_parallel
from portable.checkpoint.store import Checkpoints
from portable.errors import RunError, UserError, one_line
from portable.formatting import human_bytes
from portable.output.lease import Lease
from portable.output.output_dir import Output
from portable.paths import storage_errors
from portable.temporary_folder import lasting_folder
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from converters.storage.listed import Object
    from converters.storage.object_store import RemotePath

UPLOADS = 8  # files that a rank sends at a time
PATIENCE = 30.0  # seconds for which a request of a save is repeated: the next save tries again
PAUSE = 30.0  # minimum seconds between uploads of records
SHARE = 20  # these take at most 1/20 of the time, because a file that grows is uploaded again as a whole


class Mirror(Output):
    """The output of a rank to a URL. Every rank has a local folder, so ranks need no shared file system.

    Args:
        place: the URL of the run.
        rank: of this process.
        staging: the local folder for uploads; None for one in the system's temporary folder.
        outage_seconds: for how long saves may fail because the store is away.
    """

    def __init__(
        self, place: RemotePath, rank: int, staging: str | None, *, outage_seconds: float = 3600.0
    ) -> None:
        self.place = place
        self.agreed = str(place)
        self.rank = rank
        self._outage_seconds = outage_seconds
        self.store = place.patient(PATIENCE)
        self._base = Path(staging or lasting_folder()).absolute()
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
        with storage_errors("output_dir"):
            probe.write_bytes(b"")
            probe.unlink()

    def held(self) -> Lease:
        self._lease = Lease(self.store)
        return self._lease

    def open(self, shard_bytes: Callable[[], int]) -> None:
        try:
            for left in self._base.glob(f"{self._prefix}*"):  # by a killed launch
                shutil.rmtree(left, ignore_errors=True)
            self._base.mkdir(parents=True, exist_ok=True)
            self._staging.mkdir(mode=0o700)
            self.shards.mkdir()
            self.work.mkdir(parents=True)
            free = shutil.disk_usage(self.shards).free
        except OSError as error:
            raise UserError(
                f"checkpoint.staging_dir: {self._staging} cannot be created ({one_line(error)}); choose a "
                "writable local folder"
            ) from error
        self.store.refresh()  # another launch may have written since
        needed = shard_bytes() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if needed > free:
            raise UserError(
                f"checkpoint.staging_dir: {self.shards} has {human_bytes(free)} free, but this machine's "
                f"shards of a checkpoint need about {human_bytes(needed)} before the upload to {self.place}; "
                "choose a folder with more space"
            )
        if self.rank == 0:
            self._fetch_records()

    def _fetch_records(self) -> None:
        """Download the log files, to which every launch of the run appends."""
        with storage_errors("output_dir"):
            for entry in self.store.iterdir() if self.store.exists() else ():
                if entry.name.endswith((".jsonl", ".txt")) and entry.is_file():
                    copy_file(entry, self.work / entry.name)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def checkpoints(self, *, keep: int | None) -> Checkpoints[Any]:
        folder = self.store / "checkpoints"
        return Checkpoints(
            folder, keep=keep, rank=self.rank, mirror=self, outage_seconds=self._outage_seconds
        )

    def begin(self, final: RemotePath) -> None:
        """Mark a checkpoint as being written. On rank 0, before any rank sends."""
        self._token = begin(final)

    def send(self, written: Path, final: RemotePath) -> None:
        """Upload this rank's files of a checkpoint, and its records.

        Raises:
            RemoteError: what was sent stays, marked as incomplete; no upload is left open.
        """
        _send({written / name: final / name for name in files_below(written)})
        self._publish()

    def complete(self, final: RemotePath, step: int | None) -> None:
        """Mark a checkpoint as complete, if this run still holds its lease. On rank 0, when all have sent."""
        self.check_held()
        complete(final, self._token, step=step)

    def check_held(self) -> None:
        """RunError if another run has taken over."""
        if self._lease is not None:
            self._lease.check()

    # -- records ---------------------------------------------------------------------------------------------

    def publish(self) -> None:
        try:
            self._publish()
        except (CheckpointError, OSError) as error:
            raise RunError(f"output_dir: {one_line(error)}") from error

    def _publish(self) -> None:
        """Upload what is new of the records; RemoteError if that fails."""
        with self._sending:
            began = time.monotonic()
            try:
                self.check_held()
                # Hidden files are temporary and will be renamed.
                names = {n: f for n, f in files_below(self.work).items() if "/." not in f"/{n}"}
                new = {name: found for name, found in names.items() if self._sent.get(name) != found}
                _send({self.work / name: self.store / name for name in new})
            finally:
                self._next = time.monotonic() + max(PAUSE, SHARE * (time.monotonic() - began))
            self._sent.update(new)

    def publish_soon(self, *, at_once: bool = False) -> None:
        busy = self._sender is not None and self._sender.is_alive()
        if not at_once and (busy or time.monotonic() < self._next):
            return
        self._sender = threading.Thread(target=self._try_to_publish, name="records", daemon=True)
        self._sender.start()

    def _try_to_publish(self) -> None:
        try:
            self.publish()
        except RunError as error:
            tell(f"warning: {one_line(error)}; trying again later")

    def close(self) -> None:
        if is_taken(self._staging):
            self._try_to_publish()
            shutil.rmtree(self._staging, ignore_errors=True)


def _send(files: Mapping[Path, RemotePath]) -> None:
    """Upload files side by side. The first error is raised after the running uploads have ended."""
    jobs = (lambda _, path=path, target=target: target.upload_file(path) for path, target in files.items())
    in_parallel(jobs, lambda _: None, UPLOADS)
