"""Expert parallelism (``expert_parallel_size``) with FSDP2.

The expert-parallel groups consist of ranks that also share the data: each rank has its own tokens. The ranks
of a group divide the experts of each layer among them. FSDP2 shards the experts of a rank over the ranks with
the same experts, and all other parameters over all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from portable.model.expert_exchange import map_expert_exchanges

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Distribute the experts of a model on the meta device over the ranks of a mesh with one axis.

    Args:
        model: The transformers model, after
            :func:`portable.model.expert_exchange.install_expert_exchange`. Modified in place: the stacks of
            experts become DTensors that are sharded along their first dimension.
        mesh: Mesh of the expert-parallel group.

    Returns:
        The expert modules.
    """
    exchanges = map_expert_exchanges(model)
    for module, exchange in exchanges.items():
        exchange.group = mesh.get_group()
        for name, stack in list(module.named_parameters(recurse=False)):
            part = stack.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            distributed = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(distributed, stack.requires_grad))
    return list(exchanges)
