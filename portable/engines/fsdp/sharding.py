"""Shard a model over the ranks with FSDP2, or replicate it with DDP."""

from __future__ import annotations

import inspect
import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from portable.engines.engine_interface import COMPUTE_DTYPES, get_dist_backend
from portable.engines.fsdp.footprint import (
    HYBRID_STRATEGIES,
    STRATEGIES_KEPT_AFTER_FORWARD,
    choose_expert_shard_dim,
    compute_shard_group_size,
)
from portable.engines.fsdp.units import configure_prefetching, find_fsdp_units, find_unreached_layers
from portable.model.parameters import materialize_model, replace_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from portable.config import RunConfig
    from portable.engines.engine_interface import RankInfo


@dataclass
class ShardedModel:
    """Model that is sharded or replicated over the ranks.

    Attributes:
        model: The transformers model with its original names. Its parameters are DTensors if it is
            sharded.
        forward_module: Module to call: the model, or DDP around it.
        device: Device of this rank.
        autocast_dtype: Compute dtype for autocast. None in fp32, or if FSDP casts the parameters.
        loss_factor: Factor by which to multiply the loss: the world size under DDP, otherwise 1. DDP
            averages the gradients over the ranks, and the factor turns the average into a sum. (A
            communication hook could also sum gradients, but a Python hook may deadlock with gloo's
            threads when the process group is destroyed.)
        average_gradients: Function that averages the gradients of replicated parameters over the
            tensor-parallel ranks. It is called before each update, and does nothing without tensor
            parallelism.
    """

    model: nn.Module
    forward_module: nn.Module
    device: torch.device
    autocast_dtype: torch.dtype | None
    loss_factor: float = 1.0
    average_gradients: Callable[[], None] = lambda: None

    def get_autocast_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward pass. It does nothing if ``autocast_dtype`` is None."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def get_sync_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context for the forward and backward pass of a micro-batch.

        With DDP, the context delays the gradient all-reduce until the last micro-batch. With FSDP, it does
        nothing. Gradients are then reduced after each micro-batch, so that a rank accumulates only its
        shards.

        Args:
            last: Whether this is the last micro-batch of the step.
        """
        if isinstance(self.forward_module, DistributedDataParallel) and not last:
            return self.forward_module.no_sync()
        return nullcontext()

    def release_process_group(self) -> None:
        """Drop DDP's references to the process group before the group is destroyed.

        Dropping the last reference to a group joins gloo's threads. DDP's reducer would hold the GIL during
        this join, which causes a deadlock if one of the threads needs the GIL.
        """
        if isinstance(self.forward_module, DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):
                setattr(self.forward_module, name, None)


def shard_model(
    model: nn.Module, config: RunConfig, rank_info: RankInfo, *, all_parameters_used: bool = False
) -> ShardedModel:
    """Shard or replicate a model according to ``config.strategy``, and allocate its parameters.

    Gradients are summed over ranks instead of averaged, because the loss is already divided by the
    number of target tokens in the global batch. On a single rank, the model is neither wrapped nor
    sharded, unless its parameters are offloaded to host memory. In this case, FSDP is also used on
    a single rank. If there is no process group, this function creates one for FSDP.

    Args:
        model: The model on the meta device. All changes to its modules have already been made, see
            :func:`portable.engines.transforms.apply_transforms`.
        config: Config of the run.
        rank_info: Device, rank and world size of this process.
        all_parameters_used: Whether each backward pass reaches every trained parameter. Otherwise,
            DDP searches for unused parameters in each pass.

    Returns:
        The model with uninitialized weights.

    Raises:
        UserError: If the ranks cannot be divided into sharding groups, or if a module class in the
            section ``fsdp`` does not exist in the model.
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
    if not dist.is_initialized():  # FSDP needs a process group even for one rank
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(get_dist_backend(device), store=store, rank=0, world_size=1)
    # Move the buffers first. Otherwise, FSDP would assign their data, which fails between different device
    # types.
    replace_tensors(model, lambda _, parameter: parameter, lambda _, buffer: buffer.to(device))
    units = find_fsdp_units(model, config)  # before the model is changed, because it runs a trial pass
    mesh = _build_mesh(config, rank_info, group_size)
    average = ShardedModel.average_gradients
    distributed_experts: dict[nn.Module, DeviceMesh] = {}
    if config.expert_parallel_size > 1:
        from portable.engines.fsdp.expert_parallel import distribute_experts

        expert_mesh = _build_expert_mesh(config, rank_info, group_size)
        *others, expert = expert_mesh.mesh_dim_names or ()
        modules = distribute_experts(model, expert_mesh[expert])
        distributed_experts = dict.fromkeys(modules, expert_mesh[tuple(others)])
    if size > 1:
        *others, tensor = mesh.mesh_dim_names or ()
        from portable.engines.fsdp.tensor_parallel import shard_layers_tensor_parallel

        average = shard_layers_tensor_parallel(model, mesh[tensor])
        mesh = mesh[tuple(others)]
    offload_policy = _build_offload_policy(offload, device)
    _shard_units(model, config, units, mesh, compute, offload_policy, distributed_experts)
    materialize_model(model, device, storage_device=torch.device("cpu") if offload else device)
    return ShardedModel(model, model, device, None, average_gradients=average)


def is_unsharded(rank_info: RankInfo, *, offload: bool) -> bool:
    """Return whether the model is neither wrapped nor sharded.

    This is the case on a single rank if the parameters are not offloaded.

    Args:
        rank_info: Device, rank and world size of this process.
        offload: Whether the parameters are offloaded to host memory.
    """
    return rank_info.world_size == 1 and not offload


def uses_ddp(config: RunConfig, rank_info: RankInfo) -> bool:
    """Return whether DDP wraps the model. This is the case for ``no_shard`` on several ranks."""
    needs_no_sharding = is_unsharded(rank_info, offload=config.memory.offload_params == "cpu")
    return config.strategy == "no_shard" and not needs_no_sharding


def _build_mesh(config: RunConfig, rank_info: RankInfo, shard_group_size: int) -> DeviceMesh:
    """Build the device mesh of a run, with the axes ``replicate``, ``shard`` and ``tensor``.

    Only hybrid strategies have a replicate axis, and only tensor parallelism has a tensor axis. The
    tensor axis is last, so that tensor-parallel ranks are consecutive. Each axis name ends with a
    number, such as ``shard0``. The number differs between the meshes of a process, because DTensor
    would otherwise confuse the mesh with an equal mesh of a previous engine.

    Args:
        config: Config of the run.
        rank_info: Device, rank and world size of this process.
        shard_group_size: Size of the shard axis.
    """
    size = config.tensor_parallel_size
    axes = (
        {"replicate": rank_info.world_size // size // shard_group_size}
        if config.strategy in HYBRID_STRATEGIES
        else {}
    )
    axes |= {"shard": shard_group_size} | ({"tensor": size} if size > 1 else {})
    return _init_named_mesh(rank_info.device, axes)


def _build_expert_mesh(config: RunConfig, rank_info: RankInfo, shard_group_size: int) -> DeviceMesh:
    """Build the device mesh of the experts. Its last axis is the expert-parallel axis.

    The axis over which the other parameters are sharded is split into two axes, ``shard`` and
    ``expert``, so that the ranks of an expert-parallel group are neighbors.
    """
    size = config.expert_parallel_size
    axes = (
        {"replicate": rank_info.world_size // shard_group_size}
        if config.strategy in HYBRID_STRATEGIES
        else {}
    )
    return _init_named_mesh(rank_info.device, axes | {"shard": shard_group_size // size, "expert": size})


def _init_named_mesh(device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """Create a device mesh over all ranks.

    Args:
        device: Device of this rank. The mesh has the same device type.
        axes: Sizes of the axes, keyed by name. In the mesh, each name ends with the number of the
            mesh, so axis names differ between meshes. DTensor would otherwise reuse an equal mesh
            of a previous engine, and its destroyed process group.
    """
    # DTensor's caches are keyed by mesh and never cleared, and meshes with the same shape and names are
    # equal. With the same names, DTensor would find the mesh of a previous engine and its destroyed process
    # group.
    number = next(_mesh_numbers)
    names = tuple(f"{name}{number}" for name in axes)
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=names)


_mesh_numbers = itertools.count()


def _shard_units(
    model: nn.Module,
    config: RunConfig,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    offload_policy: OffloadPolicy,
    expert_meshes: Mapping[nn.Module, DeviceMesh],
) -> None:
    """Apply ``fully_shard`` to the experts, the units and the model, and configure prefetching.

    Args:
        model: The model on the meta device. It is changed in place.
        config: Config of the run.
        units: Modules to shard as units. Outer modules precede the modules that they contain.
        mesh: Mesh with a shard axis and, with hybrid strategies, a replicate axis.
        compute_dtype: Dtype to which FSDP casts parameters. Gradients are reduced in fp32.
        offload_policy: Offload policy of FSDP.
        expert_meshes: Mesh for each module whose experts are distributed over ranks, keyed by module.
    """
    # FSDP's hook must run after this hook and before the next one, so it is registered between them.
    model.register_forward_hook(_expose_output_tensors)
    units = [unit for unit in units if unit not in expert_meshes]
    for module in [*expert_meshes, *reversed(units), model]:  # inner units first
        is_layer = module not in expert_meshes
        unit_mesh = mesh if is_layer else expert_meshes[module]
        wrapped = fully_shard(
            module,
            mesh=unit_mesh,
            shard_placement_fn=None if is_layer else partial(_place_experts, ranks=unit_mesh.size(-1)),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute_dtype,
                reduce_dtype=torch.float32,
                # Do not cast the routing weights, which may be more precise than the compute dtype.
                cast_forward_inputs=is_layer,
            ),
            reshard_after_forward=config.strategy not in STRATEGIES_KEPT_AFTER_FORWARD,
            offload_policy=offload_policy,
        )
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # gloo does not support a scaled sum
    model.register_forward_hook(_restore_output)
    unused = [layer for _, layer in find_unreached_layers(model)]
    used = [m for m in (model, *units) if not any(m is layer for layer in unused)]
    configure_prefetching([m for m in used if isinstance(m, FSDPModule)], config)


def _place_experts(stack: nn.Parameter, *, ranks: int) -> Shard:
    """Return the FSDP placement for a stack of experts or for its LoRA factor.

    FSDP applies the placement along the mesh axis over which it shards the parameter. A stack or a
    ``lora_A`` weight is sharded along the dim that :func:`choose_expert_shard_dim` returns. A
    ``lora_B`` weight is sharded along dim 0, because its columns are already divided by expert.

    Args:
        stack: Parameter that is already distributed over the expert-parallel ranks.
        ranks: Number of ranks over which FSDP shards the parameter.
    """
    assert isinstance(stack, DTensor)
    if stack.placements[0] != Shard(0):  # a LoRA factor whose columns are divided by expert
        return Shard(0)
    return Shard(choose_expert_shard_dim(stack.to_local().shape, ranks))


def _expose_output_tensors(module: nn.Module, args: Any, output: Any) -> tuple[Any, Callable[[], Any]]:
    """Convert dicts in the output of a model to lists, so that FSDP finds every tensor in them.

    FSDP registers hooks on the tensors that it finds in the output. The hooks gather parameters before
    the backward pass. The outputs of transformers models are both dataclasses and dicts, and torch 2.15
    finds only the fields of the dataclass, not keys that were added later. This forward hook runs
    before FSDP's hook, and :func:`_restore_output` runs after it.

    Returns:
        The converted output, and a function that returns the original output.
    """
    return _replace_dicts_by_lists(output), lambda: output


def _replace_dicts_by_lists(output: Any) -> Any:
    """Convert nested dicts to lists of their values. Any other object is returned unchanged."""
    return (
        [_replace_dicts_by_lists(value) for value in output.values()] if isinstance(output, dict) else output
    )


def _restore_output(module: nn.Module, args: Any, exposed: tuple[Any, Callable[[], Any]]) -> Any:
    """Return the model's original output, given the result of :func:`_expose_output_tensors`.

    This is a forward hook.
    """
    return exposed[1]()


def _build_offload_policy(is_offloading: bool, device: torch.device) -> OffloadPolicy:
    # Only a GPU can pin memory.
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if is_offloading else OffloadPolicy()


_BUFFER_SYNC_OPTION = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # from torch 2.15
    _BUFFER_SYNC_OPTION = "forward_sync_buffers"


def _wrap_in_ddp(
    model: nn.Module, device: torch.device, *, all_parameters_used: bool
) -> DistributedDataParallel:
    """Wrap a model in DDP.

    DDP does not broadcast parameters or buffers, so every rank must load the same weights.

    In a memory trial, the process group is fake, so the gradient all-reduce is replaced by a no-op.

    Args:
        model: The model with allocated parameters.
        device: Device of this rank.
        all_parameters_used: Whether each backward pass reaches every trained parameter. Otherwise,
            DDP searches for unused parameters in each pass.
    """
    replica = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type != "cpu" else None,
        gradient_as_bucket_view=True,
        init_sync=False,  # each rank loads the same weights itself
        find_unused_parameters=not all_parameters_used,
        **cast("Any", {_BUFFER_SYNC_OPTION: False}),
    )
    if dist.get_backend() == "fake":  # a memory trial has no other ranks, so DDP's reduction is replaced
        replica.register_comm_hook(None, lambda _, bucket: _make_completed_future(bucket.buffer()))
    return replica


def _make_completed_future(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
