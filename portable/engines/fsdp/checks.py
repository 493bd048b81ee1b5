"""Validate the offloading and sharding settings of a resolved config for FSDP2 and DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem
from portable.data.samples.order import count_accumulation_steps
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_memory(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting of the section ``memory`` that is not supported.

    FSDP2 and DDP do not support ``nvme`` as the value of ``offload_optimizer`` or
    ``offload_params``. With strategy ``no_shard``, both settings must be ``none``.
    """
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if config.get(key) == "nvme":
            yield SettingProblem(
                (key,), f"{key}: nvme needs DeepSpeed; set strategy to zero3, or set {key} to cpu"
            )
        if config.strategy == "no_shard" and config.get(key) != "none":
            yield SettingProblem(
                (key, "strategy"),
                f"{key}: does not work with strategy no_shard; set strategy to full_shard, which also "
                "works on one rank",
            )


def check_fsdp(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting of the section ``fsdp`` that is set with ``no_shard``.

    With strategy ``no_shard``, the settings have no effect. A value of None means that a setting is
    not set. With any other strategy, nothing is yielded.
    """
    for name, value in config.fsdp if config.strategy == "no_shard" else ():
        if value is not None:
            key = f"fsdp.{name}"
            reason = (
                f"{key}: has no effect with strategy no_shard; remove {key}, or set strategy to full_shard"
            )
            yield SettingProblem((key,), reason)


def check_fused_backward_on_ranks(config: RunConfig, world_size: int) -> None:
    """Check that each parameter can be updated during the backward pass, independently of the others.

    On several ranks, two settings prevent this:

    - With strategy ``no_shard``, DDP sums the gradients over the ranks only after the hooks that
      update the parameters.
    - Adafactor sums moments over the ranks. The rounding of these sums depends on the number of
      parameters in the all-reduce.

    Args:
        config: Config of the run, with ``train.fused_backward``.
        world_size: Number of ranks.

    Raises:
        UserError: If there are several ranks, and one of these settings is used.
    """
    if world_size > 1 and config.strategy == "no_shard":
        raise UserError(
            f"train.fused_backward: strategy no_shard sums gradients over {world_size} ranks only after the "
            "backward pass; set strategy to full_shard, or use a single rank"
        )
    if world_size > 1 and config.train.optimizer == "adafactor":
        raise UserError(
            f"train.fused_backward: adafactor sums its moments over {world_size} ranks for all parameters at "
            "once; set train.optimizer to adamw or adamw_8bit, or use a single rank"
        )


def check_gradients_complete_in_one_pass(config: RunConfig, world_size: int) -> None:
    """Check that the gradients of a step are complete after one backward pass on every rank.

    Does nothing unless ``train.fused_backward`` is set.

    Args:
        config: Config of the run. If ``train.fused_backward`` is set, ``train.micro_batch_size``
            must not be ``auto``.
        world_size: Number of ranks.

    Raises:
        UserError: If a step has several micro-batches, or if :func:`check_fused_backward_on_ranks`
            fails.
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
            f"train.fused_backward: does not work with gradient accumulation, but a step has {steps} "
            f"micro-batches; set train.micro_batch_size to {-(-train.global_batch_size // num_groups)}, or "
            "lower train.global_batch_size"
        )
