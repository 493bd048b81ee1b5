"""Ranks for tests: processes that run functions in a separate process group.

Imports of torch and transformers take seconds, so a session imports them in one process, and all ranks are
its forks. Ranks are replaced after a few tests, because remains of runs add up: DeepSpeed keeps process
groups, whose threads wake a hundred times per second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from tests.forkserver import write_where_parent_does

GRACE = 10.0  # seconds that the others have to notice that a rank has failed
MOST_THREADS = 150
"""Maximum threads of a rank at the end of a test.

A rank with more is replaced, which slows down its next run.
"""
PRELOADED = (
    "tests.no_collections",
    "portable.run.rank",
    "portable.engines.backend",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "portable.private.peft_internals",
    "tests.preloaded",
)
"""Modules that ranks have imported at their start, if they are installed."""


class KilledOnce:
    """Callback that kills rank 1 after step 3, unless the file that ``KILLED_ONCE`` names exists."""

    def on_step(self, run: Any) -> None:
        note = Path(os.environ["KILLED_ONCE"])
        if run.rank == 1 and run.step == 3 and not note.exists():
            with suppress(AssertionError):  # the checkpoint of step 2 may still be written in the background
                wait_for(run.checkpoints.find_latest, 20)
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class RankError(AssertionError):
    """Error with a rank's traceback."""


def serve(connection: Connection) -> None:
    """Run tasks (environment variables, function, arguments) from ``connection``, one after another.

    Each answer is whether the task succeeded, its result or traceback, and the number of threads.
    """
    write_where_parent_does()
    os.environ["USE_TORCH_XLA"] = "0"
    # A run sets this in each of its ranks, which run later tasks as well. Gloo crashes if ranks differ in it.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    import torch

    from portable.run import finish, train

    torch.set_num_threads(1)
    # Garbage collection of all imported modules and a report would take half of the time of a short run.
    train.freeze_existing_objects = nullcontext  # type: ignore[attr-defined, assignment]
    finish.write_report = Mock(return_value=[])  # type: ignore[attr-defined]
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        environment, function, arguments = task
        os.environ.update(environment)
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        connection.send((*answer, sum(1 for _ in Path("/proc/self/task").iterdir())))


class RankPool:
    """Processes that run functions as ranks, as many as the tests need.

    Ranks that still wait for a failed rank are replaced, so that tests do not affect each other.

    Args:
        first: Function that prepares the first task of all processes that are about to start.
    """

    def __init__(self, first: Callable[[], object] = bool) -> None:
        self._first = first
        self._ranks: list[tuple[Connection, BaseProcess]] = []

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 180
    ) -> Any:
        """Call a picklable ``function`` on each of ``world_size`` ranks. Returns the result of rank 0.

        Raises:
            RankError: If a rank failed, with the traceback of the first one.
        """
        if len(self._ranks) < world_size:
            self._start(world_size - len(self._ranks))
        port = free_port()
        waiting: dict[Connection, int] = {}
        for rank, (connection, _) in enumerate(self._ranks[:world_size]):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            connection.send((environment, function, arguments))
            waiting[connection] = rank
        answers: dict[int, Any] = {}
        failure, worn = "", False
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():  # has a traceback
                    pid = self._ranks[rank][1].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(1)
                self.close()
                missing = ", ".join(str(rank) for rank in waiting.values())
                raise RankError(failure or f"no answer from rank {missing} of {world_size} in {timeout} s")
            for connection in [known for known in waiting if known in ready]:
                rank = waiting.pop(connection)
                try:
                    ok, answers[rank], threads = connection.recv()
                except EOFError:
                    process = self._ranks[rank][1]
                    process.join(GRACE)
                    ok, answers[rank], threads = False, f"ended with exit code {process.exitcode}", 0
                worn = worn or threads > MOST_THREADS
                if not ok and not failure:
                    failure = f"rank {rank} of {world_size}:\n{answers[rank]}"
                    deadline = min(deadline, time.monotonic() + GRACE)
        if worn or not all(process.is_alive() for _, process in self._ranks):
            self.close()
        if failure:
            raise RankError(failure)
        return answers[0]

    def _start(self, number: int) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        first = self._first()
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((ours, process))
            if first:
                ours.send(first)
                assert ours.recv()[0], "the first task failed"

    def close(self) -> None:
        """End all ranks. The next run starts new ones."""
        for connection, process in self._ranks:
            process.kill()
            connection.close()
        self._ranks = []


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until the condition holds, for at most this number of seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


_ports = count(os.getpid() * 100)


def free_port() -> int:
    """Return a free port below the range of ports that Linux assigns automatically.

    Another process could get a port of that range before the rank listens on it.
    """
    while True:
        port = 10_000 + next(_ports) % 20_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
