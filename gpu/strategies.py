"""Which engine trains a model under which ``strategy``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from portable.backend import Engine
from portable.errors import require

if TYPE_CHECKING:
    import torch
    from torch import nn

    from portable.config import RunConfig

# Imported only when chosen: DeepSpeed takes seconds to import, and need not be installed.
_ROOMS = {
    "no_shard": "gpu.fsdp.engine",
    "full_shard": "gpu.fsdp.engine",
    "shard_grad_op": "gpu.fsdp.engine",
    "hybrid_shard": "gpu.fsdp.engine",
    "hybrid_shard_zero2": "gpu.fsdp.engine",
    "zero1": "gpu.zero.engine",
    "zero2": "gpu.zero.engine",
    "zero3": "gpu.zero.engine",
}


@dataclass(frozen=True)
class Machine:
    """This process's part of the machine."""

    device: torch.device
    rank: int
    world_size: int
    local_world_size: int
    """Ranks on this node."""


class CountingEngine(Engine, Protocol):
    """An engine of this room."""

    def figures(self) -> dict[str, float]:
        """What the metrics record besides, by name."""

    def let_go(self) -> None:
        """Keep nothing of the process group, which is about to go; the engine takes no step after this."""


class EngineRoom(Protocol):
    """What a module with an engine in it offers."""

    def check(self, config: RunConfig, device_type: str) -> None:
        """Raise UserError for a setting that the engine has no use for, before any work."""

    def prepare(self, model: nn.Module, config: RunConfig, machine: Machine) -> CountingEngine:
        """Spread a model from the meta device over the ranks; the weights are still unset."""


def engine_room(strategy: str) -> EngineRoom:
    """The module whose engine trains under ``strategy``."""
    require(
        strategy in _ROOMS,
        f"strategy: {strategy} is not part of this version; use one of {', '.join(_ROOMS)}",
    )
    room: Any = importlib.import_module(_ROOMS[strategy])
    return room  # type: ignore[no-any-return]
