"""Ranks with one chip each of a slice that :mod:`tests.torchtpu.stand_in` emulates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.ranks import RankPool
from tests.torchtpu.stand_in import environment, find_chips

NEEDS_TORCH_TPU = "needs torch_tpu and its stand-in: pip install -c constraints.txt -e '.[test]', on Linux"


def is_here() -> bool:
    return bool(find_spec("torch_tpu") and find_spec("fastatomstruct_xla_cpu"))


class TpuPool:
    """Processes that run for several tests. A slice has a fixed number of chips."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        self._folders = ExitStack()

    def run(self, chips: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> Any:
        """Run a function on ranks, see :meth:`tests.ranks.RankPool.run`."""

        def in_a_slice() -> object:
            folder = tempfile.TemporaryDirectory(dir="/dev/shm")
            return environment(Path(self._folders.enter_context(folder)), chips), find_chips, ()

        if chips not in self._pools:
            self._pools[chips] = RankPool(in_a_slice)
        return self._pools[chips].run(chips, function, *arguments, timeout=timeout)

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._folders.close()
