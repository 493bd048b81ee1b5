"""Expert parallelism (``expert_parallel_size``) with FSDP2.

Expert-parallel ranks are also data-parallel ranks: each of them processes different tokens. The
experts of each layer are distributed over the ranks of an expert-parallel group. FSDP2 shards a
rank's experts over all ranks with the same experts, and shards all other parameters over all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from portable.model.expert_exchange import map_expert_exchanges
from portable.private.torch_internals import build_interleaved_placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Distribute the experts of a model on the meta device over the ranks of a mesh with one axis.

    Args:
        model: The transformers model, after
            :func:`portable.model.expert_exchange.install_expert_exchange`. Modified in place: the stacks of
            experts and their LoRA factors become DTensors, which are sharded by expert.
        mesh: Mesh of the expert-parallel group.

    Returns:
        The expert modules or, if an adapter changes the experts, the outermost wrappers of the modules.
    """
    exchanges = map_expert_exchanges(model)
    for module, exchange in exchanges.items():
        exchange.group = mesh.get_group()
        for name, stack in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _distribute(stack, mesh, Shard(0)))
        for wrapper in exchange.wrappers:
            for adapter in wrapper.lora_A:
                down, up = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
                down.weight = _distribute(down.weight, mesh, Shard(0))
                # peft sorts the columns by rank first, and then by expert.
                up.weight = _distribute(up.weight, mesh, build_interleaved_placement(1, wrapper.r[adapter]))
    return [exchange.outermost for exchange in exchanges.values()]


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a DTensor with this rank's part of a parameter on the meta device."""
    num_blocks, dim = getattr(placement, "split_factor", 1), placement.dim  # type: ignore[attr-defined]
    blocks = parameter.detach().chunk(num_blocks, dim)
    part = torch.cat([block.chunk(mesh.size(), dim)[mesh.get_local_rank()] for block in blocks], dim)
    shape, stride = parameter.shape, parameter.stride()
    distributed = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(distributed, parameter.requires_grad)
