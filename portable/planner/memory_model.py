"""Memory and communication of an engine for a model, computed without the engine.

Each backend package has a module ``footprint`` for its engines. It must not import an accelerator library.
See :class:`FootprintModule`.
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
"""Value of ``memory.nvme_path`` if the config does not set it."""
COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
"""Element size of each precision in bytes."""


@dataclass(frozen=True)
class Cluster:
    """Devices of a run."""

    devices: int
    """Number of all devices."""
    per_node: int
    """Number of devices of a machine, or of a TPU slice."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class StrategySetting:
    """Strategy with its offloading."""

    strategy: str
    offload_optimizer: str = "none"
    offload_params: str = "none"

    @classmethod
    def from_config(cls, config: RunConfig) -> StrategySetting:
        """Return the setting of a config."""
        return cls(config.strategy, config.memory.offload_optimizer, config.memory.offload_params)

    @property
    def offload_targets(self) -> dict[str, str]:
        """Target of each offloaded part: ``cpu`` or ``nvme``, keyed by ``optimizer`` and ``params``."""
        places = {"optimizer": self.offload_optimizer, "params": self.offload_params}
        return {part: place for part, place in places.items() if place != "none"}

    @property
    def uses_disk(self) -> bool:
        """Whether a part is offloaded to a disk."""
        return "nvme" in self.offload_targets.values()

    def apply_to(self, config: RunConfig) -> RunConfig:
        """Return a config with this setting.

        Raises:
            UserError: If the setting is not possible with the other settings.
        """
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
    """Number of bytes that a device sends."""

    per_pass: float = 0.0
    """Number of bytes per micro-batch."""
    per_step: float = 0.0
    """Number of bytes per optimizer update."""

    def compute_step_bytes(self, micro_batches: int) -> float:
        """Compute the number of bytes in a step with a number of micro-batches."""
        return self.per_pass * micro_batches + self.per_step


@dataclass(frozen=True)
class Footprint:
    """Number of bytes on the device of the rank with the most memory, and on its host."""

    parameters: int
    """Size of the resident shard of the parameters. Under ZeRO, this is the copy in the compute dtype."""
    gradients: int
    """Size of the complete gradients before the update."""
    optimizer: int
    """Size of the moments. Under ZeRO, this includes the fp32 master weights, as in the ZeRO paper."""
    compute: ComputeMode
    """Mode in which the compute dtype is reached."""
    compiler: CompilerModel | None = None
    """Compiler of the step. See :class:`portable.planner.pass_cost.PassRequest`."""
    gathered: int = 0
    """Size of gathered parameters and communication buffers until the backward pass reaches a layer."""
    in_layers: int = 0
    """Size of gathered parameters, communication buffers, and unsharded gradients after the backward pass has
    reached a layer.
    """
    at_end: int = 0
    """Size of gathered parameters and communication buffers at the end of the backward pass, when the
    activations have been freed.
    """
    in_update: int = 0
    """Additional size during the update, when nothing is gathered and the activations have been freed."""
    host: int = 0
    """Host memory of a rank."""
    disk: int = 0
    """Disk space of a rank that offloads to a disk."""
    also_saved: int = 0
    """Size of a checkpoint of all ranks in addition to the fp32 weights and the optimizer state."""
    links: Traffic = Traffic()
    """Traffic between the devices of a node."""
    network: Traffic = Traffic()
    """Traffic between nodes."""


class FootprintModule(Protocol):
    """Interface of the module ``footprint`` of a backend package."""

    def resolve_config(self, config: RunConfig, cluster: Cluster) -> RunConfig:
        """Replace defaults by the settings in an engine's own file (a DeepSpeed JSON), and check the config.

        Args:
            config: Config of the run.
            cluster: Devices of the run.

        Raises:
            UserError: If the file contradicts the config, or if a setting has no effect on this backend.
        """

    def iter_settings(self, config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
        """Yield the settings that this backend supports for a run.

        Args:
            config: Config of the run.
            cluster: Devices of the run.
        """

    def find_gathered_units(self, model: nn.Module, config: RunConfig) -> list[nn.Module]:
        """Find the modules that are gathered as one unit, with outer modules before inner modules.

        Args:
            model: Model on the meta device.
            config: Config of the run.

        Returns:
            The modules. Empty if the footprint does not depend on them.

        Raises:
            UserError: If the model has no such modules as configured.
        """

    def compute_footprint(self, model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
        """Compute the footprint of a model.

        Args:
            model: Inventory of the model.
            config: Config of the run.
            cluster: Devices of the run.
        """


class UpdateCost(NamedTuple):
    """Device memory and traffic of an optimizer's update.

    Attributes:
        temporary_bytes: Device memory that the update requires in addition to the optimizer state.
        sent_bytes: Number of bytes that a device sends.
    """

    temporary_bytes: int
    sent_bytes: float


def compute_muon_update_cost(
    model: ModelInventory, compute_itemsize: int, ranks: int, *, replicated: bool
) -> UpdateCost:
    """Compute the device memory and traffic of an update with Muon.

    In each round, a rank holds a complete matrix. Its memory consists of the received matrix, the parts of
    other ranks' matrices before and after the update, and the operands and results of the products.

    Args:
        model: Inventory of the model. Its largest matrix determines the memory.
        compute_itemsize: Element size of the products in bytes.
        ranks: Number of ranks among which the matrices are distributed.
        replicated: Whether each rank holds all matrices.

    Returns:
        The cost. 0 if the model does not have matrices that Muon updates.
    """
    matrices = [weight for weight in model.trained_weights if weight.uses_muon]
    sizes = [(math.prod(w.shape[-2:]), min(w.shape[-2:])) for w in matrices]
    most = max((5 * size + 2 * least * least for size, least in sizes), default=0)
    if ranks > 1 and replicated:
        most += max((size for size, _ in sizes), default=0) * ranks
    # The matrices of a stack are already distributed among the ranks.
    moved = sum(w.num_elements for w in matrices if replicated or len(w.shape) == 2) * compute_itemsize
    sent = moved * (ranks - 1) / ranks if replicated else 2 * moved * (ranks - 1) / ranks**2
    return UpdateCost(compute_itemsize * most, sent)
