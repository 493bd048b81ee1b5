"""Every private API of torch that the engines use, as one small function each. Written for torch 2.9."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor placed like ``tensor``, around ``local``, which may be on another device than the mesh.

    ``DTensor.from_local`` would move ``local`` to the devices of the mesh.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank's shard covers."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that is the same for all Python objects of one storage."""
    return int(storage._cdata)


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all ``tensors`` in place, in one kernel where the device has one."""
    torch._foreach_mul_(tensors, factor)


def keep_compiling(recompile_limit: int) -> None:
    """Allow ``recompile_limit`` different layers; past the limit they would silently run uncompiled."""
    dynamo = torch._dynamo.config
    # A layer's number among its attributes is no reason to recompile. Importing torch_xla, which transformers
    # does where it is installed, turns automatic dynamic shapes off.
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.automatic_dynamic_shapes = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, recompile_limit)


def record_memory_history(entries: int) -> None:
    """Record up to ``entries`` allocations on the GPU."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded allocations as https://pytorch.org/memory_viz reads them."""
    torch.cuda.memory._dump_snapshot(str(path))


def dump_nccl_trace() -> bytes:
    """The contents of NCCL's flight recorder: a pickle, as ``torchfrtrace`` reads it."""
    from torch._C import _distributed_c10d

    return bytes(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]


def detach_process_groups() -> list[Any]:
    """Let this process start a new default group; return the present groups, whose connections stay open.

    Keep the result: dropping a group closes its connections, and other ranks would fail.
    """
    world: Any = dist.distributed_c10d._world
    groups = list(world.pg_map)
    world.default_pg = None
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        known.clear()
    return groups


def start_fake_group(rank: int, world_size: int) -> None:
    """Start a process group whose collectives move nothing and never wait."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
