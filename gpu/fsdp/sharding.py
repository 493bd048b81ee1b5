"""How a model is spread over the ranks of a torch.distributed process group."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from gpu.compiling import compile_layers
from gpu.experts import zero_missing_gradients
from gpu.fsdp.units import order_prefetches, units
from portable.errors import UserError
from portable.model.activation_checkpointing import checkpoint_activations
from portable.model.layers import every_parameter_gets_gradient
from portable.model.parameters import materialize

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from gpu.strategies import Machine
    from portable.config import RunConfig

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
KEPT_AFTER_FORWARD = ("shard_grad_op", "hybrid_shard_zero2")
COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass
class ShardedModel:
    """A model spread over the ranks.

    Attributes:
        model: the transformers model under its plain names; its parameters are DTensors when sharded.
        forward: what to call for a forward pass: the model, or DDP around it.
        autocast_dtype: the compute type where FSDP does not cast the parameters itself, else None.
        loss_scale: what a loss must be multiplied by for gradients to come out summed over the ranks. DDP
            averages them. (A communication hook could sum them, but one written in Python may deadlock with
            gloo's threads when the process group goes.)
    """

    model: nn.Module
    forward: nn.Module
    device: torch.device
    autocast_dtype: torch.dtype | None
    loss_scale: float = 1.0

    def autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around every micro-batch: DDP reduces gradients once, with the last one.

        FSDP reduces after each, so that what is accumulated is a shard: gradients never take up the whole
        model's size on a rank.
        """
        if isinstance(self.forward, DistributedDataParallel) and not last:
            return self.forward.no_sync()
        return nullcontext()

    def let_go(self) -> None:
        """Take DDP's hold of the process group from it.

        Whoever drops the last hold of a group waits for gloo's threads. DDP's reducer does so with Python's
        lock in hand, which the threads may want for what the last collective left them: a deadlock.
        """
        if isinstance(self.forward, DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):
                setattr(self.forward, name, None)


def shard_group_size(config: RunConfig, world_size: int, local_world_size: int) -> int:
    """Ranks that share one copy of the state: all of them, or those of a group under the hybrid strategies.

    Raises:
        UserError: if the ranks cannot be divided into groups of that size.
    """
    if config.strategy not in HYBRID:
        return world_size
    size = config.fsdp.shard_group_size or local_world_size
    if world_size % size:
        fitting = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(
            f"fsdp.shard_group_size: {world_size} ranks cannot be divided into groups of {size}; use one of "
            f"{', '.join(fitting)}"
        )
    return size


def shard(model: nn.Module, config: RunConfig, machine: Machine) -> ShardedModel:
    """Allocate the meta-device ``model`` on the device, spread as ``config.strategy`` says.

    Gradients are summed over ranks, not averaged: the loss is already divided by the valid tokens of the
    global batch. On one rank there is nothing to spread, and the model stays as it is, unless its parameters
    are to wait in host memory.
    """
    device = machine.device
    replicated = config.strategy == "no_shard" and machine.world_size > 1
    # Asked before anything is wrapped. DDP looks for what gets no gradient in each backward pass, if it must.
    all_count = not replicated or every_parameter_gets_gradient(model)
    zero_missing_gradients(model)
    checkpoint_activations(model, config.memory.activation_checkpointing)
    compile_layers(model, config)
    compute = COMPUTE_DTYPES[config.precision]
    autocast_dtype = None if compute == torch.float32 else compute
    group = shard_group_size(config, machine.world_size, machine.local_world_size)
    offload = config.memory.offload_params == "cpu"
    if stands_alone(machine, offload=offload):
        materialize(model, device)
        return ShardedModel(model, model, device, autocast_dtype)
    if replicated:
        materialize(model, device)
        scale = float(machine.world_size)
        replica = _replicate(model, device, all_count=all_count)
        return ShardedModel(model, replica, device, autocast_dtype, scale)
    if not dist.is_initialized():  # one rank, which FSDP wants a group of as well
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(transport(device), store=store, rank=0, world_size=1)
    _fully_shard(model, config, _mesh(config, machine, group), compute, _offload_policy(offload, device))
    materialize(model, device, parameters=torch.device("cpu") if offload else device)
    return ShardedModel(model, model, device, autocast_dtype=None)


def stands_alone(machine: Machine, *, offload: bool) -> bool:
    """Whether there is nothing to spread, nor to keep elsewhere."""
    return machine.world_size == 1 and not offload


def transport(device: torch.device) -> str:
    """The backends of torch.distributed for tensors of ``device`` and of the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _mesh(config: RunConfig, machine: Machine, group: int) -> DeviceMesh:
    """One axis of ranks that share the state, and with the hybrid strategies one of groups before it."""
    shape: tuple[int, ...] = (group,)
    names: tuple[str, ...] = ("shard",)
    if config.strategy in HYBRID:
        shape, names = (machine.world_size // group, group), ("replicate", "shard")
    # DTensor remembers, over a process's life, what operations make of a mesh, and takes meshes of one shape
    # and name for the same: those of an earlier engine, whose process group is gone, must not be found.
    number = next(_meshes)
    named = tuple(f"{name}{number}" for name in names)
    return init_device_mesh(machine.device.type, shape, mesh_dim_names=named)


_meshes = itertools.count()


def _fully_shard(
    model: nn.Module, config: RunConfig, mesh: DeviceMesh, compute: torch.dtype, offload: OffloadPolicy
) -> None:
    ordered = units(model, config)
    for module in [*reversed(ordered), model]:  # what lies inside another unit comes before it
        wrapped = fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            reshard_after_forward=config.strategy not in KEPT_AFTER_FORWARD,
            offload_policy=offload,
        )
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no scaled one
    order_prefetches([m for m in (model, *ordered) if isinstance(m, FSDPModule)], config)


def _offload_policy(offload: bool, device: torch.device) -> OffloadPolicy:
    # Page-locked memory is for copies to a GPU, and cannot be had without one.
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()


def _replicate(model: nn.Module, device: torch.device, *, all_count: bool) -> DistributedDataParallel:
    replica = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank fills in the same weights itself
        find_unused_parameters=not all_count,
    )
    if dist.get_backend() == "fake":  # of a rehearsal, which DDP's own way to reduce finds no result in
        replica.register_comm_hook(None, lambda _, bucket: _ready(bucket.buffer()))
    return replica


def _ready(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
