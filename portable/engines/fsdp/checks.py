"""Validate the offloading and sharding settings for FSDP2 and DDP, in a resolved config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem
from portable.data.samples.order import count_accumulation_steps
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_memory(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting in the section ``memory`` that FSDP2 or DDP does not support."""
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
    """Yield a problem for each setting in the section ``fsdp`` that has no effect with DDP."""
    for name, value in config.fsdp if config.strategy == "no_shard" else ():
        if value is not None:
            key = f"fsdp.{name}"
            reason = (
                f"{key}: has no effect with strategy no_shard; remove {key}, or set strategy to full_shard"
            )
            yield SettingProblem((key,), reason)


def check_fused_backward_on_ranks(config: RunConfig, world_size: int) -> None:
    """Check that a rank can update a parameter during the backward pass without the other parameters.

    Args:
        config: Config of the run, with ``train.fused_backward``.
        world_size: Number of ranks.

    Raises:
        UserError: If DDP sums the gradients over the ranks, which it does only after the hooks that update
            the parameters. Or if adafactor sums moments over the ranks, because the rounding of these sums
            depends on the number of parameters in the all-reduce.
    """
    if world_size > 1 and config.strategy == "no_shard":
        raise UserError(
            f"train.fused_backward: strategy no_shard sums gradients over {world_size} ranks only after the "
            "backward pass; use full_shard, or a single rank"
        )
    if world_size > 1 and config.train.optimizer == "adafactor":
        raise UserError(
            f"train.fused_backward: adafactor sums its moments over {world_size} ranks for all parameters at "
            "once; use adamw or adamw_8bit, or a single rank"
        )


def check_gradients_complete_in_one_pass(config: RunConfig, world_size: int) -> None:
    """Check that a single backward pass on every rank computes the gradients of a step.

    Does nothing unless ``train.fused_backward`` is set.

    Args:
        config: Config of the run.
        world_size: Number of ranks.

    Raises:
        UserError: If a step has several micro-batches, or see :func:`check_fused_backward_on_ranks`.
    """
    train = config.train
    if not train.fused_backward:
        return
    check_fused_backward_on_ranks(config, world_size)
    assert train.micro_batch_size != "auto"
    num_groups = max(1, world_size // config.ranks_together)
    steps = count_accumulation_steps(train.global_batch_size, train.micro_batch_size, num_groups)
    if steps > 1:
        raise UserError(
            f"train.fused_backward: a step has {steps} micro-batches, whose gradients are accumulated; set "
            f"train.micro_batch_size to {-(-train.global_batch_size // num_groups)}, or lower "
            "train.global_batch_size"
        )
