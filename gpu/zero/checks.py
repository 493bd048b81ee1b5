"""Settings that ZeRO does not support, as rows of :mod:`portable.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks import Check
from portable.config.derived import ZERO
from portable.optim import user_optimizer
from portable.plugins import names_code

if TYPE_CHECKING:
    from portable.config import RunConfig

OPTIMIZERS = ("adamw", "sgd", "muon")
"""What ZeRO trains with, beside optimizers of the user's."""
_SWAPPED = "does not work with memory.offload_optimizer or offload_params nvme"


def _swaps(c: RunConfig) -> bool:
    return "nvme" in (c.memory.offload_params, c.memory.offload_optimizer)


def _user_optimizer(c: RunConfig) -> bool:
    return c.strategy in ZERO and names_code(c.train.optimizer)


CHECKS = (
    Check(
        "train.micro_batch_size",
        lambda c: c.train.micro_batch_size == "auto" and _swaps(c),
        ": auto would write the whole state to nvme for each size it tries; set a number",
        late=True,
    ),
    Check(
        "train.optimizer strategy",
        lambda c: c.strategy in ZERO and c.train.optimizer not in OPTIMIZERS and not _user_optimizer(c),
        ": ZeRO does not support {train.optimizer}; use adamw, sgd or muon",
        late=True,
    ),
    Check(
        "compile strategy",
        lambda c: c.compile and c.strategy == "zero3",
        ": not supported with strategy zero3, which gathers and frees parameters inside the layers; use "
        "zero2 or "
        "full_shard",
        late=True,
    ),
    Check(
        "memory.offload_params train.trainable",
        lambda c: c.train.freezes and c.memory.offload_params == "nvme",
        ": DeepSpeed does not save frozen parameters from nvme; use cpu, or train all",
        late=True,
    ),
    Check(
        "train.optimizer strategy",
        lambda c: _user_optimizer(c) and not user_optimizer.elementwise(c.train),
        ": {train.optimizer}: is not elementwise, so it cannot run on ZeRO's flat partitions; use strategy "
        "full_shard",
        late=True,
    ),
    Check(
        "train.optimizer strategy",
        lambda c: _user_optimizer(c) and user_optimizer.constructs_state(c.train),
        ": {train.optimizer}: its constructor makes state, of parameters that ZeRO replaces; use strategy "
        "full_shard",
        late=True,
    ),
    Check("train.ema", lambda c: _swaps(c) and c.train.ema is not None, f": {_SWAPPED}; use cpu", late=True),
    Check(
        "train.optimizer",
        lambda c: _swaps(c) and c.train.optimizer == "muon",
        f": muon {_SWAPPED}, which swap parts of matrices apart; use cpu",
        late=True,
    ),
    Check(
        "train.optimizer",
        lambda c: _swaps(c) and names_code(c.train.optimizer),
        f": {{train.optimizer}}: {_SWAPPED}, since only DeepSpeed knows what it swaps; use cpu",
        late=True,
    ),
)
OF_CPU = (
    Check(
        "precision backend",
        lambda c: c.precision == "fp16" and c.strategy in ZERO,
        " fp16 does not train on backend cpu under strategy {strategy}, which is DeepSpeed's; use fp32 "
        "or bf16",
    ),
)
