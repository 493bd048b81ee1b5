"""Experts that are modules of their own, and that no token of a rank may choose in a pass.

Their gradients are then missing on that rank alone. Ranks that reduce gradients while the backward pass is
under way would not agree on what to send. Most models keep all experts in one tensor, with zeros there. These
have zeros too, on any number of ranks: an optimizer moves what has zeros, and not what has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def routed(model: nn.Module) -> list[nn.Module]:
    """The lists and dictionaries of modules with a forward of their own, which calls some of them only."""
    plain = (nn.ModuleList.forward, nn.ModuleDict.forward)
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward not in plain
    ]


def called_by_choice(model: nn.Module) -> list[nn.Module]:
    """Modules that keep all experts in one tensor, and have modules without parameters inside.

    These may be called once for each expert that a token chose, so in another order on another rank.
    """
    return [
        module
        for module in model.modules()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
        and next(module.children(), None) is not None
        and not any(True for child in module.children() for _ in child.parameters())
    ]


def zero_missing_gradients(model: nn.Module) -> None:
    """Give parameters of :func:`routed` modules a gradient in each pass, of zeros where they took no part.

    Call it before anything else hooks into the forward passes: the parameters have to be whole.
    """
    for module in routed(model):
        module.register_forward_hook(_reach_all)


def _reach_all(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached: Tensor = _Reach.apply(output, *trained)  # type: ignore[no-untyped-call]
    return reached


class _Reach(torch.autograd.Function):
    """The identity of its first argument; the others have zeros as their gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [parameter.new_zeros(()).expand(parameter.shape) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *ctx.zeros)
