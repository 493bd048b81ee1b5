"""How long a step takes, roughly: enough to tell ways apart, not to promise a time.

A roofline of four rates: the products at a share of the data sheet's peak, collectives over the links between
devices, copies over the link to the host, and updates there at the host's memory. Collectives run beside the
products and are seen where they take longer; whatever the host and its disk do is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portable.planner.device_catalog import Device
    from portable.planner.memory_model import Footprint

ACHIEVED = 0.45
"""Share of a device's peak that large products reach in training."""
LINKS_ACHIEVED = 0.7
"""Share of a link's rate that collectives reach."""
HIDDEN = 0.9
"""Share of the shorter of products and collectives that the longer one hides."""
HOST_MEMORY = 150e9
"""Bytes a second that the ranks of a node read and write together in an update on the host."""
DISK = 3e9
"""Bytes a second that the ranks of a node read and write together on a local NVMe drive: about what one on
PCIe 4.0 writes."""
RECOMPUTED = {"none": 1.0, "selective": 1.08, "full": 4 / 3}
"""Work of a step with recomputation: all of the forward pass again is a third more."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    links: float
    host: float
    """With the disk that it swaps to."""

    @property
    def total(self) -> float:
        return max(self.compute, self.links) + (1 - HIDDEN) * min(self.compute, self.links) + self.host


def step_time(
    footprint: Footprint,
    device: Device,
    *,
    precision: str,
    flops: float,
    micro_batches: int,
    recompute: str,
    ranks_per_node: int,
) -> StepTime | None:
    """Seconds of a step on each device, or None where nobody knows the device's rates.

    Args:
        footprint: what is moved.
        device: its rates.
        precision: of the products.
        flops: floating-point operations of a step on one device, forward and backward, without recomputation.
        micro_batches: in a step.
        recompute: ``memory.activation_checkpointing``.
        ranks_per_node: that share a host's memory.
    """
    peak = device.flops.get(precision)
    if not peak:
        return None
    links = footprint.links.of(micro_batches) / (device.link * LINKS_ACHIEVED)
    network = footprint.network.of(micro_batches) / (device.network * LINKS_ACHIEVED)
    moved = footprint.host_link.of(micro_batches) / (device.host_link * LINKS_ACHIEVED)
    updated = footprint.host_update * ranks_per_node / HOST_MEMORY
    swapped = footprint.disk_link.of(micro_batches) * ranks_per_node / DISK
    return StepTime(
        compute=flops * RECOMPUTED[recompute] / (peak * ACHIEVED),
        links=max(links, network),
        host=moved + updated + swapped,
    )
