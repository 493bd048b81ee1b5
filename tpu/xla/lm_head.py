"""Logits and weight gradient of the LM head under SPMD.

The weight is gathered. Otherwise, each device would have only a shard of the weight, and would need
the activations of all tokens.

For the weight gradient, each device multiplies the gradients of its logits by its hidden states. A
reduction then sums these products over all devices, and each device keeps its shard of the sum. The
compiler overlaps the reduction with the product only if the sharding annotation directly follows
the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable.tpu.xla.layout import copy_with_sharding, copy_without_sharding
from portable.tpu.xla.sharding import is_head_gradient_transposed
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from torch import Tensor

    from portable.tpu.xla.layout import MeshLayout, Spec


def shard_head_gradient(head: nn.Module | None, layout: MeshLayout, weight_spec: Spec) -> bool:
    """Replace the forward of the LM head to shard its weight gradient over the devices.

    The new forward gathers the weight. The weight gradients of all devices are summed, and the sum
    is sharded like the weight. The gradient sharding only applies to 3-D hidden states whose batch
    size is divisible by the number of batch shards. For other hidden states, the compiler chooses
    the sharding of the gradient.

    Args:
        head: LM head of a model, or None.
        layout: Placement of tensors on the devices.
        weight_spec: Spec of the head's weight, ``[vocabulary, hidden size]``.

    Returns:
        Whether the forward was replaced. This requires a plain linear layer and several devices.
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
    """Autograd function that multiplies hidden states by the gathered weight of the LM head.

    The arguments of ``apply`` are:

    - ``hidden``: Hidden states, ``[batch, tokens, hidden size]``.
    - ``weight``: Sharded weight, ``[vocabulary, hidden size]``. It is gathered for the product.
    - ``unsharded``: Sharding of the gathered weight.
    - ``gradient_sharding``: Sharding of the weight gradient.
    - ``transposes``: Whether the weight gradient is computed as ``[hidden size, vocabulary]``.
      ``gradient_sharding`` then applies to this shape, and the returned gradient is transposed back.
    """

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
        # Compute one product after the other. The second product may be a loop, which copies its operands if
        # they are read after it, so the gradients of the logits would exist twice.
        hidden_gradient, gradient = gradient @ gathered, copy_without_sharding(gradient)
        xla.barrier_([hidden_gradient, gradient])
        # Do not flatten the tensors: if the vocabulary size is not a multiple of 128, the compiler would copy
        # the gradients of the logits to flatten them.
        if ctx.turn:
            weight_gradient = copy_with_sharding(torch.einsum("bth,btv->hv", hidden, gradient), ctx.cut)
        else:
            weight_gradient = copy_with_sharding(torch.einsum("btv,bth->vh", gradient, hidden), ctx.cut)
        # Make the layers wait for the gradient of the weight. Otherwise the compiler might delay it, and keep
        # the gradients of all logits until then.
        xla.barrier_([hidden_gradient, weight_gradient])
        return hidden_gradient, weight_gradient.t() if ctx.turn else weight_gradient, None, None, None
