"""Make processes die with their parent. This module imports only modules that load fast."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import spawn
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
# A spawned process runs this code first, because the parent may be killed while the process imports its
# modules.
_CODE_OF_SPAWNED_PROCESS = (
    "import ctypes, os; ctypes.CDLL(None).prctl({option}, {signal}, 0, 0, 0); "
    "os.getppid() == {parent} or os._exit(1); "
)


def die_with_parent(expected_parent_pid: int | None = None) -> None:
    """Arrange for this process to be killed when its parent dies.

    On Linux, the kernel kills this process (``PR_SET_PDEATHSIG``). It does so when the thread that
    started this process ends, even if the parent continues to run. On other systems, a thread of
    this process polls the parent.

    Args:
        expected_parent_pid: Process id of the parent that started this process. If the current
            parent is another process, the expected parent has already died, and this process exits
            at once. None to accept any parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_kill_when_parent_ends, args=(os.getppid(),), daemon=True).start()
    if expected_parent_pid is not None and os.getppid() != expected_parent_pid:
        os._exit(1)


def _kill_when_parent_ends(parent_pid: int) -> None:
    """Wait until the parent process ends, and then kill this process. Used on systems other than Linux."""
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def kill_spawned_processes_with_parent() -> Iterator[None]:
    """Make processes that ``multiprocessing`` spawns within this context die with this process.

    The context replaces ``multiprocessing.spawn.get_command_line``, so that a spawned process
    requests this from the kernel before it imports any other module. The spawned process therefore
    also dies if this process is killed during those imports. Does nothing on systems other than
    Linux.
    """
    if sys.platform != "linux":
        yield
        return
    first = _CODE_OF_SPAWNED_PROCESS.format(
        option=_PR_SET_PDEATHSIG, signal=int(signal.SIGKILL), parent=os.getpid()
    )
    original = spawn.get_command_line

    def build_command_line(**arguments: object) -> list[str]:
        line: list[str] = original(**arguments)
        if "-c" in line:  # a frozen program has no such argument
            index = line.index("-c") + 1
            line[index] = first + line[index]
        return line

    spawn.get_command_line = build_command_line
    try:
        yield
    finally:
        spawn.get_command_line = original
