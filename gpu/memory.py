"""Memory of a GPU: allocation history, driver counters, and a limit for memory trials."""

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

_RECORDED_ALLOCATIONS = 200_000  # a few steps of a large model


class CudaDiagnostics(Diagnostics):
    """Diagnostic tools for one GPU: allocation history, driver counters and NCCL's flight recorder.

    Args:
        device: GPU of this rank.
        rank: This rank.
        world_size: Number of ranks of the run.
    """

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._device = device
        self._rank = rank
        self._world_size = world_size

    def record_memory(self) -> None:
        """Start to record the history of allocations, up to 200,000 entries."""
        torch_internals.record_memory_history(max_entries=_RECORDED_ALLOCATIONS)

    def dump_memory(self, path: Path) -> None:
        """Write a snapshot of the GPU's memory, with the recorded history, for https://pytorch.org/memory_viz."""
        torch_internals.dump_memory_snapshot(str(path))

    def dump_collectives(self, folder: Path) -> None:
        """Write NCCL's flight recorder to a file in ``folder`` that ``torchfrtrace`` reads.

        Does nothing for a single rank.
        """
        if self._world_size > 1:
            # torchfrtrace expects this name.
            (folder / f"nccl_trace_rank_{self._rank}").write_bytes(torch_internals.dump_nccl_trace())

    def query_driver_memory(self) -> DriverMemory | None:
        """Return the used and the total memory of the GPU in bytes, as the driver reports them."""
        free, total = torch.cuda.mem_get_info(self._device)
        return DriverMemory(used_bytes=total - free, total_bytes=total)


@contextmanager
def limit_gpu_memory(device: torch.device, world_size: int) -> Iterator[None]:
    """Limit the memory of torch's allocator within this context to the memory that a run can use.

    The limit is the free memory of the GPU, less a reserve for memory outside of the allocator. Allocations
    beyond it raise ``torch.OutOfMemoryError``.

    Args:
        device: GPU of this rank. It becomes the current device.
        world_size: Number of ranks of the run. With several ranks, the reserve also contains buffers of
            collectives.
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
