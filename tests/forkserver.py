"""One server of forks for all processes that run tests: it imports torch and transformers once.

Ranks, XLA processes and the zygote are its forks. ``multiprocessing`` would start one server for each process
of xdist, each with ten seconds of imports. Therefore, the controller starts the server as early as possible,
and the others connect to it. A fork still ends with the process that requested it.
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
    """Start the server, or return the address of the running server."""
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    return server._forkserver_address, os.getpid(), server._forkserver_alive_fd


def connect(address: Address) -> None:
    """Let the server at ``address`` create the forks of this process."""
    server: Any = forkserver._forkserver
    server._forkserver_address, pid, pipe = address
    server._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{pipe}", os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running


def write_where_parent_does() -> None:
    """Send the output of this fork to the process that requested it: pytest shows it with a failure."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    for number in (1, 2):
        with suppress(OSError):
            file = os.open(f"/proc/{parent.pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
