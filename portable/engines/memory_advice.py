"""Suggest settings for a run that is out of device memory or out of host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.derived_defaults import ZERO_STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portable.config import RunConfig

FULL_CHECKPOINTING = {"memory.activation_checkpointing": "full"}
FUSED_REQUIREMENTS = {"train.max_grad_norm": None, "train.on_non_finite": "stop"}
"""Settings that ``train.fused_backward`` requires. They change the result of a run that clips gradients."""


def iter_device_memory_remedies(
    config: RunConfig, ranks: int, is_supported: Callable[[dict[str, Any]], bool], *, has_host_copies: bool
) -> Iterator[str]:
    """Yield settings that reduce device memory, roughly sorted by cost, with a low cost first.

    The costs are listed in docs/strategies.md.

    Args:
        config: Config of the run.
        ranks: Number of ranks.
        is_supported: Function that takes a dict of new values, keyed by setting. It returns whether
            the config is valid with these values. Not all suggested settings are checked with this
            function.
        has_host_copies: Whether activations can be copied to separate host memory, so that
            offloading them saves device memory. False if the device does not have its own memory.

    Yields:
        Text such as ``strategy zero3``. If the setting requires another setting, the required
        setting follows, as in ``memory.offload_optimizer cpu with full_shard``. If the setting
        changes the result of the run, a remark follows in parentheses.
    """
    memory, train = config.memory, config.train
    sharded = "zero3" if config.strategy in ZERO_STRATEGIES else "full_shard"
    if memory.loss_chunk_tokens == 0 and sharded != "zero3":  # ZeRO always computes all logits at once
        yield "memory.loss_chunk_tokens auto"
    if memory.activation_checkpointing != "full":
        yield "memory.activation_checkpointing full"
    if has_host_copies and not memory.offload_activations:
        offloaded = {"memory.offload_activations": True}
        if is_supported(offloaded):
            yield "memory.offload_activations true"
        elif is_supported(offloaded | FULL_CHECKPOINTING):
            yield "memory.offload_activations true with memory.activation_checkpointing full"
    if not train.fused_backward and config.adapter.type is None:  # an adapter has small gradients
        fused = {"train.fused_backward": True}
        if is_supported(fused):
            yield "train.fused_backward true"
        elif is_supported(fused | FUSED_REQUIREMENTS):
            required = [
                f"{key} {'null' if value is None else value}"
                for key, value in FUSED_REQUIREMENTS.items()
                if config.get(key) != value
            ]
            remark = " (no clipping changes the result)" if train.max_grad_norm else ""
            yield f"train.fused_backward true with {' and '.join(required)}{remark}"
    if config.strategy != sharded and ranks > 1:
        yield f"strategy {sharded}"
    if train.master_dtype == "fp32" and is_supported({"train.master_dtype": "bf16"}):
        yield "train.master_dtype bf16 (rounding changes the result)"
    if memory.offload_optimizer == "none" and memory.offload_params == "none":
        strategy = " with full_shard" if config.strategy == "no_shard" else ""
        yield f"memory.offload_optimizer cpu{strategy}"
    if memory.offload_params == "none":
        yield "memory.offload_params cpu" + ("" if config.strategy == sharded else f" with {sharded}")


def format_host_memory_advice(config: RunConfig, *, has_device_memory: bool, runs_zero: bool) -> str:
    """Return advice that lists the settings to change so that the ranks need less host memory.

    Args:
        config: Config of the run.
        has_device_memory: Whether the device has its own memory. False for the CPU, which trains in
            host memory.
        runs_zero: Whether DeepSpeed supports the device. If not, ZeRO and NVMe are not suggested.
    """
    return "to use less, set " + "; ".join(
        _iter_host_memory_remedies(config, has_device_memory=has_device_memory, runs_zero=runs_zero)
    )


def _iter_host_memory_remedies(
    config: RunConfig, *, has_device_memory: bool, runs_zero: bool
) -> Iterator[str]:
    """Yield setting changes that reduce host memory, worded to follow the word "set".

    An example is ``data.num_workers to a lower number``. The last text is ``or use more machines``.
    """
    memory, zero3 = config.memory, config.strategy == "zero3"
    offload_targets = {
        "memory.offload_optimizer": memory.offload_optimizer,
        "memory.offload_params": memory.offload_params,
    }
    in_memory = [name for name, target in offload_targets.items() if target == "cpu"]
    for name in in_memory:
        if zero3:
            yield f"{name} to nvme instead of cpu, with memory.nvme_path on a local disk"
    if in_memory and has_device_memory:
        yield f"{' or '.join(in_memory)} to none, if the devices have enough memory"
    if "nvme" in offload_targets.values():
        yield (
            "zero_optimization.sub_group_size, offload_optimizer.buffer_count and "
            "offload_param.buffer_count in deepspeed.config to lower numbers, because swapping uses buffers "
            "in host memory"
        )
        yield from (
            f"{name} to nvme"
            for name, target in offload_targets.items()
            if target == "none" and not has_device_memory
        )
    if runs_zero and not zero3 and (in_memory or not has_device_memory):
        yield (
            "strategy to zero3, which shards all state over the ranks and can offload the state to a disk "
            "(set memory.offload_optimizer and memory.offload_params to nvme, and memory.nvme_path)"
        )
    elif runs_zero and not in_memory and not has_device_memory and "nvme" not in offload_targets.values():
        yield (
            "memory.offload_optimizer and memory.offload_params to nvme, with memory.nvme_path on a local "
            "disk"
        )
    if not has_device_memory:
        yield "memory.activation_checkpointing to full, or train.micro_batch_size to a lower number"
    if config.checkpoint.async_ and config.saves_during_training:
        yield "checkpoint.async to false, because a background save copies the checkpoint to host memory"
    if not in_memory and has_device_memory:
        yield "data.num_workers to a lower number"
    yield "or use more machines"
