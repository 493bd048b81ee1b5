"""What to change where host memory runs out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def advice(config: RunConfig) -> str:
    """The settings that decide how much host memory a run's ranks take, and what else they could be."""
    return "to take less, set " + "; ".join(_remedies(config))


def _remedies(config: RunConfig) -> Iterator[str]:
    memory, zero3 = config.memory, config.strategy == "zero3"
    on_gpu = config.backend == "cuda"
    kept = {
        "memory.offload_optimizer": memory.offload_optimizer,
        "memory.offload_params": memory.offload_params,
    }
    in_memory = [name for name, place in kept.items() if place == "cpu"]
    for name in in_memory:
        if zero3:
            yield f"{name} nvme, with memory.nvme_path on a local disk, in place of cpu"
    if in_memory and on_gpu:
        yield f"{' or '.join(in_memory)} none, where the GPUs have room"
    if "nvme" in kept.values():
        yield (
            "zero_optimization.sub_group_size, offload_optimizer.buffer_count and offload_param.buffer_count "
            "lower in deepspeed.config, since what is swapped passes through host memory"
        )
        yield from (f"{name} nvme as well" for name, place in kept.items() if place == "none" and not on_gpu)
    if not zero3 and (in_memory or not on_gpu):
        yield (
            "strategy zero3, which shares all state among the ranks and can offload to a disk "
            "(memory.offload_optimizer and memory.offload_params nvme, memory.nvme_path)"
        )
    elif not in_memory and not on_gpu and "nvme" not in kept.values():
        yield "memory.offload_optimizer and memory.offload_params nvme, with memory.nvme_path on a local disk"
    if not on_gpu:
        yield "memory.activation_checkpointing full, or train.micro_batch_size lower"
    if config.checkpoint.async_ and config.checkpoint.saves_on_the_way:
        yield "checkpoint.async false, since a copy of a checkpoint waits in host memory while it is written"
    if not in_memory and on_gpu:
        yield "data.num_workers lower"
    yield "or take more machines"
