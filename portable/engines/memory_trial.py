"""Try whether training steps fit the device's memory, in one process.

A fake process group replaces the real one and this process plays rank 0 of the world size to come: all
communication buffers exist, and rank 0's shards are the largest. So every strategy runs unchanged, and a rank
that runs out of memory leaves no other rank waiting.
"""

from __future__ import annotations

import gc
import re
import resource
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from portable.private import torch_internals
from portable.registry import import_engine_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from portable.backend import Engine
    from portable.config import RunConfig
    from portable.engines.engine_interface import RankInfo

# Memory outside torch's allocator: on a host, thread stacks and I/O buffers.
_RESERVED_HOST_BYTES = 1 << 26
_HOST_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)

# Errors besides torch's own class: from the host, the driver (kernels, pinned memory) and CUDA libraries.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc|out of memory|_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def has_host_memory_limit() -> bool:
    """Whether running out of host memory raises: only under a limit of this process (``ulimit -v``).

    Otherwise the system overcommits and kills processes later.
    """
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in _HOST_LIMITS)


def run_memory_trial(
    build_model: Callable[[], nn.Module],
    config: RunConfig,
    rank_info: RankInfo,
    memory_limit: AbstractContextManager[None],
    run_steps: Callable[[Engine], None],
) -> bool:
    """See :meth:`portable.backend.Backend.run_memory_trial`.

    Args:
        memory_limit: makes allocations raise beyond the free memory, less what a run needs outside torch's
            allocator.
    """
    fits = True
    device = rank_info.device
    devices = [] if device.type == "cpu" else [device.index]
    torch.zeros(1, requires_grad=True).backward()  # autograd may start threads, whose stacks are not tried
    with torch.random.fork_rng(devices=devices), memory_limit, start_fake_ranks(rank_info) as at_stop:
        try:
            run_steps(
                import_engine_module(config.strategy, "engine").build_engine(
                    build_model(), config, rank_info, at_stop
                )
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
    gc.collect()
    if devices:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    return fits


@contextmanager
def start_fake_ranks(rank_info: RankInfo) -> Iterator[ExitStack]:
    """Start a fake process group of ``rank_info.world_size`` ranks; yield callbacks to run before it ends."""
    if rank_info.world_size > 1:
        torch_internals.start_fake_process_group(rank_info.rank, rank_info.world_size)
    try:
        with ExitStack() as at_stop:
            yield at_stop
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def limit_host_memory() -> Iterator[None]:
    """Limit this process to what its own limits leave, less what it needs beside tensors."""
    limits = {kind: resource.getrlimit(kind) for kind in _HOST_LIMITS}
    for kind, (soft, hard) in limits.items():
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(kind, (max(soft - _RESERVED_HOST_BYTES, 0), hard))
    try:
        yield
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
