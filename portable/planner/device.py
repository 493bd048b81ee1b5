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
class Reached:
    """The share of a device's peak that runs have reached."""

    share: tuple[float, float]
    """The lowest and the highest of the usual, as MFU."""
    source: str
    """Description of these runs, for the user."""


NOT_MEASURED = Reached((0.30, 0.50), "a guess: no run on this device is published")


@dataclass(frozen=True)
class Device:
    """One kind of accelerator."""

    name: str
    backends: tuple[str, ...]
    """The backends that drive it, the usual one first."""
    memory: int
    """Bytes."""
    bf16: bool
    """Whether it multiplies in bf16."""
    per_node: int
    """Devices in a node, or in the largest slice."""
    for_collectives: int = 0
    """Bytes to leave to the collectives' buffers if there are several devices."""
    peaks: tuple[tuple[str, float], ...] = ()
    """Dense peak FLOP/s by precision, of the data sheet."""
    reached: Reached = NOT_MEASURED
    links: float | None = None
    """Bytes a second that it sends to others in its machine or slice, of the data sheet; None if unknown."""

    def compute_usable_memory(self, devices: int) -> int:
        """Bytes on each device that a run on ``devices`` devices can fill."""
        free = int(self.memory * SHARE_KEPT_FREE)
        return self.memory - free - (self.for_collectives if devices > 1 else 0)

    def with_memory(self, memory: int) -> Device:
        """Return this device with ``memory`` bytes."""
        return replace(self, memory=memory)
