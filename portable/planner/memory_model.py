"""What an engine keeps and moves for a model, reckoned before there is one: the contract of the rooms.

Each room has a light module ``footprint`` (it imports none of the accelerator's libraries) that knows its
engines' ways: see :class:`FootprintRoom`.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from portable.optim.block_size import block_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from portable.config import RunConfig, TrainConfig
    from portable.planner.inventory import Inventory
    from portable.planner.passes import Compute

MASTER = 4
"""Bytes of a master weight, a gradient of it and a moment: all fp32."""
SOME_DISK = "/a/folder/on/a/local/disk"
"""Where a config that names no disk would swap to."""
COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Cluster:
    """The devices of a run."""

    devices: int
    """All of them; the state is cut into as many parts."""
    per_node: int
    """Devices of one machine, or of a slice that a fast interconnect joins."""

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class Setting:
    """A way to spread a run's state."""

    strategy: str
    offload_optimizer: str = "none"
    offload_params: str = "none"

    @classmethod
    def of(cls, config: RunConfig) -> Setting:
        """That of ``config``."""
        return cls(config.strategy, config.memory.offload_optimizer, config.memory.offload_params)

    @property
    def offloaded(self) -> dict[str, str]:
        """Where each part goes that does not stay on the device."""
        places = {"optimizer": self.offload_optimizer, "params": self.offload_params}
        return {part: place for part, place in places.items() if place != "none"}

    @property
    def swaps(self) -> bool:
        """Whether anything goes to a disk."""
        return "nvme" in self.offloaded.values()

    def into(self, config: RunConfig) -> RunConfig:
        """``config`` with this setting. Raises ``UserError`` where a rule is broken."""
        return config.replaced(
            {
                "strategy": self.strategy,
                "memory.offload_optimizer": self.offload_optimizer,
                "memory.offload_params": self.offload_params,
                "memory.nvme_path": (config.memory.nvme_path or SOME_DISK) if self.swaps else None,
            }
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends, or a rank moves between host and device."""

    per_pass: float = 0.0
    """With each micro-batch."""
    per_step: float = 0.0
    """With each update."""

    def of(self, micro_batches: int) -> float:
        """In a step of so many micro-batches."""
        return self.per_pass * micro_batches + self.per_step


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device of the rank that holds the most, and on its host."""

    parameters: int
    """Resident: the shard in the type that is kept; under ZeRO the compute copy."""
    gradients: int
    """Once they are complete, before the update."""
    optimizer: int
    """Moments; under ZeRO with the fp32 master weights, as its authors count them."""
    compute: Compute
    """How parameters come to the compute type."""
    compiled: bool = False
    """Whether XLA compiles the step; see :class:`portable.planner.passes.Request`."""
    gathered: int = 0
    """Gathered parameters and communication buffers, until the backward pass has come to a layer."""
    in_layers: int = 0
    """The same from there on, with whole gradients on their way."""
    at_end: int = 0
    """The same at the end of the backward pass, when no activation is left."""
    in_update: int = 0
    """What the update takes on top, when neither is there."""
    host: int = 0
    """Of a rank."""
    disk: int = 0
    """Of a rank, where it swaps to a local disk."""
    also_saved: int = 0
    """Of a checkpoint, by all ranks, beside fp32 weights and the optimizer's state."""
    links: Traffic = Traffic()
    """Between the devices of a node."""
    network: Traffic = Traffic()
    """Between nodes."""
    host_link: Traffic = Traffic()
    host_update: int = 0
    """Bytes that an update on the host reads and writes there."""
    disk_link: Traffic = Traffic()
    """Read from and written to the local disk."""


class FootprintRoom(Protocol):
    """What the light module of a room offers the planner."""

    def adopt(self, config: RunConfig, cluster: Cluster) -> RunConfig:
        """Put what a file in an engine's own format says in place of defaults, and check the config.

        Raises:
            UserError: where that file contradicts the config, or a setting has no use in this room.
        """

    def settings(self, config: RunConfig, cluster: Cluster) -> Iterator[Setting]:
        """The ways that this room has to spread the run's state."""

    def units(self, model: nn.Module, config: RunConfig) -> list[nn.Module]:
        """The modules of ``model`` that are gathered as one, the outer before the inner; none where that is
        nothing to the footprint.

        Raises:
            UserError: where there are none as they are set.
        """

    def footprint(self, model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
        """What ``config`` comes to for ``model``."""


_ROOMS = {"cpu": "gpu.footprint", "cuda": "gpu.footprint", "xla": "tpu.footprint"}


def footprint_room(backend: str) -> FootprintRoom:
    """The light module behind a backend's name."""
    room: Any = importlib.import_module(_ROOMS[backend])
    return room  # type: ignore[no-any-return]


def moment_bytes(train: TrainConfig, shape: Sequence[int], rows: int, *, exact: bool) -> int:
    """Bytes of the optimizer's state of one parameter, or of the part of it with ``rows`` of its rows.

    Args:
        train: which optimizer.
        shape: of the whole parameter.
        rows: along its first dim.
        exact: whether its moments stay in 32 bits where others are in 8.
    """
    row = math.prod(shape[1:])
    elements = rows * row if shape else 1
    step = MASTER
    if train.optimizer == "sgd":
        return MASTER * elements if train.betas[0] else 0
    if train.optimizer == "adafactor":
        if len(shape) < 2:
            return MASTER * elements + step
        columns = shape[-1] if len(shape) == 2 else elements // max(1, shape[-2])
        return MASTER * (elements // max(1, shape[-1]) + columns) + step
    block = block_size(tuple(shape)) if train.optimizer == "adamw_8bit" and not exact else None
    if block is None:
        return 2 * MASTER * elements + step
    return 2 * (elements + MASTER * rows * (row // block)) + step
