"""Settings that XLA does not support, as rows of :mod:`portable.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks import NO_ZERO, Check, Several, nvidia_only
from portable.optim import user_optimizer
from portable.plugins import names_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig

GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")
OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")


def _own(c: RunConfig) -> bool:
    return names_code(c.train.optimizer)


def _chunk(c: RunConfig) -> bool:
    return isinstance(c.memory.loss_chunk_tokens, int) and c.memory.loss_chunk_tokens > 0


def _each(c: RunConfig) -> Iterator[tuple[str, str]]:
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if c.get(key) != "none":
            yield key, f"{key}: xla does not offload; set it to none"
    for name, value in c.fsdp:
        if value is not None and name != "shard_group_size":
            yield f"fsdp.{name}", f"fsdp.{name}: under SPMD the compiler schedules the gathers; remove it"


def _late(keys: str, applies: object, message: str) -> Check:
    return Check(keys, applies, message, late=True)  # type: ignore[arg-type]


CHECKS: tuple[Check | Several, ...] = (
    *nvidia_only(),
    Check(
        "model.experts backend",
        lambda c: c.model.experts is not None,
        ": XLA has one way of its own to compute experts, with fixed shapes; leave it out",
    ),
    NO_ZERO,
    Check(
        "memory.loss_chunk_tokens backend",
        _chunk,
        " {memory.loss_chunk_tokens} does not work with backend xla, where logits exist once, in the "
        "compute type; "
        "set it to auto",
    ),
    _late(
        "train.optimizer",
        lambda c: _own(c) and not user_optimizer.begins_alike(c.train),
        ": {train.optimizer}: creates state from the first gradient; on XLA, initialize it with zeros",
    ),
    _late(
        "train.optimizer xla.scan_layers",
        lambda c: _own(c) and c.xla.scan_layers and not user_optimizer.elementwise(c.train),
        ": {train.optimizer}: is not elementwise, and xla.scan_layers stacks the parameters of layers; set "
        "it to false",
    ),
    _late(
        "precision",
        lambda c: c.precision not in ("fp32", "bf16", "auto"),
        ": {precision} does not run on xla; use bf16 or fp32",
    ),
    _late(
        "train.optimizer",
        lambda c: c.train.optimizer not in OPTIMIZERS and not _own(c),
        f": {{train.optimizer}} needs CUDA or CPU kernels; use one of {', '.join(OPTIMIZERS)}",
    ),
    _late(
        "adapter.base",
        lambda c: c.adapter.base in ("nf4", "int8"),
        ": {adapter.base} needs bitsandbytes, which does not run on xla; use auto",
    ),
    _late(
        "train.micro_batch_size",
        lambda c: c.train.micro_batch_size == "auto",
        ": auto would compile a graph per size it tries on xla; set a number",
    ),
    _late(
        "memory.activation_checkpointing",
        lambda c: c.memory.activation_checkpointing == "selective",
        ": selective works on operations of eager torch, and xla compiles whole layers; use full, or "
        "none to leave "
        "the choice to the compiler",
    ),
    Several(_each, late=True),
    _late(
        "xla.sharding xla.shard_param_on_dim_0 strategy",
        lambda c: c.strategy == "no_shard" and (c.xla.sharding, c.xla.shard_param_on_dim_0) != (None, None),
        ", xla.shard_param_on_dim_0: strategy no_shard does not shard parameters; remove them",
    ),
)
