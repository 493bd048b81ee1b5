"""Expert parallelism (``expert_parallel_size``) with FSDP2.

Expert-parallel ranks are also data-parallel ranks, so each of them processes different
tokens. The experts of each layer are distributed over the ranks of an expert-parallel
group. FSDP2 shards a rank's experts over the ranks of the sharding group that have the same
experts. FSDP2 shards all other parameters over all ranks of the sharding group. With a
hybrid strategy, there are several sharding groups. Otherwise, all ranks form a single
sharding group.
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
    """Distribute the experts of a model over the ranks of an expert-parallel group.

    Args:
        model: The transformers model on the meta device, after
            :func:`portable.model.expert_exchange.install_expert_exchange`. Modified in place: the
            stacks of experts and their LoRA factors become DTensors, which are sharded by expert,
            and each :class:`portable.model.expert_exchange.ExpertExchange` gets the process group.
        mesh: Mesh of the expert-parallel group, which has a single axis.

    Returns:
        The expert modules. If an adapter changes an expert module, the result contains the
        outermost peft wrapper of the module instead.
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
                # peft orders these columns by rank of the factor first, and then by expert.
                up.weight = _distribute(up.weight, mesh, build_interleaved_placement(1, wrapper.r[adapter]))
    return [exchange.outermost for exchange in exchanges.values()]


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Convert a parameter on the meta device to a DTensor that contains only this rank's part.

    With an interleaved placement, the part consists of a part of each block. The size of the
    sharded dimension, or of each block, must be a multiple of the number of ranks.
    """
    num_blocks, dim = getattr(placement, "split_factor", 1), placement.dim  # type: ignore[attr-defined]
    blocks = parameter.detach().chunk(num_blocks, dim)
    part = torch.cat([block.chunk(mesh.size(), dim)[mesh.get_local_rank()] for block in blocks], dim)
    shape, stride = parameter.shape, parameter.stride()
    distributed = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(distributed, parameter.requires_grad)
