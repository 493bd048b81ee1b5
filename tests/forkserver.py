"""One server of forks for all processes that run tests: it imports torch and transformers once.

Ranks, XLA's processes and the zygote are its forks. ``multiprocessing`` would start one server for each
process of xdist, with ten seconds of imports in each. So the controller starts it, as early as it can, and
the others connect to it. What it forks for a process still ends with that process.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

Address = tuple[str, int, int]
"""The server's socket, the process that started it, and the number there of the pipe that keeps it up."""


def start() -> Address:
    """Start the server, or take the one that is there."""
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    return server._forkserver_address, os.getpid(), server._forkserver_alive_fd


def connect(address: Address) -> None:
    """Have this process's forks made by the server at ``address``."""
    server: Any = forkserver._forkserver
    server._forkserver_address, pid, pipe = address
    server._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{pipe}", os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running


def write_where_parent_does() -> None:
    """Send this fork's output to that of the process that asked for it: pytest shows it with a failure."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    for number in (1, 2):
        with suppress(OSError):
            file = os.open(f"/proc/{parent.pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
