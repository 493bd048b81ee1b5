"""The settings that XLA does not support, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.optim import own
from portable.plugins import names_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig

STRATEGIES = ("no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")
PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")


def recomputed(config: RunConfig) -> bool:
    """Whether layers are recomputed in the backward pass; the setting has two names."""
    return config.memory.activation_checkpointing == "full" or config.xla.xla_fsdp_grad_ckpt is True


def unsupported_settings(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """For each setting: whether the config uses an unsupported value, and the error message."""
    is_own = names_code(config.train.optimizer)
    named = f"train.optimizer: {config.train.optimizer}"
    if is_own:
        yield (
            not own.begins_alike(config.train),
            f"{named}: its first step makes state of the gradient, before which xla compiles; make it zeros",
        )
        yield (
            config.xla.scan_layers and not own.elementwise(config.train),
            f"{named}: updates a part of a parameter otherwise than the whole, and xla.scan_layers puts "
            "parameters of layers together; set it to false",
        )
    yield (
        config.strategy not in STRATEGIES,
        f"strategy: {config.strategy} does not run on xla; use one of {', '.join(STRATEGIES)}",
    )
    yield (
        config.precision not in (*PRECISIONS, "auto"),
        f"precision: {config.precision} does not run on xla; use bf16 or fp32",
    )
    yield (
        config.train.optimizer not in OPTIMIZERS and not is_own,
        f"train.optimizer: {config.train.optimizer} needs CUDA or CPU kernels; use one of "
        f"{', '.join(OPTIMIZERS)}",
    )
    yield (
        config.adapter.base in ("nf4", "int8"),
        f"adapter.base: {config.adapter.base} needs bitsandbytes, which does not run on xla; use auto",
    )
    yield (
        config.train.micro_batch_size == "auto",
        "train.micro_batch_size: auto would compile a graph per size it tries on xla; set a number",
    )
    yield (
        config.log.memory_snapshot,
        "log.memory_snapshot: torch records the allocations of GPUs only; set it to false",
    )
    for name in ("offload_optimizer", "offload_params"):
        value = getattr(config.memory, name)
        yield value != "none", f"memory.{name}: xla does not offload; set it to none"
    yield (
        config.memory.activation_checkpointing == "selective",
        "memory.activation_checkpointing: selective works on operations of eager torch, and xla compiles "
        "whole layers; use full, or none to leave the choice to the compiler",
    )
    for name, value in config.fsdp:
        yield (
            value is not None and name != "shard_group_size",
            f"fsdp.{name}: under SPMD the compiler schedules the gathers; remove it",
        )
    yield from _xla_fsdp_settings(config)


def _xla_fsdp_settings(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Names of xla_fsdp_settings that SPMD does not support. A value that is true anyway is accepted."""
    xla = config.xla
    rules = xla.sharding is not None or xla.shard_param_on_dim_0 is not None
    yield (
        config.strategy == "no_shard" and rules,
        "xla.sharding, xla.shard_param_on_dim_0: strategy no_shard does not shard parameters; remove them",
    )
    yield (
        xla.compute_dtype == "float16" or xla.buffer_dtype == "float16",
        "xla: TPUs do not compute in float16; use bfloat16",
    )
    yield (
        xla.fp32_reduce_scatter is True and config.precision != "fp32",
        "xla.fp32_reduce_scatter: under SPMD gradients are reduced in the compute type; use precision fp32, "
        "or remove it",
    )
    gathered_once = config.strategy in GATHERED_ONCE
    yield (
        xla.reshard_after_forward is gathered_once,
        f"xla.reshard_after_forward: {str(xla.reshard_after_forward).lower()} contradicts strategy "
        f"{config.strategy}; use strategy {_counterpart(config.strategy)}, or remove it",
    )
    for name, value, reason in (
        ("disable_reshard_on_root", True, "under SPMD there are no units and no root"),
        ("flatten_parameters", True, "under SPMD parameters are sharded along a dim and keep their shape"),
        ("pin_layout_in_collective_ops", True, "under SPMD the compiler places the collectives"),
        ("execute_sharding_on_init", False, "parameters are always sharded on creation"),
        ("optimization_barrier_in_forward", True, "under SPMD the compiler schedules the gathers"),
    ):
        yield getattr(xla, name) is value, f"xla.{name}: {reason}; remove it"
    yield (
        xla.auto_wrap_policy in ("size_based_wrap", "no_wrap"),
        f"xla.auto_wrap_policy: {xla.auto_wrap_policy} has no effect under SPMD, which wraps nothing and "
        "recomputes each transformer layer; remove it",
    )


def _counterpart(strategy: str) -> str:
    pairs = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
    other = {b: a for a, b in pairs.items()}
    return {**pairs, **other}.get(strategy, "full_shard")
