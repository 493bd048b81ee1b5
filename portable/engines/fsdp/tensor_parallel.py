"""Layers that several ranks compute together: ``tensor_parallel_size``.

The matrices of a layer are cut over a group of ranks by the plan that transformers has for the model. Every
parameter is a DTensor on the group's mesh axis afterwards, cut or whole on each rank, so that optimizers,
norms and checkpoints take all of them alike. The table and the head stay whole.

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
    """Cut the layers of ``model``, on the meta device, over the ranks of ``mesh``, which has one axis.

    Returns:
        what has to be called before each update: :func:`average_replicated_gradients`.
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
    apply_tensor_parallel_plan(model, mesh, unplanned_styles)  # which compute with the tensors of a rank
    return partial(
        average_replicated_gradients,
        model,
        {name for name, style in plan.items() if style == PARTLY_USED_STYLE},
    )


def average_replicated_gradients(model: nn.Module, summed_names: Collection[str]) -> None:
    """Average the gradients of parameters that each rank of a group has whole. No host sync.

    They differ by rounding, where kernels add in no fixed order. Averaged, the ranks stay equal.

    Args:
        model: whose gradients are DTensors, with the group as the last axis of their mesh.
        summed_names: the names of parameters of which a rank uses a part, whose gradients are summed.
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
