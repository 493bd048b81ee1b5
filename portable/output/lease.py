"""One run at a time under a URL, as far as an object store can tell.

A store locks nothing, and does not notice when a process dies. So whoever writes under a URL leaves an object
there that says who it is, and writes it anew every :data:`RENEWED` seconds. One that has stood still for
:data:`STALE` seconds is taken over. No clock of another host is trusted for that: the newcomer watches.

What this cannot do: of two that start within the same moment, both may begin; the one whose lease was
overwritten finds out at its next renewal or save, whichever comes first, and ends there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from types import TracebackType

    from converters.storage.object_store import RemotePath

LEASE_FILE = "lease.json"
RENEWED = 15.0  # seconds between two renewals
STALE = 60.0  # seconds without one after which the holder is taken to be gone
LONG_GONE = 1800.0  # seconds by which no two clocks differ: nobody needs to watch so old a lease


class Lease:
    """Holds ``place`` for this process, as a context.

    Raises:
        UserError: another run holds it.
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
        self._thread.join(timeout=5.0)  # it may be waiting for a store that is out of reach
        with suppress(Exception):  # it will be stale soon
            if self._read().get("id") == self._id:
                self._object.unlink(missing_ok=True)

    def check(self) -> None:
        """Make sure, before something is made final, that nobody else has begun to write here.

        Raises:
            RunError: somebody has.
        """
        if self._taken_by is None:
            self._look()
        if self._taken_by is not None:
            raise RunError(
                f"output_dir: another run has begun to write to {self._place} ({self._taken_by}); "
                "this one leaves it alone from here on"
            )

    def _look(self) -> None:
        holder = self._read()
        if holder.get("id") not in (None, self._id):
            self._taken_by = _shown(holder)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED) and self._taken_by is None:
            with suppress(Exception):  # out of reach for now: the saves will say so, if it stays so
                self._look()
                if self._taken_by is None:
                    self._write()

    def _wait_for_the_holder(self) -> None:
        """Return when nobody holds the place (any more)."""
        holder = self._read()
        if not holder or _is_gone(holder):
            return
        print(
            f"output_dir: {self._place} was in use by {_shown(holder)}; "
            f"watching for {STALE:.0f} s whether it still is",
            file=sys.stderr,
        )
        deadline = time.monotonic() + STALE
        while time.monotonic() < deadline:
            time.sleep(min(STALE / 20, 3.0))
            now = self._read()
            if not now:
                return
            if now != holder:
                raise self._in_use(now)
        print(
            f"warning: output_dir: {_shown(holder)} no longer renews its lease on {self._place}; taking it "
            "over",
            file=sys.stderr,
        )

    def _read(self) -> dict[str, Any]:
        """The lease as it is; empty where there is none."""
        with suppress(FileNotFoundError, ValueError):
            found = json.loads(self._object.read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    def _write(self) -> None:
        said = {
            "id": self._id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "renewed": time.time(),
        }
        self._object.write_bytes(json.dumps(said).encode())

    def _in_use(self, holder: dict[str, Any]) -> UserError:
        return UserError(
            f"output_dir: {self._place} is in use by another run ({_shown(holder)}); "
            "wait for it, stop it or choose another place"
        )


def _shown(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder can be known to be gone without watching."""
    renewed = holder.get("renewed")
    if not isinstance(renewed, int | float) or time.time() - renewed > LONG_GONE:
        return True
    pid, machine = holder.get("pid"), _machine()
    if machine is None or holder.get("machine") != machine or not isinstance(pid, int):
        return False
    if pid == os.getpid():  # of an earlier run in this process, which could not let go
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _machine() -> str | None:
    """What tells this boot of this machine, and the container, whose process numbers are its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not on Linux
        return None
