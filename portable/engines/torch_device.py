"""Device operations of a rank, for backends that use torch.distributed.

This module does not import torch at module level, because commands that do not need torch also
import it: the package descriptions of backends are subclasses of :class:`TorchDevice`. See
:mod:`portable.engines.package`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from portable.backend import Diagnostics, MemoryUsage


class TorchDevice:
    """Device operations of a rank that uses torch.distributed.

    Each rank has one device. :meth:`make_current` and :meth:`measure_memory` are implemented with
    ``torch.accelerator``. Subclasses implement :meth:`open_device`, and override the other
    operations if the device type requires it.
    """

    name: str
    """Name of the backend."""

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Return the device of a rank.

        Args:
            local_rank: Index of the rank among the ranks of this machine.
            local_world_size: Number of ranks on this machine.

        Raises:
            UserError: If this machine has no device for the rank.
        """
        raise NotImplementedError

    def make_current(self, device: torch.device) -> None:
        """Make ``device`` the current device of this process.

        The backend calls this method before it initializes the process group.
        """
        import torch

        torch.accelerator.set_device_index(device.index)

    def build_diagnostics(self, device: torch.device, rank: int, world_size: int) -> Diagnostics:
        """Return the diagnostic tools of a rank's device. The base class returns tools that do nothing."""
        from portable.backend import Diagnostics

        return Diagnostics()

    def measure_memory(self, device: torch.device) -> MemoryUsage:
        """Return the current and peak memory of torch's allocator on a device, in bytes."""
        import torch

        from portable.backend import MemoryUsage

        return MemoryUsage(
            current_bytes=torch.accelerator.memory_allocated(device),
            peak_bytes=torch.accelerator.max_memory_allocated(device),
        )

    def build_memory_limit(
        self, device: torch.device, world_size: int
    ) -> AbstractContextManager[None] | None:
        """Return a context in which allocations fail if they exceed a rank's share of memory.

        Args:
            device: Device of the rank.
            world_size: Number of ranks of the run.

        Returns:
            The context. None if the device does not support limits, as in the base class. Memory
            trials are then skipped.
        """
        return None

    def get_shape_multiple(self, device: torch.device, precision: str) -> int | None:
        """Return None, which means that all matrix sizes are treated as equally fast.

        Subclasses override this method for devices that prefer certain sizes. See
        :meth:`portable.backend.Backend.get_shape_multiple`.
        """
        return None

    def get_peak_flops(self, device: torch.device, precision: str) -> float | None:
        """Return None, because the peak is unknown. See :meth:`portable.backend.Backend.get_peak_flops`."""
        return None
