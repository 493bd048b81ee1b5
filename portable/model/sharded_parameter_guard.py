"""Guard against custom code that reads the shard of one rank as if it were the complete parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from portable.errors import UserError
from portable.private.torch_internals import tree_leaves

_READING_FUNCTIONS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
}

_IN_FORWARD = "compute the value in the forward pass (see model.function), or set strategy to no_shard"
_CALL_FULL_TENSOR = "call full_tensor() on the parameter first, on all ranks"


def is_shard(value: Any) -> bool:
    """Return whether ``value`` is a sharded DTensor, so that this rank has only a part of it."""
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


class ShardReadGuard(TorchFunctionMode):
    """Context that raises UserError if custom code reads a sharded parameter.

    The context is used outside of the model's forward pass. There, FSDP2 parameters are DTensors.
    An operation on DTensors returns the result for the complete tensors, so it is an error only if
    ``in_loss`` is True. However, a function that reads a value, such as ``item()``, sees only the
    shard of this rank, so it is always an error. ZeRO-3 parameters are empty outside of the forward
    pass, so every operation that computes a tensor from a parameter is an error.

    Args:
        key: Setting that specifies the custom code, used at the beginning of error messages.
        in_loss: Whether the custom code is a loss. A loss may not use DTensors at all, because it
            is combined with ordinary tensors.
    """

    def __init__(self, key: str, *, in_loss: bool) -> None:
        super().__init__()
        self._key = key
        self._in_loss = in_loss

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if self._in_loss and any(isinstance(value, DTensor) for value in tensors):
            raise self._build_error(_IN_FORWARD)
        if func in _READING_FUNCTIONS and any(map(is_shard, tensors)):
            raise self._build_error(_CALL_FULL_TENSOR)
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, nn.Parameter) and not value.numel() for value in tensors) and isinstance(
            result, torch.Tensor
        ):
            gathered = "read the parameter within deepspeed.zero.GatheredParameters, on all ranks"
            raise self._build_error(_IN_FORWARD if self._in_loss else gathered)
        return result

    def _build_error(self, remedy: str) -> UserError:
        return UserError(
            f"{self._key}: reads a parameter outside of the model's forward pass, when each rank has only "
            f"a shard of the parameter; {remedy}"
        )
