"""Interfaces between the torch.distributed backend and its engines."""

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
"""Compute dtype, keyed by the value of ``precision``."""


@dataclass(frozen=True)
class RankInfo:
    """Device, rank and world size of this process, for torch.distributed engines."""

    device: torch.device
    rank: int
    world_size: int
    local_world_size: int
    """Number of ranks on this node."""


class EngineWithMetrics(Engine, Protocol):
    """Engine that is based on torch.distributed and reports engine-specific metrics.

    The metrics are logged together with the usual training metrics. An example is the fp16 loss
    scale.
    """

    def get_metrics(self) -> dict[str, float]:
        """Return additional metrics to log, keyed by name, such as the fp16 loss scale."""


class EngineModule(Protocol):
    """Interface of the modules ``portable.engines.fsdp.engine`` and ``portable.gpu.zero.engine``."""

    def build_engine(
        self, model: nn.Module, config: RunConfig, rank_info: RankInfo, at_stop: ExitStack
    ) -> EngineWithMetrics:
        """Shard a model over the ranks and build its optimizer.

        Args:
            model: Model on the meta device.
            config: Config of the run.
            rank_info: Device, rank and world size of this process.
            at_stop: Exit stack to which this function adds its cleanup. The backend closes the stack before
                it destroys the process group.

        Returns:
            The engine. Its weights are still uninitialized.
        """


def get_dist_backend(device: torch.device) -> str:
    """Return the ``backend`` argument of ``init_process_group`` for a device.

    The result, such as ``cpu:gloo,cuda:nccl``, supports tensors on both the device and the host.
    """
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
