"""An output folder in an object store, with a local staging folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from portable.checkpoint.remote_store import RemoteCheckpoints, files_in, send_files
from portable.errors import RunError, UserError, one_line
from portable.formatting import human_bytes
from portable.output.lease import Lease
from portable.output.output_dir import Output
from portable.paths import storage_errors
from portable.temporary_folder import lasting_folder
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.storage.object_store import RemotePath

PAUSE = 30.0  # minimum seconds between uploads
SHARE = 20  # uploads take at most 1/20 of the time, because a file that grows is uploaded again as a whole


class RemoteOutput(Output):
    """An output URL. Every rank uploads from its own local folder, so ranks need no shared file system.

    Args:
        place: the URL.
        rank: of this process.
        staging: the local folder for uploads; None for one in the system's temporary folder.
    """

    place: RemotePath

    def __init__(self, place: RemotePath, rank: int, staging: str | None) -> None:
        self.place = place
        self.agreed = str(place)
        self.rank = rank
        base = Path(staging or lasting_folder() / f"portable-{os.getuid()}")
        self._shared = None if staging else base
        digest = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        self._staging = base.absolute() / digest / f"rank-{rank}"
        # Trackers and plots name the run by the last parts of the URL.
        self.work = self._staging / "run" / place.parent.name / place.name
        self._shards = self._staging / "shards"
        self.scratch = self._staging / "scratch"
        self._opened = False
        self._lease: Lease | None = None
        self._sent: dict[str, tuple[int, int]] = {}
        self._sending = threading.Lock()
        self._next = time.monotonic() + PAUSE
        self._sender: threading.Thread | None = None

    def check_writable(self) -> None:
        probe = self.place / f".probe-{uuid.uuid4().hex}"
        with storage_errors("output_dir"):
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        with storage_errors("output_dir"):
            lease = Lease(self.place)
            lease.__enter__()
        self._lease = lease
        try:
            yield
        finally:
            lease.__exit__(None, None, None)

    def open(self, shard_bytes: int) -> None:
        try:
            if self._shared is not None:
                _claim(self._shared)
            shutil.rmtree(self._staging, ignore_errors=True)  # left by a killed launch
            self._shards.mkdir(parents=True)
            self._staging.chmod(0o700)
            self.work.mkdir(parents=True)
            free = shutil.disk_usage(self._shards).free
        except OSError as error:
            raise UserError(
                f"checkpoint.staging_dir: {self._staging} cannot be created ({one_line(error)}); choose a "
                "writable local folder"
            ) from error
        self._opened = True
        self.place.refresh()  # another launch may have written since
        needed = shard_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if needed > free:
            raise UserError(
                f"checkpoint.staging_dir: {self._shards} has {human_bytes(free)} free, but this machine's "
                f"shards of a checkpoint need about {human_bytes(needed)} before the upload to {self.place}; "
                "choose a folder with more space"
            )
        if self.rank == 0:
            self._fetch_records()

    def _fetch_records(self) -> None:
        """Download the log files, to which every launch of the run appends."""
        with storage_errors("output_dir"):
            for entry in self.place.iterdir():
                if entry.suffix in (".jsonl", ".txt") and entry.is_file():
                    entry.download(self.work / entry.name)

    def checkpoints(self, *, keep: int | None) -> RemoteCheckpoints:
        return RemoteCheckpoints(
            self.place / "checkpoints",
            keep=keep,
            rank=self.rank,
            staging=self._shards,
            before_complete=self.publish,
            check_held=self._check_held,
        )

    def _check_held(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def publish(self) -> None:
        with self._sending:
            began = time.monotonic()
            try:
                self._check_held()
                # Hidden files are temporary and will be renamed.
                files = {n: path for n, path in files_in(self.work).items() if not path.name.startswith(".")}
                states = {name: _state(path) for name, path in files.items()}
                new = {name: state for name, state in states.items() if self._sent.get(name) != state}
                send_files({files[name]: self.place / name for name in new})
            except (CheckpointError, OSError) as error:
                raise RunError(f"output_dir: {one_line(error)}") from error
            finally:
                now = time.monotonic()
                self._next = now + max(PAUSE, SHARE * (now - began))
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
            tell(f"warning: {error}; trying again later")

    def close(self) -> None:
        if self._opened:
            self._try_to_publish()
            shutil.rmtree(self._staging, ignore_errors=True)


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _claim(folder: Path) -> None:
    """Create a folder for this user only, at a path that other users can guess.

    Raises:
        OSError: if another user created it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise OSError(f"{folder} is a link or belongs to another user")
    folder.chmod(0o700)
