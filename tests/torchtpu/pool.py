"""Ranks with one chip each of a slice that :mod:`tests.torchtpu.stand_in` emulates."""

from __future__ import annotations

import signal
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.ranks import RankError, RankPool
from tests.torchtpu.stand_in import environment, find_chips

ATTEMPTS = 5
NEEDS_TORCH_TPU = "needs torch_tpu and its stand-in: pip install -c constraints.txt -e '.[test]', on Linux"


def is_here() -> bool:
    return bool(find_spec("torch_tpu") and find_spec("fastatomstruct_xla_cpu"))


class TpuPool:
    """Processes that run for several tests. A slice has a fixed number of chips."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        self._folders = ExitStack()

    def run(self, chips: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> Any:
        """Run a function on ranks, see :meth:`tests.ranks.RankPool.run`.

        Runs it again, up to ``ATTEMPTS`` times, if a rank aborted. A worker thread of torch_tpu 0.2 aborts
        the process if it drops the last reference to a tensor. This happens about once in a thousand runs
        on a busy machine, and has happened twice in a row.
        """

        def in_a_slice() -> object:
            folder = tempfile.TemporaryDirectory(dir="/dev/shm")
            return environment(Path(self._folders.enter_context(folder)), chips), find_chips, ()

        if chips not in self._pools:
            self._pools[chips] = RankPool(in_a_slice)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._pools[chips].run(chips, function, *arguments, timeout=timeout)
            except RankError as error:
                if attempt == ATTEMPTS or f"exit code {-signal.SIGABRT}" not in str(error):
                    raise
                warnings.warn(f"torch_tpu aborted, so the ranks start again: {error}", stacklevel=2)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._folders.close()
