"""Calls of functions that read the tensors of a module, with other tensors substituted for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


class FunctionalCaller(nn.Module):
    """Module around another module for ``torch.func.functional_call``, whose forward calls any function.

    No hooks of the inner module are called.

    Args:
        module: Module whose tensors can be replaced during the call, with the names ``module.<name>``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` without arguments and return its result."""
        return function()
