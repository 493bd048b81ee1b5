"""How a model is spread over the ranks of a torch.distributed process group."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpu.recompute import checkpoint_activations
from portable.model import materialize, transformer_layers

if TYPE_CHECKING:
    from torch import nn

    from portable.config import RunConfig

COMPUTE_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


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


def shard(model: nn.Module, config: RunConfig, device: torch.device, world_size: int) -> ShardedModel:
    """Allocate the meta-device ``model`` on ``device``, spread as ``config.strategy`` says.

    Gradients are summed over ranks, not averaged: the loss is already divided by the valid tokens of the
    global batch. On one rank there is nothing to spread, and the model stays as it is.
    """
    layers = [layer for _, layer in transformer_layers(model)]
    checkpoint_activations(model, config.memory.activation_checkpointing)
    if config.compile:
        for layer in layers:
            layer.compile()
    compute = COMPUTE_DTYPES[config.precision]
    autocast_dtype = None if compute == torch.float32 else compute
    if world_size == 1:
        materialize(model, device)
        return ShardedModel(model, model, device, autocast_dtype)
    if config.strategy == "no_shard":
        materialize(model, device)
        return ShardedModel(model, _replicate(model, device), device, autocast_dtype, float(world_size))
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in [*layers, model]:
        wrapped = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=config.strategy == "full_shard",
        )
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no scaled one
    materialize(model, device)
    return ShardedModel(model, model, device, autocast_dtype=None)


def _replicate(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank fills in the same weights itself
    )
