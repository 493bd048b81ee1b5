"""DeepSpeed's C++ ops, which torch builds at their first use, one process at a time.

An older torch's lock is a file in the folder of the build (a FileBaton). A process that is killed leaves it
behind, and torch waits for ever until it is gone. A newer torch's lock ends with its process; the file stays.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from portable.private import torch_internals
from portable.terminal import print_status

ABANDONED_BUILD_SECONDS = 300.0
"""Seconds without a change in the folder after which a build that no process here holds was killed: one on
another machine of a shared file system cannot be seen, and compiles each file for a minute or less."""
_PATIENCE, _PAUSE = 2.0, 0.2


def wait_for_op_build(op_name: str) -> None:
    """Wait until no other process builds DeepSpeed's ``op_name``; remove the lock of one that was killed."""
    from torch.utils import cpp_extension

    lock = Path(torch_internals.get_build_folder(op_name, verbose=False)) / "lock"
    start_time, has_warned = time.monotonic(), False
    while hasattr(cpp_extension, "FileBaton") and lock.exists():
        if (
            not _is_open_in_any_process(lock)
            and time.time() - _get_last_change_time(lock.parent) > ABANDONED_BUILD_SECONDS
        ):
            lock.unlink(missing_ok=True)
            print_status(f"note: removed {lock}, which a killed build of DeepSpeed's {op_name} left")
            return
        if not has_warned and time.monotonic() - start_time > _PATIENCE:
            has_warned = True
            print_status(
                f"note: waiting for another process to build DeepSpeed's {op_name}; if that process was "
                f"killed, remove {lock}"
            )
        time.sleep(_PAUSE)


def _is_open_in_any_process(file: Path) -> bool:
    """Whether a process that is seen here has ``file`` open, as the one that builds has."""
    lock_path = str(file.resolve())
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is another user's
            if str(handle.readlink()) == lock_path:
                return True
    return False


def _get_last_change_time(folder: Path) -> float:
    """When a file in ``folder`` last changed, as ``time.time()``."""
    times = [folder.stat().st_mtime]
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(entry.stat().st_mtime)
    return max(times)
