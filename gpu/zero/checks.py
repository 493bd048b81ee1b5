"""Settings that ZeRO does not support; see :mod:`portable.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.optim import user_optimizer
from portable.plugins import names_code

if TYPE_CHECKING:
    from portable.checks import Mistakes
    from portable.config import RunConfig

OPTIMIZERS = ("adamw", "sgd", "muon")
"""What ZeRO trains with, beside optimizers of the user's."""


def mistakes(c: RunConfig, *, late: bool, cuda: bool) -> Mistakes:
    """Of a run with one of DeepSpeed's strategies; ``cuda``: on NVIDIA GPUs."""
    key, train, of_user = "train.optimizer", c.train, names_code(c.train.optimizer)
    if not cuda and c.precision == "fp16":
        reason = "under strategy {strategy}, which is DeepSpeed's; use fp32 or bf16"
        yield f"precision fp16 does not train on backend cpu {reason}"
    if train.optimizer not in OPTIMIZERS and not of_user:
        yield f"{key}: ZeRO does not support {{train.optimizer}}; use adamw, sgd or muon"
    if not late:
        return
    swaps = "nvme" in (c.memory.offload_params, c.memory.offload_optimizer)
    if swaps and train.micro_batch_size == "auto":
        reason = "auto would write the whole state to nvme for each size it tries; set a number"
        yield f"train.micro_batch_size: {reason}"
    if c.compile and c.strategy == "zero3":
        reason = "which gathers and frees parameters inside the layers; use zero2 or full_shard"
        yield f"compile: not supported with strategy zero3, {reason}"
    if train.freezes and c.memory.offload_params == "nvme":
        reason = "DeepSpeed does not save frozen parameters from nvme; use cpu, or train all"
        yield f"memory.offload_params: {reason}"
    if of_user and not user_optimizer.elementwise(train):
        reason = "is not elementwise, so it cannot run on ZeRO's flat partitions; use strategy full_shard"
        yield f"{key}: {{train.optimizer}}: {reason}"
    if of_user and user_optimizer.constructs_state(train):
        reason = "its constructor makes state, of parameters that ZeRO replaces; use strategy full_shard"
        yield f"{key}: {{train.optimizer}}: {reason}"
    unswapped = "does not work with memory.offload_optimizer or offload_params nvme"
    if swaps and train.ema is not None:
        yield f"train.ema: {unswapped}; use cpu"
    if swaps and train.optimizer == "muon":
        yield f"{key}: muon {unswapped}, which swap parts of matrices apart; use cpu"
    if swaps and of_user:
        yield f"{key}: {{train.optimizer}}: {unswapped}, since only DeepSpeed knows what it swaps; use cpu"
