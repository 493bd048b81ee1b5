"""Settings that the engines on torch.distributed do not support, as rows of :mod:`portable.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks import Check, Several, nvidia_only
from portable.config.derived import ZERO
from portable.registry import engine_part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def _without_zero(c: RunConfig) -> Iterator[tuple[str, str]]:
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if c.strategy not in ZERO and c.get(key) == "nvme":
            yield f"{key} strategy", f"{key}: nvme needs DeepSpeed; use strategy zero3, or cpu"
        if c.strategy == "no_shard" and c.get(key) != "none":
            reason = "strategy no_shard does not offload; use full_shard, which offloads on one rank as well"
            yield f"{key} strategy", f"{key}: {reason}"
    for name, value in c.fsdp:
        if c.strategy == "no_shard" and value is not None:
            reason = "nothing is sharded under no_shard; remove it, or use full_shard"
            yield f"fsdp.{name} strategy", f"fsdp.{name}: {reason}"


CHECKS: tuple[Check | Several, ...] = (
    Several(_without_zero, late=True),
    *engine_part(ZERO[0], "checks").CHECKS,
)
NOT_CUDA: tuple[Check | Several, ...] = (
    *engine_part(ZERO[0], "checks").OF_CPU,
    *nvidia_only(),
)
