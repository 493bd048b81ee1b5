"""Mixtures of experts whose parameters may go unused.

If no token of a rank chooses an expert, its gradient is missing on that rank only, and ranks that reduce
gradients during the backward pass would disagree on what to send. Models with all experts in one tensor have
zeros there, unless all tokens choose experts without parameters. This module gives the others zeros as well,
on any number of ranks, since an optimizer treats a zero gradient and a missing one differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def find_modules_with_unused_parameters(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward may leave out parameters.

    ModuleLists and ModuleDicts with a forward of their own, which calls only some of their modules; and
    experts in one tensor, beside others that return what they get (LongCat Flash).
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
    """Modules with all experts in one tensor and submodules without parameters.

    The submodules may run once per chosen expert, so in a different order on each rank.
    """
    return [
        module
        for module in model.modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
        and next(module.children(), None) is not None
        and not any(True for child in module.children() for _ in child.parameters())
    ]


def register_zero_gradient_hooks(model: nn.Module) -> None:
    """Give unused parameters of :func:`find_modules_with_unused_parameters` modules a gradient of zeros in each pass.

    Call it before other forward hooks are registered: it needs unsharded parameters.
    """
    for module in find_modules_with_unused_parameters(model):
        module.register_forward_hook(_connect_parameters_to_output)


def _connect_parameters_to_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: Tensor = _ZeroGradients.apply(output, *trained)  # type: ignore[no-untyped-call, unused-ignore]
    return reached


class _ZeroGradients(torch.autograd.Function):
    """The identity on its first argument; the gradients of the others are zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand(parameter.shape) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *ctx.zeros)
