"""The engine behind each ``strategy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.derived import ZERO
from portable.errors import UserError

if TYPE_CHECKING:
    from gpu.common.machine import EngineModule

FSDP = ("no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")


def engine_module(strategy: str) -> EngineModule:
    """The module whose engine trains under ``strategy``, imported only when chosen."""
    if strategy in FSDP:
        from gpu.fsdp import engine as fsdp

        return fsdp
    if strategy in ZERO:
        from gpu.zero import engine as zero

        return zero
    raise UserError(f"strategy: unknown {strategy}; use one of {', '.join((*FSDP, *ZERO))}")
