"""Tensor parallelism (``tensor_parallel_size``): shard the weight matrices of layers over ranks.

The plan comes from :mod:`portable.model.tensor_parallel_plan`. After sharding, every parameter is a
DTensor that is sharded or replicated over the mesh axis of the tensor-parallel group. Optimizers,
norms and checkpoints therefore treat all parameters the same way. The embedding table and the head
are replicated.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from portable.model.parameters import replace_tensors
from portable.model.tensor_parallel_plan import PARTLY_USED_STYLE, map_parallel_styles
from portable.private.transformers_internals import apply_tensor_parallel_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch.distributed.device_mesh import DeviceMesh


def shard_layers_tensor_parallel(model: Any, mesh: DeviceMesh) -> Callable[[], None]:
    """Shard the layers of a model over the ranks of a tensor-parallel group.

    :func:`portable.model.tensor_parallel_plan.map_parallel_styles` determines which parameters are
    sharded. All other parameters become replicated DTensors.

    Args:
        model: The transformers model, on the meta device. Modified in place.
        mesh: Mesh of the tensor-parallel group, which has a single axis.

    Returns:
        Function without parameters that averages the gradients of replicated parameters. It must be
        called before each optimizer update. See :func:`average_replicated_gradients`.

    Raises:
        UserError: If the model has no tensor-parallel plan, or if the plan is not supported.
    """
    plan = map_parallel_styles(model, mesh.size())
    apply_tensor_parallel_plan(
        model, mesh, {name: style for name, style in plan.items() if style != PARTLY_USED_STYLE}
    )
    unplanned_styles = {
        name.rpartition(".")[0]: "local_params"
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not isinstance(parameter, DTensor)
    }

    def replicate_parameter(_: str, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            return parameter
        replica = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        return nn.Parameter(replica, parameter.requires_grad)

    replace_tensors(model, replicate_parameter, lambda _, buffer: buffer)
    # The modules without a plan compute with a rank's local tensors.
    apply_tensor_parallel_plan(model, mesh, unplanned_styles)
    return partial(
        average_replicated_gradients,
        model,
        {name for name, style in plan.items() if style == PARTLY_USED_STYLE},
    )


def average_replicated_gradients(model: nn.Module, summed_names: Collection[str]) -> None:
    """Average the gradients of replicated parameters over the tensor-parallel ranks, in place.

    Some kernels add numbers in a nondeterministic order, so the gradients of different ranks differ by
    rounding errors. Without averaging, the replicas would drift apart. Does not trigger a host-device
    sync.

    Args:
        model: Model whose gradients are DTensors. The tensor-parallel group is the last axis of their
            mesh.
        summed_names: Names of replicated parameters whose gradients are summed instead, because each
            rank uses only a part of the parameter.
    """
    pending = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[-1].is_replicate():
            mesh, local_gradient = gradient.device_mesh, gradient.to_local()
            local_gradient.div_(1 if name in summed_names else mesh.size(-1))
            pending.append(
                dist.all_reduce(local_gradient, group=mesh.get_group(mesh.ndim - 1), async_op=True)
            )
    for work in pending:
        work.wait()
