"""Wait for other processes that build DeepSpeed's C++ ops.

torch compiles an op at its first use, in one process at a time. Older torch releases use a file in
the build folder as the lock (``FileBaton``). A killed process leaves the file behind, and other
processes would wait forever, so this module removes the file. In newer releases, the operating
system releases the lock when the process ends, so a remaining file does not matter.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from portable.private import torch_internals
from portable.terminal import print_status

ABANDONED_BUILD_SECONDS = 300.0
"""Seconds without a change in the build folder after which a lock is considered abandoned.

This applies to a lock file that no process on this machine has open.

A process on another machine may hold the lock on a shared file system, which cannot be detected directly.
Such a process changes the folder at least about once a minute, because it compiles each file in that time.
"""
_PATIENCE, _PAUSE = 2.0, 0.2


def wait_for_op_build(op_name: str) -> None:
    """Wait until no other process builds a DeepSpeed op, and remove the lock of a killed process.

    Prints a note if it waits for more than two seconds or removes a lock. Returns immediately with
    newer torch releases.

    Args:
        op_name: Name of the op, such as ``cpu_adam``.
    """
    from torch.utils import cpp_extension

    lock = Path(torch_internals.get_build_folder(op_name, verbose=False)) / "lock"
    start_time, has_warned = time.monotonic(), False
    while hasattr(cpp_extension, "FileBaton") and lock.exists():
        if (
            not _is_open_in_any_process(lock)
            and time.time() - _get_last_change_time(lock.parent) > ABANDONED_BUILD_SECONDS
        ):
            lock.unlink(missing_ok=True)
            print_status(
                f"note: removed {lock}, which an interrupted build of DeepSpeed's {op_name} had left"
            )
            return
        if not has_warned and time.monotonic() - start_time > _PATIENCE:
            has_warned = True
            print_status(
                f"note: waiting for another process to build DeepSpeed's {op_name}; if that process was "
                f"killed, remove {lock}"
            )
        time.sleep(_PAUSE)


def _is_open_in_any_process(file: Path) -> bool:
    """Return whether any process on this machine has a file open.

    A process that builds an op keeps its lock file open. Other users' processes are not visible.
    """
    lock_path = str(file.resolve())
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if str(handle.readlink()) == lock_path:
                return True
    return False


def _get_last_change_time(folder: Path) -> float:
    """Return the latest modification time of a folder and the files in it, comparable to ``time.time()``."""
    times = [folder.stat().st_mtime]
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(entry.stat().st_mtime)
    return max(times)
