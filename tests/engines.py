"""Every engine, with its settings and the numbers of ranks or devices to test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.ranks import RankPool
from tests.torchtpu.pool import NEEDS_TORCH_TPU, TpuPool, is_here
from tests.xla import XlaPool


class Kind(NamedTuple):
    """Settings of an engine, and the world sizes to test. A run begins on the first one."""

    settings: dict[str, Any]
    sizes: tuple[int, ...]

    def sharers(self, size: int) -> int:
        """Return the number of ranks, devices or parallel groups that share a batch, for a world size."""
        together = ("context_parallel_size", "tensor_parallel_size")
        sharing: int = math.prod(self.settings.get(name, 1) for name in together)
        return size // sharing


OFFLOADED: dict[str, Any] = {"memory__offload_optimizer": "cpu"}
ENGINES: dict[str, Kind] = {
    "no_shard": Kind({"strategy": "no_shard"}, (2, 1, 3, 4)),
    "full_shard": Kind({"strategy": "full_shard"}, (3, 2, 4, 1)),
    "shard_grad_op": Kind({"strategy": "shard_grad_op"}, (4, 3, 1, 2)),
    "hybrid_shard": Kind({"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}, (4, 2)),
    "zero1": Kind({"strategy": "zero1"}, (3, 2, 1, 4)),
    "zero1, offload": Kind({"strategy": "zero1", **OFFLOADED}, (1, 2, 4, 3)),
    "zero2": Kind({"strategy": "zero2"}, (2, 3, 4, 1)),
    "zero2, offload": Kind({"strategy": "zero2", **OFFLOADED}, (3, 1, 2, 4)),
    "zero3": Kind({"strategy": "zero3"}, (3, 4, 2, 1)),
    "zero3, offload": Kind({"strategy": "zero3", **OFFLOADED, "memory__offload_params": "cpu"}, (2, 4, 3, 1)),
    "xla": Kind({"backend": "xla"}, (2, 4)),
    "xla, shared": Kind({"backend": "xla", "context_parallel_size": 2}, (4, 2)),
    "full_shard, shared": Kind({"strategy": "full_shard", "context_parallel_size": 2}, (4, 2)),
    "full_shard, layers shared": Kind({"strategy": "full_shard", "tensor_parallel_size": 2}, (4, 2)),
    "zero3, shared": Kind({"strategy": "zero3", "context_parallel_size": 2}, (2, 4)),
    "tpu": Kind({"backend": "tpu", "model__attention": "eager"}, (2, 4)),
    "tpu, no_shard": Kind({"backend": "tpu", "strategy": "no_shard", "model__attention": "eager"}, (2,)),
}


def accumulated(size: int) -> dict[str, int]:
    """Return settings for twelve sequences per step, in two micro-batches, or three on four ranks."""
    return {"train__micro_batch_size": {1: 6, 2: 3, 3: 2, 4: 1}[size]}


class Engines:
    """Runs functions on an engine: on ranks, or in the process of the XLA devices."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def run(self, name: str, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a picklable ``function`` on ``size`` ranks or devices. Returns the result of rank 0."""
        if name.startswith("zero"):
            pytest.importorskip("deepspeed")
        if name.startswith("tpu") and not is_here():
            pytest.skip(NEEDS_TORCH_TPU)
        place = {"xla": "xla", "tpu": "tpus"}.get(name.partition(",")[0], "ranks")
        pool: RankPool | XlaPool | TpuPool = self._request.getfixturevalue(place)
        return pool.run(size, function, *arguments)
