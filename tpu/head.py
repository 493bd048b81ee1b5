"""The product that makes the logits, and its gradient without the logits of other devices.

The head's matrix is gathered, since a shard of it would need the activations of all tokens. Its gradient is a
sum over the tokens of all devices, of which a device keeps its rows. The compiler adds up pieces while it
multiplies only where nothing stands between the product and its sharding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpu.layout import another, marked
from tpu.runtime import xla

if TYPE_CHECKING:
    from torch import Tensor

    from tpu.layout import Layout, Spec


def shard_gradient(head: nn.Module | None, layout: Layout, spec: Spec) -> bool:
    """Give ``head`` a forward whose gradient is reduced to shards of its matrix; whether that is possible.

    Args:
        head: a model's output embeddings.
        layout: of the mesh.
        spec: of the head's matrix ``[vocabulary, hidden size]``.
    """
    if type(head) is not nn.Linear or layout.devices == 1 or set(spec) == {None}:
        return False
    whole, cut = layout.sharding(layout.replicated(2)), layout.sharding(spec[::-1])
    apart = layout.sharding(layout.batch(2))

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        if hidden.dim() != 3 or hidden.shape[0] % layout.devices:
            return nn.functional.linear(hidden, marked(weight, whole), bias)
        function: Any = _Head
        logits: Tensor = function.apply(hidden, weight, whole, cut, apart)
        return logits if bias is None else logits + bias

    module: Any = head
    module.forward = forward
    return True


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, whole: Any, cut: Any, apart: Any) -> Tensor:
        gathered = marked(weight, whole)
        ctx.save_for_backward(hidden, gathered)
        ctx.cut, ctx.apart = cut, apart
        return hidden @ gathered.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        hidden, gathered = ctx.saved_tensors
        # One after the other. The second may be a loop, which copies operands that are read after it: the
        # gradients of the logits would exist twice.
        of_hidden, gradient = gradient @ gathered, another(gradient)
        xla._xla_optimization_barrier_([of_hidden, gradient])
        tokens, columns = (marked(t.flatten(0, 1), ctx.apart) for t in (hidden, gradient))
        # Transposed: the compiler scatters along a major dim, but not along every minor one.
        of_weight = marked(tokens.t() @ columns, ctx.cut)
        # The layers wait for it. The compiler might put it off, and keep the gradients of all logits for it.
        xla._xla_optimization_barrier_([of_hidden, of_weight])
        return of_hidden, of_weight.t(), None, None, None
