"""What the backend and the engines tell each other: this rank's place, the engine's interface, cleanup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from portable.backend import Engine

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import nn

    from portable.config import RunConfig

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class RankInfo:
    """This process's part of the machine."""

    device: torch.device
    rank: int
    world_size: int
    local_world_size: int
    """Ranks on this node."""


class EngineWithMetrics(Engine, Protocol):
    """An engine on torch.distributed."""

    def get_metrics(self) -> dict[str, float]:
        """Further metrics of the engine, by name."""


class EngineModule(Protocol):
    """The interface of ``portable/engines/fsdp/engine.py`` and ``gpu/zero/engine.py``."""

    def build_engine(
        self, model: nn.Module, config: RunConfig, rank_info: RankInfo, at_stop: ExitStack
    ) -> EngineWithMetrics:
        """Shard a model from the meta device over the ranks. The weights stay unset.

        Args:
            model: on the meta device.
            config: of the run.
            rank_info: this rank's part of it.
            at_stop: receives what must run before the process group is destroyed.
        """


def get_dist_backend(device: torch.device) -> str:
    """torch.distributed's backends for tensors of ``device`` and of the host."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
