"""Zero gradients for experts that no token has chosen in a forward pass.

If no token on a rank chooses an expert, the expert's gradient is missing on this rank but not on
others. Ranks that reduce gradients during the backward pass would then disagree on which tensors to
send. Most models that keep all experts in one tensor do not have this problem, because autograd
computes zeros for unused experts. The exception is a pass in which all tokens choose experts
without parameters.

This module adds zero gradients wherever they would be missing, even if there is only one rank. An
optimizer treats a zero gradient and a missing gradient differently, and results must not depend on
the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def find_modules_with_unused_parameters(model: nn.Module) -> list[nn.Module]:
    """Find the modules whose forward pass may leave some of their parameters unused.

    There are two kinds:

    - ModuleLists and ModuleDicts with a custom ``forward``, which may call only some of their modules.
    - Modules with all experts in one tensor that also have experts without parameters, which return
      their input (LongCat Flash).
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
    """Find the modules that have all experts in one tensor, and whose submodules have no parameters.

    ZeRO-3 has to treat such a module as one unit. Its submodules, such as activation functions, may run
    once per chosen expert, and therefore in a different order on each rank.
    """
    return [
        module
        for module in model.modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
        and next(module.children(), None) is not None
        and not any(True for child in module.children() for _ in child.parameters())
    ]


def register_zero_gradient_hooks(model: nn.Module) -> None:
    """Register hooks that give unused parameters of expert modules a zero gradient in each backward pass.

    Must be called before other forward hooks are registered: these hooks need unsharded parameters and
    have to run first. For the modules, see :func:`find_modules_with_unused_parameters`.

    Args:
        model: The transformers model. Forward hooks are added to its modules.
    """
    for module in find_modules_with_unused_parameters(model):
        module.register_forward_hook(_connect_parameters_to_output)


def _connect_parameters_to_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Connect a module's trained parameters to its output in the autograd graph. This is a forward hook.

    The value of the output does not change.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: Tensor = _ZeroGradients.apply(output, *trained)  # type: ignore[no-untyped-call, unused-ignore]
    return reached


class _ZeroGradients(torch.autograd.Function):
    """Autograd function that returns its first argument, and zero gradients for all others."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand(parameter.shape) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *ctx.zeros)
