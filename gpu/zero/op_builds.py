"""DeepSpeed's C++ ops, which torch builds at their first use, one process at a time.

An older torch's lock is a file in the folder of the build (a FileBaton). A process that is killed leaves it
behind, and torch waits for ever until it is gone. A newer torch's lock ends with its process; the file stays.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from portable.private import torch_internals
from portable.terminal import tell

DEAD = 300.0
"""Seconds without a change in the folder after which a build that no process here holds was killed: one on
another machine of a shared file system cannot be seen, and compiles each file for a minute or less."""
_PATIENCE, _PAUSE = 2.0, 0.2


def wait_for_build(op: str) -> None:
    """Wait until no other process builds DeepSpeed's ``op``; remove the lock of one that was killed."""
    from torch.utils import cpp_extension

    lock = Path(torch_internals.get_build_folder(op, verbose=False)) / "lock"
    began, has_warned = time.monotonic(), False
    while hasattr(cpp_extension, "FileBaton") and lock.exists():
        if not _is_open(lock) and time.time() - _get_last_change(lock.parent) > DEAD:
            lock.unlink(missing_ok=True)
            tell(f"note: removed {lock}, which a killed build of DeepSpeed's {op} left")
            return
        if not has_warned and time.monotonic() - began > _PATIENCE:
            has_warned = True
            tell(
                f"note: waiting for another process to build DeepSpeed's {op}; if that process was killed, "
                f"remove {lock}"
            )
        time.sleep(_PAUSE)


def _is_open(file: Path) -> bool:
    """Whether a process that is seen here has ``file`` open, as the one that builds has."""
    wanted = str(file.resolve())
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is another user's
            if str(handle.readlink()) == wanted:
                return True
    return False


def _get_last_change(folder: Path) -> float:
    """When a file in ``folder`` last changed, as ``time.time()``."""
    times = [folder.stat().st_mtime]
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(entry.stat().st_mtime)
    return max(times)
