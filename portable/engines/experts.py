"""Add zero gradients for experts that no token has chosen in a forward pass.

If no token on a rank chooses an expert, autograd may compute no gradient for the expert on this
rank, although other ranks have one. Ranks that reduce gradients during the backward pass would then
disagree on which tensors to send. There are two kinds of models with this problem:

- Models that store each expert in a separate module.
- Models that store all experts in one tensor, and also have experts without parameters, such as
  identity experts. If all tokens choose experts without parameters, the tensor gets no gradient.

Other models that store all experts in one tensor do not have the problem, because autograd computes
zeros for the unused experts.

This module adds zero gradients wherever they would be missing, even if there is only one rank. An
optimizer treats a zero gradient differently from a missing gradient, and results must not depend on
the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def find_modules_with_unused_parameters(model: nn.Module) -> list[nn.Module]:
    """Find the modules whose forward pass may leave some of their parameters unused.

    There are two kinds:

    - ModuleLists and ModuleDicts with a custom ``forward``, which may call only some of their
      modules.
    - Modules that store the parameters of all experts in one tensor, but also have identity
      experts. An identity expert has no parameters and returns its input. If all tokens choose
      identity experts, the tensor is unused. LongCat Flash has such modules.
    """
    default_forwards = (nn.ModuleList.forward, nn.ModuleDict.forward)
    experts_with_identity = [
        m for m in find_stacked_expert_modules(model) if any(type(c) is nn.Identity for c in m.children())
    ]
    return experts_with_identity + [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward not in default_forwards
    ]


def find_stacked_expert_modules(model: nn.Module) -> list[nn.Module]:
    """Find the modules with stacked experts whose submodules have no parameters.

    A module has stacked experts if one of its direct parameters has three dimensions. Modules
    without submodules are not included. ZeRO-3 has to treat each module in the result as one unit.
    The submodules, such as activation functions, may run once per chosen expert, and therefore in a
    different order on each rank.
    """
    return [
        module
        for module in model.modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
        and next(module.children(), None) is not None
        and not any(True for child in module.children() for _ in child.parameters())
    ]


def register_zero_gradient_hooks(model: nn.Module) -> None:
    """Register forward hooks that give the unused parameters of expert modules a zero gradient.

    The gradient is added in each backward pass. The hooks are registered on all modules that
    :func:`find_modules_with_unused_parameters` returns. Call this function before other forward
    hooks are registered: the hooks of this function need unsharded parameters, so they must run
    first.

    Args:
        model: The transformers model. Forward hooks are added to its modules.
    """
    for module in find_modules_with_unused_parameters(model):
        module.register_forward_hook(_connect_parameters_to_output)


def _connect_parameters_to_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Connect a module's trained parameters to its output in the autograd graph.

    This is a forward hook. It ensures that every trained parameter gets a gradient in the backward
    pass. The gradient is zero if the forward pass did not use the parameter. The values of the
    output do not change.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: Tensor = _ZeroGradients.apply(output, *trained)  # type: ignore[no-untyped-call, unused-ignore]
    return reached


class _ZeroGradients(torch.autograd.Function):
    """Autograd function that returns its first argument. The gradients of all other arguments are zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand(parameter.shape) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *ctx.zeros)
