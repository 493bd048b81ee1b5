"""Memory and traffic on TorchTPU, for the planner: that of the engines, without DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.engines.footprint import footprint, settings, units

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.planner.memory_model import Cluster

__all__ = ["adopt", "footprint", "settings", "units"]


def adopt(config: RunConfig, cluster: Cluster) -> RunConfig:
    """A DeepSpeed JSON has no effect, as in a run."""
    return config
