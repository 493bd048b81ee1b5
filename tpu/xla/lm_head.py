"""The product that makes the logits, and its gradient without the logits of other devices.

The head's matrix is gathered, since a shard of it would need the activations of all tokens. Its gradient is a
sum over the tokens of all devices, of which a device keeps its rows. The compiler adds up pieces while it
multiplies only where nothing stands between the product and its sharding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable.tpu.xla.layout import copy_unsharded, copy_with_sharding
from portable.tpu.xla.sharding import is_head_gradient_transposed
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from torch import Tensor

    from portable.tpu.xla.layout import MeshLayout, Spec


def shard_head_gradient(head: nn.Module | None, layout: MeshLayout, weight_spec: Spec) -> bool:
    """Give ``head`` a forward whose gradient is reduced to shards of its matrix; whether that is possible.

    Args:
        head: a model's output embeddings.
        layout: of the mesh.
        weight_spec: of the head's matrix ``[vocabulary, hidden size]``.
    """
    if type(head) is not nn.Linear or layout.num_devices == 1:
        return False
    unsharded = layout.to_op_sharding(layout.get_replicated_spec(2))
    is_scattered = set(weight_spec) != {None}
    transposes = is_scattered and (
        weight_spec[1] is None
        or is_head_gradient_transposed(
            head.weight.shape[1] // layout.shard_group_size, layout.shard_group_size
        )
    )
    gradient_sharding = layout.to_op_sharding(weight_spec[::-1] if transposes else weight_spec)

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        if hidden.dim() != 3 or hidden.shape[0] % layout.num_batch_shards:
            return nn.functional.linear(hidden, copy_with_sharding(weight, unsharded), bias)
        function: Any = _HeadFunction
        logits: Tensor = function.apply(hidden, weight, unsharded, gradient_sharding, transposes)
        return logits if bias is None else logits + bias

    module: Any = head
    module.forward = forward
    return True


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, unsharded: Any, gradient_sharding: Any, transposes: bool
    ) -> Tensor:
        gathered = copy_with_sharding(weight, unsharded)
        ctx.save_for_backward(hidden, gathered)
        ctx.cut, ctx.turn = gradient_sharding, transposes
        return hidden @ gathered.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        hidden, gathered = ctx.saved_tensors
        # One after the other. The second may be a loop, which copies operands that are read after it: the
        # gradients of the logits would exist twice.
        hidden_gradient, gradient = gradient @ gathered, copy_unsharded(gradient)
        xla.barrier_([hidden_gradient, gradient])
        # Not of flattened tensors: the compiler copies gradients of logits to flatten them, where the
        # vocabulary is no multiple of 128.
        if ctx.turn:
            weight_gradient = copy_with_sharding(torch.einsum("bth,btv->hv", hidden, gradient), ctx.cut)
        else:
            weight_gradient = copy_with_sharding(torch.einsum("btv,bth->vh", gradient, hidden), ctx.cut)
        # The layers wait for it. The compiler might put it off, and keep the gradients of all logits for it.
        xla.barrier_([hidden_gradient, weight_gradient])
        return hidden_gradient, weight_gradient.t() if ctx.turn else weight_gradient, None, None, None
