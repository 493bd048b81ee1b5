"""Properties of accelerator types that are needed for a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE_KEPT_FREE = 0.1
"""Fraction of the device memory that a plan leaves free, because planned activations may be wrong by a tenth.
"""
SHARE_NOT_SEARCHED = 0.03
"""Fraction of the device memory that the search for ``train.micro_batch_size: auto`` leaves free.

It can be smaller than :data:`SHARE_KEPT_FREE`, because the search measures the memory instead of planning it.
"""
KEPT_FOR_COLLECTIVES = 1 << 30
"""Number of bytes to leave free on each of several devices, for buffers of collectives and fragmentation.

The buffers of collectives are not part of the allocator's memory.
"""


@dataclass(frozen=True)
class ReachedUtilization:
    """Usual model FLOPs utilization (MFU) of runs on a device."""

    mfu_range: tuple[float, float]
    """Lowest and highest usual MFU, as fractions from 0 to 1."""
    source: str
    """Description of the runs from which the range is known. The plan shows it to the user."""


NOT_MEASURED = ReachedUtilization((0.30, 0.50), "a guess: no run on this device is published")


@dataclass(frozen=True)
class Device:
    """Accelerator type, such as the H100."""

    name: str
    """Name of the device in the planner's options, such as ``h100``."""
    backends: tuple[str, ...]
    """Backends that support the device. The most common backend is first."""
    memory_bytes: int
    """Memory in bytes."""
    bf16: bool
    """Whether the device supports matrix products in bf16."""
    devices_per_node: int
    """Number of devices in a node, or in the largest TPU slice."""
    collective_buffer_bytes: int = 0
    """Number of bytes to leave free for buffers of collectives. Ignored if a run uses only one device."""
    peak_flops_by_precision: tuple[tuple[str, float], ...] = ()
    """Pairs of a precision, such as ``bf16``, and the dense peak FLOP/s in the data sheet."""
    reached: ReachedUtilization = NOT_MEASURED
    """Model FLOPs utilization that runs on this device have reached."""
    link_bytes_per_second: float | None = None
    """Number of bytes per second that the device can send to other devices in its node or slice, according to
    the data sheet. None if it is unknown.
    """

    def compute_usable_bytes(self, num_devices: int) -> int:
        """Compute the number of bytes on each device that a plan may use.

        This is the device memory without the fraction to leave free and the communication buffers.

        Args:
            num_devices: Number of devices of the run. A single device needs no communication buffers.
        """
        free = int(self.memory_bytes * SHARE_KEPT_FREE)
        return self.memory_bytes - free - (self.collective_buffer_bytes if num_devices > 1 else 0)

    def with_memory(self, memory_bytes: int) -> Device:
        """Return a copy of this device with a different memory size, in bytes."""
        return replace(self, memory_bytes=memory_bytes)
