"""Calls of functions that read the parameters of a module, with other tensors instead of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


class FunctionalCaller(nn.Module):
    """Wrapper of a module for ``torch.func.functional_call``. Its forward calls any function.

    The function may call parts of the wrapped module. The hooks of the wrapped module itself are not called,
    unless the function calls the module.

    Args:
        module: Module whose tensors can be replaced during the call, with the names ``module.<name>``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` without arguments and return its result."""
        return function()
