"""Data classes for the accelerator properties that the planner needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE_KEPT_FREE = 0.1
"""Fraction of the device memory that a plan leaves free. Planned activations may be off by a tenth."""
SHARE_NOT_SEARCHED = 0.03
"""Fraction of the device memory that the search for ``train.micro_batch_size: auto`` leaves free.

It can be smaller than :data:`SHARE_KEPT_FREE`, because the search measures the memory instead of planning it.
"""
KEPT_FOR_COLLECTIVES = 1 << 30
"""Number of bytes per device that a plan leaves free if a run has several devices.

This memory is needed for fragmentation and for the buffers of collectives, which the allocator does
not manage.
"""


@dataclass(frozen=True)
class ReachedUtilization:
    """Model FLOPs utilization (MFU) that runs typically reach on a device."""

    mfu_range: tuple[float, float]
    """Lowest and highest usual MFU, as fractions from 0 to 1."""
    source: str
    """Source of the range, such as published runs, as text that the plan shows to the user."""


NOT_MEASURED = ReachedUtilization((0.30, 0.50), "an assumption, as no runs on this device are published")


@dataclass(frozen=True)
class Device:
    """Accelerator type, such as the H100."""

    name: str
    """Name of the device in the planner's options, such as ``h100``."""
    backends: tuple[str, ...]
    """Backends that support the device. The most common backend is first."""
    memory_bytes: int
    """Memory of one device in bytes."""
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

        The plan leaves a part of the device memory free, namely the fraction
        :data:`SHARE_KEPT_FREE`. With several devices, the buffers of collectives are also
        subtracted.

        Args:
            num_devices: Number of devices of the run.
        """
        free = int(self.memory_bytes * SHARE_KEPT_FREE)
        return self.memory_bytes - free - (self.collective_buffer_bytes if num_devices > 1 else 0)

    def with_memory(self, memory_bytes: int) -> Device:
        """Return a copy of this device with a different memory size, in bytes."""
        return replace(self, memory_bytes=memory_bytes)
