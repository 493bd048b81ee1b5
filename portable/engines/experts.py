"""Gradients of mixtures of experts whose parameters may be unused in a pass.

If the tokens of a rank do not choose an expert, its gradient is missing only on this rank. Ranks that reduce
gradients during the backward pass would then disagree on the tensors to send. Models with all experts in one
tensor have zeros for unused experts, unless all tokens choose experts without parameters. This module adds
gradients of zeros in all other cases. It does so on any number of ranks, because an optimizer treats a zero
gradient and a missing gradient differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def find_modules_with_unused_parameters(model: nn.Module) -> list[nn.Module]:
    """Find the modules whose forward may skip parameters.

    These are ModuleLists and ModuleDicts with a custom forward, which calls only some of their modules, and
    modules with all experts in one tensor next to experts that return their input (LongCat Flash).
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
    """Find the modules with all experts in one tensor and with submodules that have no parameters.

    The submodules may run once per chosen expert, and therefore in a different order on each rank.
    """
    return [
        module
        for module in model.modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
        and next(module.children(), None) is not None
        and not any(True for child in module.children() for _ in child.parameters())
    ]


def register_zero_gradient_hooks(model: nn.Module) -> None:
    """Give unused parameters of expert modules a gradient of zeros in each backward pass.

    Call it before other forward hooks are registered, because it needs unsharded parameters. The modules are
    found by :func:`find_modules_with_unused_parameters`.
    """
    for module in find_modules_with_unused_parameters(model):
        module.register_forward_hook(_connect_parameters_to_output)


def _connect_parameters_to_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Connect the trained parameters of a module to its output. A forward hook."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: Tensor = _ZeroGradients.apply(output, *trained)  # type: ignore[no-untyped-call, unused-ignore]
    return reached


class _ZeroGradients(torch.autograd.Function):
    """Identity on its first argument. The gradients of the other arguments are zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand(parameter.shape) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *ctx.zeros)
