"""A lease for an output URL: one run at a time, as far as an object store allows.

Object stores have no locks and do not notice when a process dies. So a run writes an object that identifies
it and renews it every :data:`RENEWED` seconds. A new run takes over a lease that does not change for
:data:`STALE` seconds. It watches the object itself, so clocks of other hosts do not matter.

Limit: two runs that start at the same moment may both begin. The one whose lease was overwritten notices at
its next renewal or save, and ends.
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
from typing import TYPE_CHECKING, Any

from portable.errors import RunError, UserError
from portable.terminal import tell

if TYPE_CHECKING:
    from types import TracebackType

    from converters.storage.object_store import RemotePath

LEASE_FILE = "lease.json"
RENEWED = 15.0  # seconds between two renewals
STALE = 60.0  # seconds without renewal after which the holder counts as dead
LONG_GONE = 1800.0  # seconds, more than any difference of clocks: an older lease is stale without watching


class Lease:
    """Holds the lease of ``place`` within a context.

    Raises:
        UserError: if another run holds it.
    """

    def __init__(self, place: RemotePath) -> None:
        self._object = place / LEASE_FILE
        self._place = place
        self._id = uuid.uuid4().hex
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._taken_by: str | None = None

    def __enter__(self) -> Lease:
        self._wait_for_the_holder()
        self._write()
        if (holder := self._read()).get("id") != self._id:
            raise self._in_use(holder)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)  # the store may be unreachable
        with suppress(Exception):  # the lease will expire
            if self._read().get("id") == self._id:
                self._object.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that no other run writes here. Call it before completing a write.

        Raises:
            RunError: if another run took the lease.
        """
        if self._taken_by is None:
            self._look()
        if self._taken_by is not None:
            raise RunError(
                f"output_dir: another run has started to write to {self._place} ({self._taken_by}); this run "
                "writes nothing more there"
            )

    def _look(self) -> None:
        holder = self._read()
        if holder.get("id") not in (None, self._id):
            self._taken_by = _shown(holder)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED) and self._taken_by is None:
            with suppress(Exception):  # unreachable for now: saves raise if that persists
                self._look()
                if self._taken_by is None:
                    self._write()

    def _wait_for_the_holder(self) -> None:
        """Return when no run holds the lease."""
        holder = self._read()
        if not holder or _is_gone(holder):
            return
        tell(
            f"output_dir: {self._place} was in use by {_shown(holder)}; checking for {STALE:.0f} s whether "
            "it still is"
        )
        deadline = time.monotonic() + STALE
        while time.monotonic() < deadline:
            time.sleep(min(STALE / 20, 3.0))
            now = self._read()
            if not now:
                return
            if now != holder:
                raise self._in_use(now)
        tell(
            f"warning: output_dir: {_shown(holder)} no longer renews its lease of {self._place}; taking over "
            "the lease"
        )

    def _read(self) -> dict[str, Any]:
        """Read the lease; empty if there is none."""
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(self._object.read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    def _write(self) -> None:
        lease = {
            "id": self._id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "renewed": time.time(),
        }
        self._object.write_bytes(json.dumps(lease).encode())

    def _in_use(self, holder: dict[str, Any]) -> UserError:
        return UserError(
            f"output_dir: {self._place} is in use by another run ({_shown(holder)}); "
            "wait for it, stop it or choose another URL"
        )


def _shown(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder is known to be dead without watching."""
    renewed = holder.get("renewed")
    if not isinstance(renewed, int | float) or time.time() - renewed > LONG_GONE:
        return True
    pid, machine = holder.get("pid"), _machine()
    if machine is None or holder.get("machine") != machine or not isinstance(pid, int):
        return False
    if pid == os.getpid():  # an earlier run in this process could not delete its lease
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _machine() -> str | None:
    """Identify the boot of this machine and the container, within which process ids are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not on Linux
        return None
