"""Rules about the settings of offloading and sharding with FSDP2 and DDP, for a resolved config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_memory(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the settings of section ``memory`` that FSDP2 or DDP does not support."""
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if config.get(key) == "nvme":
            yield SettingProblem(
                (key,), f"{key}: nvme needs DeepSpeed; set strategy to zero3, or {key} to cpu"
            )
        if config.strategy == "no_shard" and config.get(key) != "none":
            yield SettingProblem(
                (key, "strategy"),
                f"{key}: does not work with strategy no_shard; set strategy to full_shard, which also "
                "works on one rank",
            )


def check_fsdp(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the settings of section ``fsdp`` that have no effect with DDP."""
    for name, value in config.fsdp if config.strategy == "no_shard" else ():
        if value is not None:
            key = f"fsdp.{name}"
            reason = (
                f"{key}: has no effect with strategy no_shard; remove {key}, or set strategy to full_shard"
            )
            yield SettingProblem((key,), reason)
