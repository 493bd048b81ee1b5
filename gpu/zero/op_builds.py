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
    """Wait while another process builds a DeepSpeed op, and remove the lock of a killed process.

    A lock is removed if no process on this machine has it open, and if the build folder has not
    changed for :data:`ABANDONED_BUILD_SECONDS`. There is no limit for the waiting time.

    Prints a note if it waits for more than two seconds or removes a lock. In newer torch releases,
    this function does nothing, because the operating system releases the lock when a process ends.

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
                f"note: removed the lock file {lock}, which an interrupted build of DeepSpeed's {op_name} "
                "left behind"
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
    """Return whether any process of this user on this machine has a file open.

    The function is called for the lock file of a DeepSpeed op, which a process keeps open while it
    builds the op. Processes of other users are not visible.
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
