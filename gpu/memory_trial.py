"""Trying out whether training steps fit the device's memory, without the other ranks.

A process group that moves nothing takes the place of the real one, and this process plays the first of as
many ranks as there will be: the buffers of all collectives are there, and the first rank's shards are the
largest. So every strategy can be tried as it is, and a rank that runs out of memory leaves no other waiting.
"""

from __future__ import annotations

import gc
import re
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpu.strategies import Machine, engine_room
from gpu.zero import runtime as zero_runtime
from portable.planner.device_catalog import KEPT_FOR_COLLECTIVES, SHARE_NOT_SEARCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from portable.backend import Engine
    from portable.config import RunConfig

# Left to what torch's allocator has no part in, or cannot use: its own fragments; NCCL's buffers; on a host
# the stacks of threads and what is read and written meanwhile.
_KEPT_ON_HOST = 1 << 26
_HOST_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)

# Beside torch's own class: of the host; of the driver, which gives kernels and pinned memory; of libraries.
_MEMORY_IS_FULL = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc|out of memory|_ALLOC_FAILED"
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device, or the host, has no more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MEMORY_IS_FULL.search(str(error)) is not None


def can_tell(device: torch.device) -> bool:
    """Whether running out of memory raises on ``device``.

    On a host it does where this process has a limit of its own (``ulimit -v``); else the system grants
    whatever is asked for, and ends processes once it has no more.
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
    """As :meth:`portable.backend.Backend.fits`, where it can tell."""
    fitted = True
    if machine.device.type == "cuda":
        torch.cuda.set_device(machine.device)
    devices = [machine.device.index] if machine.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _room(machine), ranks_that_are_not_there(machine):
        try:
            steps(engine_room(config.strategy).prepare(build(), config, machine))
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            fitted = False
    gc.collect()
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(machine.device)
    return fitted


def set_group_aside() -> None:
    """Let this process start another process group, without the connections of its present ones closing."""
    world: Any = dist.distributed_c10d._world
    _aside.extend(world.pg_map)
    world.default_pg = None
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        known.clear()


_aside: list[Any] = []


@contextmanager
def ranks_that_are_not_there(machine: Machine) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    if machine.world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=machine.rank, world_size=machine.world_size)
    try:
        yield
    finally:
        zero_runtime.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _room(machine: Machine) -> Iterator[None]:
    """Let the steps have what is free, less what the run will need besides."""
    with _room_on_gpu(machine) if machine.device.type == "cuda" else _room_on_host():
        yield


@contextmanager
def _room_on_gpu(machine: Machine) -> Iterator[None]:
    free, total = torch.cuda.mem_get_info(machine.device)
    kept = total * SHARE_NOT_SEARCHED + (KEPT_FOR_COLLECTIVES if machine.world_size > 1 else 0)
    usable = free + torch.cuda.memory_reserved(machine.device) - kept
    torch.cuda.set_per_process_memory_fraction(max(usable, 0.0) / total, machine.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, machine.device)


@contextmanager
def _room_on_host() -> Iterator[None]:
    limits = {kind: resource.getrlimit(kind) for kind in _HOST_LIMITS}
    for kind, (soft, hard) in limits.items():
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(kind, (max(soft - _KEPT_ON_HOST, 0), hard))
    try:
        yield
    finally:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
