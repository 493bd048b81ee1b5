"""Shard or replicate a model over the ranks with FSDP2 or DDP."""

from __future__ import annotations

import inspect
import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

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

from portable.engines.engine_interface import COMPUTE_DTYPES, get_dist_backend
from portable.engines.fsdp.footprint import HYBRID_STRATEGIES, STRATEGIES_KEPT_AFTER_FORWARD
from portable.engines.fsdp.units import configure_prefetching, find_fsdp_units, find_unreached_layers
from portable.errors import UserError
from portable.model.parameters import materialize_model, replace_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from portable.config import RunConfig
    from portable.engines.engine_interface import RankInfo


@dataclass
class ShardedModel:
    """A model sharded or replicated over the ranks.

    Attributes:
        model: the transformers model with its plain names; its parameters are DTensors if sharded.
        forward_module: the module to call: the model, or DDP around it.
        autocast_dtype: the compute type; None if FSDP casts the parameters, or in fp32.
        loss_factor: the factor of the loss that makes gradients sums over the ranks, since DDP averages. (A
            communication hook could sum them, but a Python hook may deadlock with gloo's threads when the
            process group is destroyed.)
        average_gradients: Averages the gradients of parameters that are not sharded between tensor-parallel
            ranks. Called before each update.
    """

    model: nn.Module
    forward_module: nn.Module
    device: torch.device
    autocast_dtype: torch.dtype | None
    loss_factor: float = 1.0
    average_gradients: Callable[[], None] = lambda: None

    def get_autocast_context(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def get_sync_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch: DDP reduces gradients with the last one only.

        FSDP reduces after each, so that it accumulates shards and never holds all gradients on a rank.
        """
        if isinstance(self.forward_module, DistributedDataParallel) and not last:
            return self.forward_module.no_sync()
        return nullcontext()

    def release_process_group(self) -> None:
        """Drop DDP's references to the process group before the group is destroyed.

        The last reference to a group joins gloo's threads. DDP's reducer would do so holding the GIL, which
        the threads may need: a deadlock.
        """
        if isinstance(self.forward_module, DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):
                setattr(self.forward_module, name, None)


def compute_shard_group_size(config: RunConfig, world_size: int, local_world_size: int) -> int:
    """The number of ranks that one copy of the state is sharded over; under hybrid strategies, of a group.

    Ranks that share layers count as one.

    Raises:
        UserError: if the world size is not a multiple of the group size.
    """
    world_size //= config.tensor_parallel_size
    local_world_size //= config.tensor_parallel_size
    if config.strategy not in HYBRID_STRATEGIES:
        return world_size
    size = config.fsdp.shard_group_size or max(1, local_world_size)
    if world_size % size:
        fitting = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        tensor_parallel_size = config.tensor_parallel_size
        ranks = (
            "ranks"
            if tensor_parallel_size == 1
            else f"groups of {tensor_parallel_size} tensor-parallel ranks"
        )
        raise UserError(
            f"fsdp.shard_group_size: {world_size} {ranks} are not divisible into groups of {size}; "
            f"use one of {', '.join(fitting)}"
        )
    return size


def shard_model(
    model: nn.Module, config: RunConfig, rank_info: RankInfo, *, all_parameters_used: bool = False
) -> ShardedModel:
    """Allocate the meta-device ``model``, sharded or replicated by ``config.strategy``.

    Gradients are summed over ranks, not averaged: the loss is already divided by the valid tokens of the
    global batch. One rank keeps a plain model, unless its parameters are offloaded.

    Args:
        model: The model on the meta device, after its transforms.
        config: Config of the run.
        rank_info: This rank's device, rank, and world size.
        all_parameters_used: Whether each backward pass reaches every trained parameter. Otherwise, DDP
            searches for unused parameters in each pass.
    """
    device = rank_info.device
    offload = config.memory.offload_params == "cpu"
    needs_no_sharding = is_unsharded(rank_info, offload=offload)
    replicated = uses_ddp(config, rank_info)
    compute = COMPUTE_DTYPES[config.precision]
    autocast_dtype = None if compute == torch.float32 else compute
    size = config.tensor_parallel_size
    group_size = compute_shard_group_size(config, rank_info.world_size, rank_info.local_world_size)
    if needs_no_sharding:
        materialize_model(model, device)
        return ShardedModel(model, model, device, autocast_dtype)
    if replicated:
        materialize_model(model, device)
        scale = float(rank_info.world_size)
        replica = _wrap_in_ddp(model, device, all_parameters_used=all_parameters_used)
        return ShardedModel(model, replica, device, autocast_dtype, scale)
    if not dist.is_initialized():  # FSDP needs a group even for one rank
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(get_dist_backend(device), store=store, rank=0, world_size=1)
    # FSDP would assign their data, which no tensor takes from one of another kind of device.
    replace_tensors(model, lambda _, parameter: parameter, lambda _, buffer: buffer.to(device))
    units = find_fsdp_units(model, config)  # of the plain model: it is tried
    mesh = _build_mesh(config, rank_info, group_size)
    average = ShardedModel.average_gradients
    if size > 1:
        *others, tensor = mesh.mesh_dim_names or ()
        from portable.engines.fsdp.tensor_parallel import shard_layers_tensor_parallel

        average = shard_layers_tensor_parallel(model, mesh[tensor])
        mesh = mesh[tuple(others)]
    _shard_units(model, config, units, mesh, compute, _build_offload_policy(offload, device))
    materialize_model(model, device, storage_device=torch.device("cpu") if offload else device)
    return ShardedModel(model, model, device, None, average_gradients=average)


def is_unsharded(rank_info: RankInfo, *, offload: bool) -> bool:
    """Whether the model needs neither sharding nor offloading."""
    return rank_info.world_size == 1 and not offload


def uses_ddp(config: RunConfig, rank_info: RankInfo) -> bool:
    """Return whether each of several ranks has a replica of the model, which DDP wraps."""
    needs_no_sharding = is_unsharded(rank_info, offload=config.memory.offload_params == "cpu")
    return config.strategy == "no_shard" and not needs_no_sharding


def _build_mesh(config: RunConfig, rank_info: RankInfo, shard_group_size: int) -> DeviceMesh:
    """A mesh with a shard axis and, under hybrid strategies, a replicate axis before it.

    Where ranks share layers, they are the last axis, so neighbors.
    """
    size = config.tensor_parallel_size
    axes = (
        {"replicate": rank_info.world_size // size // shard_group_size}
        if config.strategy in HYBRID_STRATEGIES
        else {}
    )
    axes |= {"shard": shard_group_size} | ({"tensor": size} if size > 1 else {})
    # DTensor caches by mesh for the life of the process, and meshes of one shape and name are equal. A new
    # name keeps it from finding the mesh of an earlier engine, whose process group is destroyed.
    number = next(_mesh_numbers)
    names = tuple(f"{name}{number}" for name in axes)
    return init_device_mesh(rank_info.device.type, tuple(axes.values()), mesh_dim_names=names)


_mesh_numbers = itertools.count()


def _shard_units(
    model: nn.Module,
    config: RunConfig,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    offload_policy: OffloadPolicy,
) -> None:
    model.register_forward_hook(_expose_output_tensors)  # FSDP's own hook comes between the two
    for module in [*reversed(units), model]:  # inner units first
        wrapped = fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
            reshard_after_forward=config.strategy not in STRATEGIES_KEPT_AFTER_FORWARD,
            offload_policy=offload_policy,
        )
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.register_forward_hook(_restore_output)
    unused = [layer for _, layer in find_unreached_layers(model)]
    used = [m for m in (model, *units) if not any(m is layer for layer in unused)]
    configure_prefetching([m for m in used if isinstance(m, FSDPModule)], config)


def _expose_output_tensors(module: nn.Module, args: Any, output: Any) -> tuple[Any, Callable[[], Any]]:
    """Let FSDP see every tensor that a model returns, to gather parameters before its backward pass.

    Of a dataclass, as models return it, torch 2.15 sees the fields, and not the keys that were added to it.
    """
    return _replace_dicts_by_lists(output), lambda: output


def _replace_dicts_by_lists(output: Any) -> Any:
    """Replace the mappings in the output of a model by lists of their values."""
    return (
        [_replace_dicts_by_lists(value) for value in output.values()] if isinstance(output, dict) else output
    )


def _restore_output(module: nn.Module, args: Any, exposed: tuple[Any, Callable[[], Any]]) -> Any:
    return exposed[1]()


def _build_offload_policy(is_offloading: bool, device: torch.device) -> OffloadPolicy:
    # Pinned memory needs a GPU.
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if is_offloading else OffloadPolicy()


_BUFFER_SYNC_OPTION = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # from torch 2.15
    _BUFFER_SYNC_OPTION = "forward_sync_buffers"


def _wrap_in_ddp(
    model: nn.Module, device: torch.device, *, all_parameters_used: bool
) -> DistributedDataParallel:
    replica = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type != "cpu" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # each rank loads the same weights itself
        find_unused_parameters=not all_parameters_used,
        **cast("Any", {_BUFFER_SYNC_OPTION: False}),
    )
    if dist.get_backend() == "fake":  # in a memory trial; DDP's own reduction expects a result
        replica.register_comm_hook(None, lambda _, bucket: _make_completed_future(bucket.buffer()))
    return replica


def _make_completed_future(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
