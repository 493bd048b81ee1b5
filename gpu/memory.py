"""Record GPU memory allocations, query the driver, and limit memory for trial runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from portable.backend import Diagnostics, DriverMemory
from portable.planner.device import KEPT_FOR_COLLECTIVES, SHARE_NOT_SEARCHED
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RECORDED_ALLOCATIONS = 200_000  # enough for a few steps of a large model


class CudaDiagnostics(Diagnostics):
    """Diagnostic tools for one GPU: allocation history, driver counters and NCCL's flight recorder.

    Args:
        device: GPU of this rank.
        rank: This rank.
        world_size: Number of ranks in the run.
    """

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._device = device
        self._rank = rank
        self._world_size = world_size

    def record_memory(self) -> None:
        """Start recording the history of allocations, up to 200,000 entries."""
        torch_internals.record_memory_history(max_entries=_RECORDED_ALLOCATIONS)

    def dump_memory(self, path: Path) -> None:
        """Write a memory snapshot with the recorded history. View it at https://pytorch.org/memory_viz."""
        torch_internals.dump_memory_snapshot(str(path))

    def dump_collectives(self, folder: Path) -> None:
        """Write NCCL's flight recorder to a file in ``folder``, for use with ``torchfrtrace``.

        Does nothing for a single rank.
        """
        if self._world_size > 1:
            # torchfrtrace expects this file name.
            (folder / f"nccl_trace_rank_{self._rank}").write_bytes(torch_internals.dump_nccl_trace())

    def query_driver_memory(self) -> DriverMemory | None:
        """Return the GPU's used and total memory in bytes, as reported by the driver."""
        free, total = torch.cuda.mem_get_info(self._device)
        return DriverMemory(used_bytes=total - free, total_bytes=total)


@contextmanager
def limit_gpu_memory(device: torch.device, world_size: int) -> Iterator[None]:
    """Return a context manager that limits torch's allocator to the memory available to a run.

    The limit is the sum of the GPU's free memory and the memory that the allocator has already
    reserved, minus a reserve for memory outside the allocator. Allocations beyond the limit raise
    ``torch.OutOfMemoryError``. On exit, the limit is set to the total memory of the GPU.

    Args:
        device: GPU of this rank. It becomes the current device, also after exit.
        world_size: Number of ranks in the run. With several ranks, the reserve also includes the
            buffers of collectives.
    """
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = total * SHARE_NOT_SEARCHED + (KEPT_FOR_COLLECTIVES if world_size > 1 else 0)
    usable = free + torch.cuda.memory_reserved(device) - reserved
    torch.cuda.set_per_process_memory_fraction(max(usable, 0.0) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
