"""Call functions that read a module's parameters, with the parameters replaced by other tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


class FunctionalCaller(nn.Module):
    """Module wrapper that lets ``torch.func.functional_call`` run any function.

    ``functional_call`` can only call a module. This module's forward method calls the function that
    it receives as its argument. The function may call parts of the wrapped module. The hooks of the
    wrapped module itself only run if the function calls the module.

    Args:
        module: Module whose tensors can be replaced during the call, under the names
            ``module.<name>``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` without arguments and return its result."""
        return function()
