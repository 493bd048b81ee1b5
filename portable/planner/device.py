"""Accelerators and the figures that a plan needs of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE_KEPT_FREE = 0.1
"""Share of memory that a plan leaves free: planned activations are within about a tenth of the truth."""
SHARE_NOT_SEARCHED = 0.03
"""Share that the search for a micro-batch leaves free. It measures, so less will do."""
KEPT_FOR_COLLECTIVES = 1 << 30
"""Bytes left free for the buffers of collectives, which the allocator does not see, and for fragmentation."""


@dataclass(frozen=True)
class ReachedUtilization:
    """The share of a device's peak that runs have reached."""

    mfu_range: tuple[float, float]
    """The lowest and the highest of the usual, as MFU."""
    source: str
    """Description of these runs, for the user."""


NOT_MEASURED = ReachedUtilization((0.30, 0.50), "a guess: no run on this device is published")


@dataclass(frozen=True)
class Device:
    """One kind of accelerator."""

    name: str
    backends: tuple[str, ...]
    """The backends that drive it, the usual one first."""
    memory_bytes: int
    """Bytes."""
    bf16: bool
    """Whether it multiplies in bf16."""
    devices_per_node: int
    """Devices in a node, or in the largest slice."""
    collective_buffer_bytes: int = 0
    """Bytes to leave to the collectives' buffers if there are several devices."""
    peak_flops_by_precision: tuple[tuple[str, float], ...] = ()
    """Dense peak FLOP/s by precision, of the data sheet."""
    reached: ReachedUtilization = NOT_MEASURED
    link_bytes_per_second: float | None = None
    """Bytes a second that it sends to others in its machine or slice, of the data sheet; None if unknown."""

    def compute_usable_bytes(self, num_devices: int) -> int:
        """Bytes on each device that a run on ``num_devices`` devices can fill."""
        free = int(self.memory_bytes * SHARE_KEPT_FREE)
        return self.memory_bytes - free - (self.collective_buffer_bytes if num_devices > 1 else 0)

    def with_memory(self, memory_bytes: int) -> Device:
        """Return this device with ``memory_bytes`` bytes."""
        return replace(self, memory_bytes=memory_bytes)
