"""Lease of an output URL, so that only one run writes to it.

The lease is an object in the store that identifies the run. An object store does not
notice when a process dies, so the run changes the object every :data:`RENEWAL_SECONDS`
seconds. A new run takes over a lease that does not change for :data:`STALE_SECONDS`
seconds. If the holder was a process on the same machine that has ended, the new run takes
over the lease immediately. The clocks of the hosts are never compared.

All writes of the lease are conditional: it is created only if it does not exist, and
replaced only if it still has the version that was read. If two runs start at the same
moment, only one of them succeeds. After each write, the lease is read again to determine
its holder, because the response to the write may be lost. If a store does not support
conditional writes, a note is printed, and the writes are unconditional. Both runs may
then start. The run whose lease was overwritten no longer renews it, and stops at its next
save.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import to_printable
from portable.converters.storage.store_errors import ConflictError, NoConditionalWritesError
from portable.errors import RunError, UserError
from portable.paths import convert_storage_errors
from portable.terminal import print_status

if TYPE_CHECKING:
    from types import TracebackType

    from portable.converters.storage.object_store import RemotePath

LEASE_FILE = "lease.json"
RENEWAL_SECONDS = 15.0  # seconds between two renewals
STALE_SECONDS = 60.0  # seconds without renewal after which the holder counts as dead
# Seconds for which a request is retried; two requests per renewal must end before STALE_SECONDS.
RETRY_SECONDS = 10.0


class _StoredLease(NamedTuple):
    """Lease as read from the object store, with the version of its object.

    Attributes:
        holder: JSON object that identifies the run that holds the lease. Empty if the lease does
            not exist.
        tag: Version of the object, for a conditional write. ``""`` if the object does not exist.
    """

    holder: dict[str, Any]
    tag: Any


class Lease:
    """Context manager that holds the lease of an output URL, so that only one run writes to it.

    A thread renews the lease until the context ends. Then the lease is deleted. If another run
    holds the lease, entering the context waits up to ``STALE_SECONDS`` seconds for a renewal. If
    the lease is renewed, ``UserError`` is raised. Otherwise, the lease is taken over. ``RunError``
    is raised if the object store is unavailable.

    Args:
        place: URL of the run.
    """

    def __init__(self, place: RemotePath) -> None:
        self._object = place.with_retry_limit(RETRY_SECONDS) / LEASE_FILE
        self._place = place
        self._holder_id = uuid.uuid4().hex
        self._end_event = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_ended, name="lease", daemon=True)
        self._taken_by: str | None = None
        self._last_write_time = time.monotonic()

    def __enter__(self) -> Lease:
        with convert_storage_errors("output_dir"):
            while (lease := self._read_lease()).holder.get("id") != self._holder_id:
                holder, tag = lease
                if holder and not _is_dead_process(holder):
                    self._wait_until_gone(holder)
                with suppress(ConflictError, FileNotFoundError):  # another run has changed or deleted it
                    self._write_lease(tag)
            with suppress(ConflictError):
                self._write_lease("")  # the store must reject this write, because the lease exists
                print_status(
                    f"note: output_dir: the store of {self._place} does not support conditional writes, so "
                    "two runs that start at the same time may both write to this URL; start only one run"
                )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_event.set()
        self._thread.join(timeout=5.0)  # with a timeout, because the store may be unreachable
        with suppress(Exception):  # an undeleted lease expires
            if self._read_lease().holder.get("id") == self._holder_id:
                self._object.unlink()

    def check_not_taken(self) -> None:
        """Check that no other run has taken over the lease. Call this method before each write to the URL.

        Raises:
            RunError: If another run has taken over the lease.
            RemoteError: If the lease cannot be read.
        """
        if self._taken_by is None:
            self._detect_takeover()
        if self._taken_by is not None:
            raise RunError(
                f"output_dir: another run has started to write to {self._place} ({self._taken_by}), "
                "so this run has stopped writing; use a separate output_dir for each run"
            )

    def _detect_takeover(self) -> Any:
        """Read the lease, and record in ``_taken_by`` whether another run has taken it over.

        A missing lease also counts as taken over if this process last wrote it more than
        ``STALE_SECONDS`` seconds ago. Another run may then have taken, used and deleted it.

        Returns:
            Version tag of the lease, for the next conditional write.

        Raises:
            RemoteError: If the lease cannot be read.
        """
        holder, tag = self._read_lease()
        if holder.get("id") not in (None, self._holder_id):
            self._taken_by = _format_holder(holder)
        elif not holder and time.monotonic() - self._last_write_time > STALE_SECONDS:
            self._taken_by = "a process that has ended"  # while this process was suspended
        return tag

    def _renew_until_ended(self) -> None:
        """Renew the lease periodically until the context ends or another run takes it over.

        This method runs in a thread. If a renewal fails, the error is ignored, and the next attempt
        is made after :data:`RENEWAL_SECONDS`.
        """
        while not self._end_event.wait(RENEWAL_SECONDS) and self._taken_by is None:
            with suppress(Exception):  # the store is unreachable; if that persists, saves raise errors
                tag = self._detect_takeover()
                if self._taken_by is None:
                    self._write_lease(tag)

    def _wait_until_gone(self, holder: dict[str, Any]) -> None:
        """Wait until the run that holds the lease is gone.

        The run is gone if it has deleted the lease, or if it has not renewed the lease for
        ``STALE_SECONDS`` seconds.

        Args:
            holder: JSON object in the lease, which identifies the run.

        Raises:
            UserError: If a run renews the lease.
        """
        print_status(
            f"output_dir: {self._place} was in use by {_format_holder(holder)}; checking for "
            f"{STALE_SECONDS:.0f} s whether it is still in use"
        )
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(STALE_SECONDS / 20, 3.0))
            now, _ = self._read_lease()
            if not now:
                return
            if now != holder:
                raise UserError(
                    f"output_dir: {self._place} is in use by another run ({_format_holder(now)}); wait "
                    "for that run, stop it, or choose another URL"
                )
        print_status(
            f"warning: output_dir: {_format_holder(holder)} has stopped writing to {self._place}; this run "
            "now writes to the URL"
        )

    def _read_lease(self) -> _StoredLease:
        """Read the lease object.

        Returns:
            Holder and version tag. The holder is empty if the object does not exist, and ``{"damaged":
            True}`` if its content is invalid.
        """
        try:
            content, tag = self._object.read_versioned()
        except FileNotFoundError:
            return _StoredLease({}, "")
        with suppress(ValueError, RecursionError):
            lease = json.loads(content)
            if isinstance(lease, dict) and lease:
                return _StoredLease(lease, tag)
        return _StoredLease({"damaged": True}, tag)

    def _write_lease(self, tag: Any) -> None:
        """Write a new version of the lease.

        If the store does not support conditional writes, the lease is overwritten
        unconditionally.

        Args:
            tag: Version to replace. ``""`` if the lease must not exist yet.

        Raises:
            ConflictError: If the stored lease has another version.
            FileNotFoundError: If the lease to replace was deleted.
        """
        self._last_write_time = time.monotonic()
        # Each renewal has new content, so that the object gets a new tag.
        lease = {
            "id": self._holder_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _read_machine_identity(),
        }
        content = json.dumps({**lease, "renewal": uuid.uuid4().hex}).encode()
        try:
            self._object.write_bytes(content, expected_version=tag)
        except NoConditionalWritesError:
            self._object.write_bytes(content)


def _format_holder(holder: dict[str, Any]) -> str:
    return to_printable(f"process {holder.get('pid')} on {holder.get('host')}")


def _is_dead_process(holder: dict[str, Any]) -> bool:
    """Return whether the process that holds a lease ran on this machine and has ended.

    Returns False if the state of the process is unknown, because it ran on another machine or in
    another container, or because the system is not Linux. Returns True if the process is this
    process, because the lease is then left from an earlier run.
    """
    pid, machine = holder.get("pid"), _read_machine_identity()
    if machine is None or holder.get("machine") != machine or not isinstance(pid, int):
        return False
    if pid == os.getpid():  # a previous run in this process could not delete its lease
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _read_machine_identity() -> str | None:
    """Return an ID of the current boot of this machine and of this process's PID namespace.

    If two processes have the same ID, their PIDs can be compared: different processes have
    different PIDs. A container usually has its own PID namespace.

    Returns:
        The ID. None if the system is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not on Linux
        return None
