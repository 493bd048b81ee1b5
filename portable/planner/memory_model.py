"""What an engine keeps and sends for a model, computed without the engine.

Each backend package has a light module ``compute_footprint`` that knows its engines. It imports no
accelerator library; see :class:`FootprintModule`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from portable.config import RunConfig
    from portable.planner.parameter_inventory import ModelInventory
    from portable.planner.pass_cost import CompilerModel, ComputeMode

PLACEHOLDER_DISK_PATH = "/a/folder/on/a/local/disk"
"""Placeholder for ``memory.nvme_path`` if the config sets none."""
COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Cluster:
    """The devices of a run."""

    devices: int
    """All devices."""
    per_node: int
    """Devices of one machine, or of a TPU slice."""

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class StrategySetting:
    """A strategy with its offloading."""

    strategy: str
    offload_optimizer: str = "none"
    offload_params: str = "none"

    @classmethod
    def from_config(cls, config: RunConfig) -> StrategySetting:
        """The setting of ``config``."""
        return cls(config.strategy, config.memory.offload_optimizer, config.memory.offload_params)

    @property
    def offload_targets(self) -> dict[str, str]:
        """Where each offloaded part goes."""
        places = {"optimizer": self.offload_optimizer, "params": self.offload_params}
        return {part: place for part, place in places.items() if place != "none"}

    @property
    def uses_disk(self) -> bool:
        """Whether anything is swapped to a disk."""
        return "nvme" in self.offload_targets.values()

    def apply_to(self, config: RunConfig) -> RunConfig:
        """``config`` with this setting. Raises ``UserError`` if that breaks a rule."""
        return config.replaced(
            {
                "strategy": self.strategy,
                "memory.offload_optimizer": self.offload_optimizer,
                "memory.offload_params": self.offload_params,
                "memory.nvme_path": (config.memory.nvme_path or PLACEHOLDER_DISK_PATH)
                if self.uses_disk
                else None,
            }
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends."""

    per_pass: float = 0.0
    """In each micro-batch."""
    per_step: float = 0.0
    """In each update."""

    def compute_step_bytes(self, micro_batches: int) -> float:
        """In a step of ``micro_batches`` micro-batches."""
        return self.per_pass * micro_batches + self.per_step


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device of the rank that holds the most, and on its host."""

    parameters: int
    """Resident shard; under ZeRO the copy in the compute dtype."""
    gradients: int
    """Complete gradients, before the update."""
    optimizer: int
    """Moments; under ZeRO also the fp32 master weights, as its paper counts them."""
    compute: ComputeMode
    """How parameters reach the compute dtype."""
    compiler: CompilerModel | None = None
    """What compiles the step; see :class:`portable.planner.pass_cost.PassRequest`."""
    gathered: int = 0
    """Gathered parameters and communication buffers, until the backward pass reaches a layer."""
    in_layers: int = 0
    """The same from there on, with unsharded gradients in flight."""
    at_end: int = 0
    """The same at the end of the backward pass, when activations are freed."""
    in_update: int = 0
    """Extra bytes during the update, when nothing is gathered and activations are freed."""
    host: int = 0
    """Host memory of a rank."""
    disk: int = 0
    """Disk space of a rank that swaps."""
    also_saved: int = 0
    """Bytes in a checkpoint, of all ranks, besides fp32 weights and optimizer state."""
    links: Traffic = Traffic()
    """Between devices of a node."""
    network: Traffic = Traffic()
    """Between nodes."""


class FootprintModule(Protocol):
    """What the module ``compute_footprint`` of a backend package offers the planner."""

    def resolve_config(self, config: RunConfig, cluster: Cluster) -> RunConfig:
        """Replace defaults by what an engine's own file says (a DeepSpeed JSON), and check the config.

        Raises:
            UserError: the file contradicts the config, or a setting has no effect on this backend.
        """

    def iter_settings(self, config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
        """The settings that this backend supports for the run."""

    def find_gathered_units(self, model: nn.Module, config: RunConfig) -> list[nn.Module]:
        """The modules of ``model`` that are gathered as one, outer before inner; none if the footprint does
        not depend on them.

        Raises:
            UserError: the model has no such modules as configured.
        """

    def compute_footprint(self, model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
        """The footprint of ``model`` under ``config``."""


class UpdateCost(NamedTuple):
    """Device memory and traffic of an optimizer's update.

    Attributes:
        temporary_bytes: Device memory that the update takes in addition to the optimizer state.
        sent_bytes: Bytes that a device sends.
    """

    temporary_bytes: int
    sent_bytes: float


def compute_muon_update_cost(
    model: ModelInventory, compute_itemsize: int, ranks: int, *, replicated: bool
) -> UpdateCost:
    """Bytes that Muon's update takes beside its state, and that a device sends in it; 0 for others.

    In each round a rank holds one whole matrix: as it comes, what its ranks hold of the others' before and
    after, and the operands and results of the products.

    Args:
        model: its largest matrix decides.
        compute_itemsize: bytes of an element in the products.
        ranks: over which matrices are spread.
        replicated: whether each holds all matrices.
    """
    matrices = [weight for weight in model.trained_weights if weight.uses_muon]
    sizes = [(math.prod(w.shape[-2:]), min(w.shape[-2:])) for w in matrices]
    most = max((5 * size + 2 * least * least for size, least in sizes), default=0)
    if ranks > 1 and replicated:
        most += max((size for size, _ in sizes), default=0) * ranks
    # Of stacks of matrices, each is with one rank already.
    moved = sum(w.num_elements for w in matrices if replicated or len(w.shape) == 2) * compute_itemsize
    sent = moved * (ranks - 1) / ranks if replicated else 2 * moved * (ranks - 1) / ranks**2
    return UpdateCost(compute_itemsize * most, sent)
