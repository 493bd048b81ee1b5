"""The product that makes the logits, and its gradient without the logits of other devices.

The head's matrix is gathered, since a shard of it would need the activations of all tokens. Its gradient is a
sum over the tokens of all devices, of which a device keeps its rows. The compiler adds up pieces while it
multiplies only where nothing stands between the product and its sharding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable.tpu.xla.layout import another, marked
from portable.tpu.xla.of_torch_xla import xla
from portable.tpu.xla.sharding import turned

if TYPE_CHECKING:
    from torch import Tensor

    from portable.tpu.xla.layout import Layout, Spec


def shard_gradient(head: nn.Module | None, layout: Layout, spec: Spec) -> bool:
    """Give ``head`` a forward whose gradient is reduced to shards of its matrix; whether that is possible.

    Args:
        head: a model's output embeddings.
        layout: of the mesh.
        spec: of the head's matrix ``[vocabulary, hidden size]``.
    """
    if type(head) is not nn.Linear or layout.devices == 1:
        return False
    whole = layout.sharding(layout.replicated(2))
    scattered = set(spec) != {None}
    turn = scattered and (spec[1] is None or turned(head.weight.shape[1] // layout.group, layout.group))
    cut = layout.sharding(spec[::-1] if turn else spec)

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        if hidden.dim() != 3 or hidden.shape[0] % layout.rows:
            return nn.functional.linear(hidden, marked(weight, whole), bias)
        function: Any = _Head
        logits: Tensor = function.apply(hidden, weight, whole, cut, turn)
        return logits if bias is None else logits + bias

    module: Any = head
    module.forward = forward
    return True


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, whole: Any, cut: Any, turn: bool) -> Tensor:
        gathered = marked(weight, whole)
        ctx.save_for_backward(hidden, gathered)
        ctx.cut, ctx.turn = cut, turn
        return hidden @ gathered.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        hidden, gathered = ctx.saved_tensors
        # One after the other. The second may be a loop, which copies operands that are read after it: the
        # gradients of the logits would exist twice.
        of_hidden, gradient = gradient @ gathered, another(gradient)
        xla.barrier_([of_hidden, gradient])
        # Not of flattened tensors: the compiler copies gradients of logits to flatten them, where the
        # vocabulary is no multiple of 128.
        if ctx.turn:
            of_weight = marked(torch.einsum("bth,btv->hv", hidden, gradient), ctx.cut)
        else:
            of_weight = marked(torch.einsum("btv,bth->vh", gradient, hidden), ctx.cut)
        # The layers wait for it. The compiler might put it off, and keep the gradients of all logits for it.
        xla.barrier_([of_hidden, of_weight])
        return of_hidden, of_weight.t() if ctx.turn else of_weight, None, None, None
