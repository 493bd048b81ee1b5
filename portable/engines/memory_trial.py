"""Memory trial: check in a single process whether training steps fit in device memory.

A fake process group replaces the real one, and this process acts as rank 0 of the run's world size.
The result is valid for all ranks, because communication buffers are allocated as usual, and rank 0
has the largest shards. Every strategy runs without changes. An out-of-memory error does not leave
other ranks waiting, because there are none.
"""

from __future__ import annotations

import gc
import resource
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from portable.errors import is_memory_error
from portable.private import torch_internals
from portable.registry import import_engine_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from portable.backend import Engine
    from portable.config import RunConfig
    from portable.engines.engine_interface import RankInfo

# Memory reserved for allocations outside of torch's allocator, such as thread stacks and I/O buffers.
_RESERVED_HOST_BYTES = 1 << 26
_HOST_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the device or the host is out of memory.

    True for :class:`torch.OutOfMemoryError`, and for the errors that
    :func:`portable.errors.is_memory_error` recognizes. Other exceptions, such as OSErrors, are not
    recognized.
    """
    return isinstance(error, torch.OutOfMemoryError) or is_memory_error(error)


def has_host_memory_limit() -> bool:
    """Return whether a memory limit of this process makes allocations fail.

    An example is a limit set with ``ulimit -v``. Only the soft limits ``RLIMIT_AS`` and
    ``RLIMIT_DATA`` count. The memory limit of a container does not count, because the system kills
    a process that exceeds the limit.

    On a CPU, :func:`run_memory_trial` needs a limit, in order to find out whether a run fits in
    memory. Without a limit, allocations succeed even if memory is insufficient, and the system
    kills processes later.
    """
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in _HOST_LIMITS)


def run_memory_trial(
    build_model: Callable[[], nn.Module],
    config: RunConfig,
    rank_info: RankInfo,
    memory_limit: AbstractContextManager[None],
    run_steps: Callable[[Engine], None],
) -> bool:
    """Run training steps on a temporary engine, and return whether they fit in memory.

    See :meth:`portable.backend.Backend.run_memory_trial`. Afterwards, random states are restored.
    Errors other than out-of-memory errors are raised unchanged. If no error is raised, cached
    device memory is released, and the peak memory statistics of the device are reset.

    Args:
        build_model: Function that builds the model on the meta device.
        config: Config of the run.
        rank_info: Rank 0 on the device of this process, with the world size of the run.
        memory_limit: Context manager that makes allocations fail if they exceed the memory that a
            run can use for tensors.
        run_steps: Function that takes training steps with the engine.

    Returns:
        Whether the steps fit.
    """
    fits = True
    device = rank_info.device
    devices = [] if device.type == "cpu" else [device.index]
    # Start autograd's threads before the limit applies, so that their stacks do not count toward it.
    torch.zeros(1, requires_grad=True).backward()
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
    """Start a fake process group of ``rank_info.world_size`` ranks until the context ends.

    This process acts as rank ``rank_info.rank``, and the other ranks do not exist. Collectives of
    the group transfer nothing and never block. For a single rank, no group is started. At the end
    of the context, the process group is destroyed, even if it was initialized within the context.

    Yields:
        Exit stack that is closed before the process group is destroyed.
    """
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
    """Lower the memory limits of this process by 64 MiB until the context ends.

    A memory trial in this context fails if it comes within 64 MiB of the original limits. After the
    context, these 64 MiB are a reserve for allocations outside of torch's allocator, such as thread
    stacks and I/O buffers. Infinite limits are left unchanged.
    """
    limits = {kind: resource.getrlimit(kind) for kind in _HOST_LIMITS}
    for kind, (soft, hard) in limits.items():
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(kind, (max(soft - _RESERVED_HOST_BYTES, 0), hard))
    try:
        yield
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
