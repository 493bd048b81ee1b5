"""Suggest settings for a run that is out of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def format_host_memory_advice(config: RunConfig) -> str:
    """Return a sentence that lists settings to change, so that the ranks need less host memory."""
    return "to use less, set " + "; ".join(_iter_host_memory_remedies(config))


def _iter_host_memory_remedies(config: RunConfig) -> Iterator[str]:
    """Yield setting changes that reduce host memory, as text such as ``data.num_workers lower``."""
    memory, zero3 = config.memory, config.strategy == "zero3"
    on_gpu = config.backend == "cuda"
    offload_targets = {
        "memory.offload_optimizer": memory.offload_optimizer,
        "memory.offload_params": memory.offload_params,
    }
    in_memory = [name for name, target in offload_targets.items() if target == "cpu"]
    for name in in_memory:
        if zero3:
            yield f"{name} nvme, with memory.nvme_path on a local disk, instead of cpu"
    if in_memory and on_gpu:
        yield f"{' or '.join(in_memory)} none, if the GPUs have enough memory"
    if "nvme" in offload_targets.values():
        yield (
            "zero_optimization.sub_group_size, offload_optimizer.buffer_count and "
            "offload_param.buffer_count lower in deepspeed.config, because swapping uses buffers in host "
            "memory"
        )
        yield from (
            f"{name} nvme as well"
            for name, target in offload_targets.items()
            if target == "none" and not on_gpu
        )
    if not zero3 and (in_memory or not on_gpu):
        yield (
            "strategy zero3, which shards all state over the ranks and can offload to disk "
            "(memory.offload_optimizer and memory.offload_params nvme, memory.nvme_path)"
        )
    elif not in_memory and not on_gpu and "nvme" not in offload_targets.values():
        yield "memory.offload_optimizer and memory.offload_params nvme, with memory.nvme_path on a local disk"
    if not on_gpu:
        yield "memory.activation_checkpointing full, or train.micro_batch_size lower"
    if config.checkpoint.async_ and config.checkpoint.saves_during_training:
        yield "checkpoint.async false, because a background save copies the checkpoint to host memory"
    if not in_memory and on_gpu:
        yield "data.num_workers lower"
    yield "or use more machines"
