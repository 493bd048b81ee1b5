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

from gpu.strategies import engine_module
from portable.planner.device_lookup import KEPT_FOR_COLLECTIVES, SHARE_NOT_SEARCHED
from portable.private import of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from gpu.common.machine import Machine
    from portable.backend import Engine
    from portable.config import RunConfig

# Memory outside torch's allocator: on a host, thread stacks and I/O buffers.
_RESERVED_ON_HOST = 1 << 26
_HOST_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)

# Errors besides torch's own class: from the host, the driver (kernels, pinned memory) and CUDA libraries.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc|out of memory|_ALLOC_FAILED"
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def can_tell(device: torch.device) -> bool:
    """Whether running out of memory raises on ``device``.

    On a host it does only under a limit of this process (``ulimit -v``). Otherwise the system overcommits and
    kills processes later.
    """
    if device.type == "cuda":
        return True
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in _HOST_LIMITS)


def fits(
    build: Callable[[], nn.Module],
    config: RunConfig,
    machine: Machine,
    steps: Callable[[Engine], None],
) -> bool:
    """See :meth:`portable.backend.Backend.fits`; call it only where :func:`can_tell`."""
    fitted = True
    on_gpu = machine.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(machine.device)
    devices = [machine.device.index] if on_gpu else []
    torch.zeros(1, requires_grad=True).backward()  # autograd may start threads, whose stacks are not tried
    with torch.random.fork_rng(devices=devices), _memory_limit(machine), fake_ranks(machine) as at_stop:
        try:
            steps(engine_module(config.strategy).prepare(build(), config, machine, at_stop))
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            fitted = False
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(machine.device)
    return fitted


@contextmanager
def fake_ranks(machine: Machine) -> Iterator[ExitStack]:
    """Start a fake process group of ``machine.world_size`` ranks; yield callbacks to run before it ends."""
    if machine.world_size > 1:
        of_torch.start_fake_group(machine.rank, machine.world_size)
    try:
        with ExitStack() as at_stop:
            yield at_stop
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _memory_limit(machine: Machine) -> Iterator[None]:
    """Limit this process to the free memory, less what a run needs outside torch's allocator."""
    with _limit_on_gpu(machine) if machine.device.type == "cuda" else _limit_on_host():
        yield


@contextmanager
def _limit_on_gpu(machine: Machine) -> Iterator[None]:
    free, total = torch.cuda.mem_get_info(machine.device)
    reserved = total * SHARE_NOT_SEARCHED + (KEPT_FOR_COLLECTIVES if machine.world_size > 1 else 0)
    usable = free + torch.cuda.memory_reserved(machine.device) - reserved
    torch.cuda.set_per_process_memory_fraction(max(usable, 0.0) / total, machine.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, machine.device)


@contextmanager
def _limit_on_host() -> Iterator[None]:
    limits = {kind: resource.getrlimit(kind) for kind in _HOST_LIMITS}
    for kind, (soft, hard) in limits.items():
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(kind, (max(soft - _RESERVED_ON_HOST, 0), hard))
    try:
        yield
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
