"""XLA on virtual devices that stays up from one test to the next.

A process has one number of devices for life, so there is one process for each number that tests ask for.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

from tests.durations import starting
from tests.ranks import RankError, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


class XlaPool:
    """Processes with 1, 2, 4, ... virtual XLA devices, started when they are first asked for.

    Args:
        environment: of theirs, in addition.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._workers: dict[int, tuple[Connection, BaseProcess]] = {}

    def run(self, devices: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> Any:
        """Call a picklable ``function`` where there are ``devices`` devices; returns what it returned.

        Raises:
            RankError: with its traceback.
        """
        if devices not in self._workers:
            with starting(f"XLA on {devices} devices"):
                self._workers[devices] = self._start()
        connection, _ = self._workers[devices]
        environment = {**self._environment, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
        connection.send((environment, function, arguments))
        if not connection.poll(timeout):
            raise RankError(f"no answer in {timeout} s")
        ok, value, _ = connection.recv()
        if not ok:
            raise RankError(value)
        return value

    def _start(self) -> tuple[Connection, BaseProcess]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        return ours, process

    def close(self) -> None:
        for _, process in self._workers.values():
            process.kill()
