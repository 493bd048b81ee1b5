"""Code of the user's that reads sharded parameters, where a part would be taken for the whole."""

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

_IN_FORWARD = "compute it in the forward pass (model.function), or use strategy no_shard"


def is_shard(value: Any) -> bool:
    """Whether ``value`` is a DTensor of which this rank has only a part."""
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


class ShardReadGuard(TorchFunctionMode):
    """Within this context, raise UserError in place of results that are those of a shard.

    Outside of the forward pass FSDP2's parameters are DTensors, which can be computed with, but a value that
    is read is this rank's. ZeRO-3's are empty.

    Args:
        key: begins the message.
        in_loss: whether results are part of the loss, which DTensors cannot be.
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
            raise self._build_error("call full_tensor() first, on all ranks")
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, nn.Parameter) and not value.numel() for value in tensors) and isinstance(
            result, torch.Tensor
        ):
            gathered = "read it within deepspeed.zero.GatheredParameters, on all ranks"
            raise self._build_error(_IN_FORWARD if self._in_loss else gathered)
        return result

    def _build_error(self, remedy: str) -> UserError:
        return UserError(
            f"{self._key}: reads a parameter outside of the model's forward pass, when each rank has only a "
            f"shard of it; {remedy}"
        )
