"""Calls of functions that read a module's tensors, with other tensors in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


class FunctionalCaller(nn.Module):
    """A module around another, for ``torch.func.functional_call``: it calls any function, and no hooks.

    Args:
        module: whose tensors are replaced during the call, as ``module.<name>``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()
