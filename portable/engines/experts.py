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


def find_routed_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward may leave out parameters.

    ModuleLists and ModuleDicts with a forward of their own, which calls only some of their modules; and
    experts in one tensor, beside others that return what they get (LongCat Flash).
    """
    plain = (nn.ModuleList.forward, nn.ModuleDict.forward)
    passing = [m for m in find_expert_modules(model) if any(type(c) is nn.Identity for c in m.children())]
    return passing + [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward not in plain
    ]


def find_expert_modules(model: nn.Module) -> list[nn.Module]:
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


def zero_missing_gradients(model: nn.Module) -> None:
    """Give unused parameters of :func:`find_routed_modules` modules a gradient of zeros in each pass.

    Call it before other forward hooks are registered: it needs unsharded parameters.
    """
    for module in find_routed_modules(model):
        module.register_forward_hook(_connect_parameters)


def _connect_parameters(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: Tensor = _Reach.apply(output, *trained)  # type: ignore[no-untyped-call, unused-ignore]
    return reached


class _Reach(torch.autograd.Function):
    """The identity on its first argument; the gradients of the others are zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand(parameter.shape) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *ctx.zeros)
