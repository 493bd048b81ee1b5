"""Accelerators and the properties that a plan requires."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE_KEPT_FREE = 0.1
"""Fraction of the memory that a plan leaves free, because planned activations may be wrong by about a tenth.
"""
SHARE_NOT_SEARCHED = 0.03
"""Fraction of the memory that the search for a micro-batch size leaves free. The search measures the memory,
so this fraction can be smaller.
"""
KEPT_FOR_COLLECTIVES = 1 << 30
"""Number of bytes that are left free for the buffers of collectives, which are not part of the allocator's
memory, and for fragmentation.
"""


@dataclass(frozen=True)
class ReachedUtilization:
    """Model FLOPs utilization (MFU) that runs on a device have reached."""

    mfu_range: tuple[float, float]
    """Lowest and highest usual MFU, as fractions."""
    source: str
    """Description of the runs for the user."""


NOT_MEASURED = ReachedUtilization((0.30, 0.50), "a guess: no run on this device is published")


@dataclass(frozen=True)
class Device:
    """Kind of accelerator."""

    name: str
    """Name of the device in the planner's options, such as ``h100``."""
    backends: tuple[str, ...]
    """Backends that support the device. The most common backend is first."""
    memory_bytes: int
    """Memory in bytes."""
    bf16: bool
    """Whether the device multiplies in bf16."""
    devices_per_node: int
    """Number of devices in a node, or in the largest TPU slice."""
    collective_buffer_bytes: int = 0
    """Number of bytes to leave free for buffers of collectives if there are several devices."""
    peak_flops_by_precision: tuple[tuple[str, float], ...] = ()
    """Pairs of a precision and the dense peak FLOP/s in the data sheet."""
    reached: ReachedUtilization = NOT_MEASURED
    """Utilization that runs on this device have reached."""
    link_bytes_per_second: float | None = None
    """Number of bytes per second that the device can send to other devices in its node or slice, according to
    the data sheet. None if it is unknown.
    """

    def compute_usable_bytes(self, num_devices: int) -> int:
        """Compute the number of bytes on each device that a run on a number of devices can use."""
        free = int(self.memory_bytes * SHARE_KEPT_FREE)
        return self.memory_bytes - free - (self.collective_buffer_bytes if num_devices > 1 else 0)

    def with_memory(self, memory_bytes: int) -> Device:
        """Return a copy of this device with a different memory size, in bytes."""
        return replace(self, memory_bytes=memory_bytes)
