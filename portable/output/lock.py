"""The lock of an output folder: one run at a time."""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from converters.storage.safe_open import open_own
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        descriptor = open_own(folder / LOCK_FILE, os.O_RDWR, 0o644)
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
