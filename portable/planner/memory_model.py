"""Interface through which a backend describes the memory and communication of its engines.

Each backend package has a module ``footprint`` that computes both from the sizes of a model,
without building an engine. The module must not import an accelerator library. See
:class:`FootprintModule`.
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
"""Value of ``memory.nvme_path`` in a planned config if the user has not set it."""
COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
"""Size in bytes of an element in the compute dtype, keyed by the value of ``precision``."""


@dataclass(frozen=True)
class Cluster:
    """Number of devices of a run and their distribution over nodes."""

    devices: int
    """Total number of devices."""
    per_node: int
    """Number of devices in a node, or in a TPU slice."""

    @property
    def nodes(self) -> int:
        """Number of nodes that the devices occupy. A partly used node counts as one."""
        return -(-self.devices // self.per_node)


@dataclass(frozen=True)
class StrategySetting:
    """Combination of ``strategy`` with ``memory.offload_optimizer`` and ``memory.offload_params``."""

    strategy: str
    offload_optimizer: str = "none"
    offload_params: str = "none"

    @classmethod
    def from_config(cls, config: RunConfig) -> StrategySetting:
        """Return the combination of strategy and offloading that a config selects."""
        return cls(config.strategy, config.memory.offload_optimizer, config.memory.offload_params)

    @property
    def offload_targets(self) -> dict[str, str]:
        """Offload targets, ``cpu`` or ``nvme``, keyed by ``optimizer`` and ``params``.

        If one of the two is not offloaded, its key is missing.
        """
        places = {"optimizer": self.offload_optimizer, "params": self.offload_params}
        return {part: place for part, place in places.items() if place != "none"}

    @property
    def uses_disk(self) -> bool:
        """Whether the optimizer state or the parameters are offloaded to a disk."""
        return "nvme" in self.offload_targets.values()

    def apply_to(self, config: RunConfig) -> RunConfig:
        """Return a copy of a config with this combination of settings.

        ``memory.nvme_path`` is set to a placeholder if the combination needs a path and the config
        has none. It is set to None if the combination does not use a disk.

        Raises:
            UserError: If the combination is incompatible with the other settings.
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
    """Number of bytes that a device sends to other devices in a training step."""

    per_pass: float = 0.0
    """Number of bytes per micro-batch."""
    per_step: float = 0.0
    """Number of additional bytes per step, for example for the optimizer update."""

    def compute_step_bytes(self, micro_batches: int) -> float:
        """Compute the number of bytes that a device sends in a step with several micro-batches.

        Args:
            micro_batches: Number of micro-batches in the step.
        """
        return self.per_pass * micro_batches + self.per_step


@dataclass(frozen=True)
class Footprint:
    """Memory and communication that an engine needs for a model. Sizes are in bytes.

    The sizes are for the rank that needs the most memory. Activations are not included. Some
    values, such as the buffers for the exchange of tokens under expert parallelism, still depend on
    the size of the micro-batch.
    """

    parameters: int
    """Size of the resident shard of the parameters. Under ZeRO, this is the copy in the compute dtype."""
    gradients: int
    """Size of the complete gradients before the update."""
    optimizer: int
    """Size of the moments. Under ZeRO, this includes the fp32 master weights, as in the ZeRO paper."""
    compute: ComputeMode
    """Mechanism by which the engine computes in the compute dtype, such as autocast."""
    compiler: CompilerModel | None = None
    """Compiler that compiles the complete pass, such as XLA. None if the engine does not use one."""
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
    """Size of temporary values during the optimizer update, when the activations have been freed."""
    host: int = 0
    """Host memory that each rank needs."""
    disk: int = 0
    """Disk space that each rank needs if it offloads to a disk."""
    also_saved: int = 0
    """Size of the data that a checkpoint contains in addition to the fp32 weights and the optimizer state.

    This is the total for all ranks.
    """
    links: Traffic = Traffic()
    """Bytes that a device sends to other devices of its node."""
    network: Traffic = Traffic()
    """Bytes that a device sends to other nodes."""


class FootprintModule(Protocol):
    """Interface of the ``footprint`` module of each backend package.

    The planner calls this module to list the strategies that the backend supports for a run. It
    also uses the module to estimate the memory and communication of the backend's engines.
    """

    def resolve_config(self, config: RunConfig, cluster: Cluster) -> RunConfig:
        """Replace defaults with values in the engine's own config file, such as DeepSpeed's JSON file.

        The resulting config is validated.

        Args:
            config: Config of the run.
            cluster: Devices of the run.

        Returns:
            The resolved config.

        Raises:
            UserError: If the file contradicts the config, or if a setting has no effect on this
                backend.
        """

    def iter_settings(self, config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
        """Yield the combinations of strategy and offloading that this backend supports for a run.

        Args:
            config: Config of the run.
            cluster: Devices of the run.
        """

    def find_gathered_units(self, model: nn.Module, config: RunConfig) -> list[nn.Module]:
        """Find the modules whose parameters an engine such as FSDP gathers together.

        Args:
            model: Model on the meta device.
            config: Config of the run. Its ``fsdp`` section may select the modules.

        Returns:
            The modules, with outer modules before inner modules. Empty if the memory estimate of
            this backend does not depend on which parameters are gathered together.

        Raises:
            UserError: If the config selects modules that the model does not have.
        """

    def compute_footprint(self, model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
        """Compute the memory and communication of the engine for ``config.strategy``.

        Args:
            model: Inventory of the model, with the sizes of its parameters.
            config: Config of the run.
            cluster: Devices of the run.
        """


class UpdateCost(NamedTuple):
    """Device memory and communication of an optimizer update.

    Attributes:
        temporary_bytes: Device memory that the update needs in addition to the optimizer state.
        sent_bytes: Number of bytes that a device sends to other devices during the update.
    """

    temporary_bytes: int
    sent_bytes: float


def compute_muon_update_cost(
    model: ModelInventory, compute_itemsize: int, ranks: int, *, replicated: bool
) -> UpdateCost:
    """Compute the device memory and communication of a Muon update.

    The matrices of the model are distributed over the ranks, and each rank orthogonalizes one
    complete matrix at a time. A rank needs memory for this matrix, and for the operands and results
    of the matrix products. It also needs memory for the data that it exchanges with other ranks
    before and after the orthogonalization. A sharded stack of matrices, such as experts, is not
    exchanged, because its shards consist of complete matrices.

    Args:
        model: Inventory of the model. Its largest matrix determines the memory.
        compute_itemsize: Bytes per element in the matrix products.
        ranks: Number of ranks over which the matrices are distributed.
        replicated: Whether each rank has a complete copy of all matrices, as in DDP.

    Returns:
        The cost. Both numbers are 0 if Muon updates none of the model's matrices.
    """
    matrices = [weight for weight in model.trained_weights if weight.uses_muon]
    sizes = [(math.prod(w.shape[-2:]), min(w.shape[-2:])) for w in matrices]
    most = max((5 * size + 2 * least * least for size, least in sizes), default=0)
    if ranks > 1 and replicated:
        most += max((size for size, _ in sizes), default=0) * ranks
    # A stack of matrices is not sent if it is sharded, because its shards consist of complete matrices.
    moved = sum(w.num_elements for w in matrices if replicated or len(w.shape) == 2) * compute_itemsize
    sent = moved * (ranks - 1) / ranks if replicated else 2 * moved * (ranks - 1) / ranks**2
    return UpdateCost(compute_itemsize * most, sent)
