"""Ranks that stay up from one test to the next.

Importing torch and transformers takes seconds, so a session starts four processes once; each test then runs
functions on the first one to four of them, in a process group of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

MOST_RANKS = 4


class RankError(AssertionError):
    """A rank's traceback."""


def serve(connection: Connection) -> None:
    """Run tasks (environment variables, function, arguments) from ``connection``, one after another."""
    os.environ["USE_TORCH_XLA"] = "0"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        environment, function, arguments = task
        os.environ.update(environment)
        try:
            connection.send((True, function(*arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


class RankPool:
    """Up to :data:`MOST_RANKS` processes that run functions as ranks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(MOST_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120
    ) -> Any:
        """Call a picklable ``function`` on each of ``world_size`` ranks; returns what rank 0 returned.

        Raises:
            RankError: with the traceback of the first rank that failed.
        """
        port = _free_port()
        for rank, connection in enumerate(self._connections[:world_size]):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            connection.send((environment, function, arguments))
        results = []
        for rank, connection in enumerate(self._connections[:world_size]):
            if not connection.poll(timeout):
                raise RankError(f"rank {rank} of {world_size} gave no answer in {timeout} s")
            ok, value = connection.recv()
            if not ok:
                raise RankError(f"rank {rank} of {world_size}:\n{value}")
            results.append(value)
        return results[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
