"""Layers that several ranks compute together: ``tensor_parallel_size``.

The matrices of a layer are cut over a group of ranks by the plan that transformers has for the model. Every
parameter is a DTensor on the group's mesh axis afterwards, cut or whole on each rank, so that optimizers,
norms and checkpoints take all of them alike. The table and the head stay whole.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from portable.model.shared_layers import USED_IN_PART, plans
from portable.private import of_torch
from portable.private.of_transformers import split_by_plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Cut the layers of ``model``, on the meta device, over the ranks of ``mesh``, which has one axis."""
    plan, of_experts = plans(model, mesh.size())
    split_by_plans(model, mesh, {n: style for n, style in plan.items() if style != USED_IN_PART}, of_experts)
    in_part = {name for name, style in plan.items() if style == USED_IN_PART}
    whole: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for prefix, module in model.named_modules():
        left = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if not isinstance(parameter, DTensor)
        }
        for name, parameter in left.items():
            if parameter not in whole:
                one = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                whole[parameter] = nn.Parameter(one, parameter.requires_grad)
            setattr(module, name, whole[parameter])
        if left:
            _compute_with_local(module, list(left), Partial() if prefix in in_part else Replicate())


def _compute_with_local(module: nn.Module, names: Sequence[str], gradient: Any) -> None:
    """Let ``module`` compute with the local tensors of whole parameters, whose gradients are ``gradient``."""
    forward = module.forward

    def with_local(*arguments: Any, **keywords: Any) -> Any:
        held = of_torch.parameters(module)
        before = {name: held[name] for name in names}
        for name, parameter in before.items():
            if isinstance(parameter, DTensor):
                held[name] = parameter.to_local(grad_placements=[gradient])
        try:
            return forward(*arguments, **keywords)
        finally:
            held.update(before)

    module.forward = with_local


def averaged(gradients: Sequence[Tensor]) -> Tensor:
    """Average the gradients of parameters that each rank of a group has whole; return the norm of all.

    These gradients differ by rounding, where kernels add in no fixed order. Averaged, the ranks stay equal.

    Args:
        gradients: DTensors, of which the last mesh axis is that of the group.

    Returns:
        the norm, an fp32 scalar, the same on all ranks. No host sync.
    """
    parts: defaultdict[int, list[Tensor]] = defaultdict(list)
    pending = []
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        mesh, places, part = gradient.device_mesh, gradient.placements, gradient.to_local()
        if places[-1].is_replicate():
            part.div_(mesh.size(-1))
            pending.append(dist.all_reduce(part, group=mesh.get_group(mesh.ndim - 1), async_op=True))
        copies = math.prod(mesh.size(axis) for axis, place in enumerate(places) if place.is_replicate())
        parts[copies].append(part)
    for work in pending:
        work.wait()
    squares = [torch.nn.utils.get_total_norm(same).square() / copies for copies, same in parts.items()]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()
