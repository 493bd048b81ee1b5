"""Settings that XLA does not support; see :mod:`portable.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks import Mistakes, no_zero, nvidia_only
from portable.optim import user_optimizer
from portable.plugins import names_code

if TYPE_CHECKING:
    from portable.config import RunConfig

GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")
OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")


def mistakes(c: RunConfig, *, late: bool) -> Mistakes:
    """Of a run on XLA."""
    yield from nvidia_only(c, late=late)
    if c.model.experts is not None:
        yield "model.experts: XLA has one way of its own to compute experts, with fixed shapes; leave it out"
    yield from no_zero(c)
    if c.memory.loss_chunk_tokens not in ("auto", 0):
        reason = "where logits exist once, in the compute type; set it to auto"
        asked = "memory.loss_chunk_tokens {memory.loss_chunk_tokens}"
        yield f"{asked} does not work with backend xla, {reason}"
    if late:
        yield from _late(c)


def _late(c: RunConfig) -> Mistakes:
    key, of_user = "train.optimizer", names_code(c.train.optimizer)
    if of_user and not user_optimizer.begins_alike(c.train):
        reason = "creates state from the first gradient; on XLA, initialize it with zeros"
        yield f"{key}: {{train.optimizer}}: {reason}"
    if of_user and c.xla.scan_layers and not user_optimizer.elementwise(c.train):
        reason = "is not elementwise, and xla.scan_layers stacks the parameters of layers; set it to false"
        yield f"{key}: {{train.optimizer}}: {reason}"
    if c.precision not in ("fp32", "bf16", "auto"):
        yield "precision: {precision} does not run on xla; use bf16 or fp32"
    if c.train.optimizer not in OPTIMIZERS and not of_user:
        yield f"{key}: {{train.optimizer}} needs CUDA or CPU kernels; use one of {', '.join(OPTIMIZERS)}"
    if c.adapter.base in ("nf4", "int8"):
        yield "adapter.base: {adapter.base} needs bitsandbytes, which does not run on xla; use auto"
    if c.train.micro_batch_size == "auto":
        yield "train.micro_batch_size: auto would make a graph per size it tries on xla; set a number"
    if c.memory.activation_checkpointing == "selective":
        reason = "selective works on operations of eager torch, and xla compiles whole layers"
        remedy = "use full, or none to leave the choice to the compiler"
        yield f"memory.activation_checkpointing: {reason}; {remedy}"
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if c.get(key) != "none":
            yield f"{key}: xla does not offload; set it to none"
    for name, value in c.fsdp:
        if value is not None and name != "shard_group_size":
            yield f"fsdp.{name}: under SPMD the compiler schedules the gathers; remove it"
    if c.strategy == "no_shard" and (c.xla.sharding, c.xla.shard_param_on_dim_0) != (None, None):
        reason = "strategy no_shard does not shard parameters; remove them"
        yield f"xla.sharding, xla.shard_param_on_dim_0: {reason}"
