"""Recompute layers in the backward pass on XLA (activation checkpointing).

The compiler would undo torch's checkpointing: it would merge the recomputation with the forward
pass and keep the activations. Optimization barriers prevent this. The barriers also delay the
recomputation until the gradient of the layer's output is available, and make the compiler gather
sharded weights again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from portable.private.torch_internals import tree_flatten, tree_unflatten
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn


def enable_layer_recompute(layer: nn.Module) -> None:
    """Enable activation checkpointing for a layer.

    The forward pass of the layer then saves only its inputs. The backward pass recomputes the rest,
    with the same dropout masks. An XLA optimization barrier prevents the compiler from merging the
    recomputation with the forward pass. While gradients are disabled, the layer runs as before. The
    layer's arguments and result may be nested containers of tensors.

    Args:
        layer: Layer to modify. Its ``forward`` is replaced.
    """
    forward = layer.forward

    @functools.wraps(forward)
    def forward_with_recompute(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        # Keep the constants without the tensors, because a tensor that outlives the step would become a
        # result of the graph.
        constants, tensors = _split_tensors_from_leaves(leaves)
        returned: Any = None

        def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal returned
            args, kwargs = tree_unflatten(_merge_tensors_into_leaves(constants, tensors), structure)
            results, structure_out = tree_flatten(forward(*args, **kwargs))
            others, outputs = _split_tensors_from_leaves(results)
            returned = others, structure_out
            return tuple(outputs)

        # Autograd only sees the inputs of the Function. If all parameters before the layer are frozen, no
        # input needs a gradient, so pass an additional tensor that does.
        has_trained_parameters = any(parameter.requires_grad for parameter in layer.parameters())
        anchor = torch.empty(0, requires_grad=has_trained_parameters)
        outputs: Any = _RecomputeFunction.apply(compute, layer, anchor, *tensors)  # type: ignore[no-untyped-call, unused-ignore]
        others, structure_out = returned
        return tree_unflatten(_merge_tensors_into_leaves(others, outputs), structure_out)

    layer.forward = forward_with_recompute


_TENSOR_PLACEHOLDER = object()


def _split_tensors_from_leaves(leaves: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Separate the tensors from the other leaves of a pytree.

    Returns:
        The leaves, with a placeholder for each tensor, and the tensors in the order of the leaves.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [_TENSOR_PLACEHOLDER if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tensors


def _merge_tensors_into_leaves(others: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Return ``others`` with each placeholder replaced by the next tensor.

    This is the inverse of :func:`_split_tensors_from_leaves`.

    Args:
        others: Leaves of a pytree, with a placeholder for each tensor.
        tensors: One tensor per placeholder, in the order of the leaves.
    """
    remaining_tensors = iter(tensors)
    return [next(remaining_tensors) if leaf is _TENSOR_PLACEHOLDER else leaf for leaf in others]


class _RecomputeFunction(torch.autograd.Function):
    """Autograd function that saves its inputs, and recomputes its outputs in the backward pass.

    The recomputation uses the random seed of the forward pass, so dropout masks are the same. It
    follows an optimization barrier on the saved inputs, the output gradients and the layer's
    parameters and buffers. The unnamed third argument is an empty tensor. If it requires a
    gradient, autograd calls the backward pass even if no input requires a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., tuple[Tensor, ...]], layer: nn.Module, _: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.compute, ctx.layer = compute, layer
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.seed = xla.rng_seed(_DEVICE)
        return compute(*inputs)  # autograd records nothing inside of a Function

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        inputs = [tensor.detach() for tensor in ctx.saved_tensors]
        present_gradients = [gradient for gradient in gradients if gradient is not None]
        weights = [*ctx.layer.parameters(), *ctx.layer.buffers()]
        # The barrier changes the lazy values in place, so the saved inputs also depend on it from now on.
        xla.barrier_([*inputs, *present_gradients, *weights])
        for tensor, saved in zip(inputs, ctx.saved_tensors, strict=True):
            tensor.requires_grad_(saved.requires_grad)
        current_seed = xla.rng_seed(_DEVICE)
        xla.set_rng_seed(ctx.seed, _DEVICE)  # use the same dropout masks as the first time
        with torch.enable_grad():
            outputs = ctx.compute(*inputs)
        xla.set_rng_seed(current_seed, _DEVICE)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, None, *(tensor.grad for tensor in inputs)


_DEVICE = "xla:0"
