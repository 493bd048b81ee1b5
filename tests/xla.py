"""XLA on virtual devices that is kept for several tests.

A process has a fixed number of devices, so there is one process for each number that tests need. The import
of torch_xla takes seconds but starts no runtime: one process imports it, and forks the others.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from tests.ranks import RankError, serve

NEEDS_XLA = "needs torch_xla: run the tests of the XLA environment (python -m tests --xla)"
"""Why a test marked ``xla`` is skipped."""
MOST_WORKERS = 32
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""XLA_FLAGS with which XLA optimizes a graph as ever, and LLVM does not optimize the code for it. Compiling,
which is most of a test, takes a sixth of the time."""

Worker = tuple[tuple[str, str], ...]


def needs_xla(item: pytest.Item) -> bool:
    """Return whether a test can run only with torch_xla, by its fixtures or by its engine.

    Other such tests have the marker ``xla`` in their files.
    """
    fixtures = getattr(item, "fixturenames", ())
    values = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    return "torch_xla" in fixtures or ("engines" in fixtures and _names_xla(values))


def _names_xla(value: object) -> bool:
    if isinstance(value, str):
        return value.partition(",")[0] == "xla"
    return isinstance(value, (list, tuple)) and any(map(_names_xla, value))


class XlaPool:
    """Processes with 1, 2, 4, ... virtual XLA devices, started at their first use."""

    def __init__(self) -> None:
        self._parent: BaseProcess | None = None
        self._unused: list[Connection] = []
        self._workers: dict[Worker, Connection] = {}
        self._starting = threading.Lock()

    def run(
        self,
        devices: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 300,
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """Call a picklable ``function`` in a process with ``devices`` devices. Returns its result.

        Args:
            devices: Number of devices.
            function: The function.
            arguments: Its arguments.
            timeout: Maximum time in seconds.
            environment: Additional environment variables. Libraries may read them only once, so each set of
                variables has a separate process.

        Raises:
            RankError: If the function failed, with its traceback.
        """
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "XLA_FLAGS": QUICK}
        variables |= environment or {}
        worker = tuple(sorted(variables.items()))
        with self._starting:
            if worker not in self._workers:
                if self._parent is None:
                    self._parent = self._start()
                self._workers[worker] = self._unused.pop()
                self._ask(worker, os.getpid, (), timeout)
        return self._ask(worker, function, arguments, timeout)

    def _ask(
        self, worker: Worker, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float
    ) -> Any:
        connection = self._workers[worker]
        connection.send((dict(worker), function, arguments))
        try:
            if not connection.poll(timeout):
                raise RankError(f"no answer in {timeout} s")
            ok, value, _ = connection.recv()
        except (EOFError, RankError) as error:
            del self._workers[worker]  # the next to ask gets another
            raise RankError(str(error) or "it died") from None
        if not ok:
            raise RankError(value)
        return value

    def _start(self) -> BaseProcess:
        # A fork itself, of the server of the ranks: torch and transformers are there.
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe() for _ in range(MOST_WORKERS)]
        parent = context.Process(target=fork_workers, args=([theirs for _, theirs in pipes],), daemon=True)
        parent.start()
        for ours, theirs in pipes:
            self._unused.append(ours)
            theirs.close()
        return parent

    def close(self) -> None:
        """End all processes."""
        if self._parent is not None and self._parent.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._parent.pid, signal.SIGKILL)
            self._parent.kill()  # if it has no separate group yet
            self._parent.join()


def fork_workers(connections: list[Connection]) -> None:
    """Fork a process for each of ``connections`` when it has a task."""
    os.setsid()
    gc.disable()
    import portable.tpu.xla.backend  # noqa: F401

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    while connections:
        for connection in wait(connections):
            connections = [other for other in connections if other is not connection]
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in connections:
                    other.close()
                serve(connection)  # type: ignore[arg-type]
                os._exit(0)
            connection.close()  # type: ignore[union-attr]
