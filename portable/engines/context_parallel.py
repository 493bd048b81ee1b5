"""Context parallelism (``context_parallel_size``): attention over sequences that are split over ranks.

Each rank holds a part of each sequence. Before the attention of every layer, an all-to-all trades
sequence parts for heads, so that each rank attends over complete sequences with its share of the
heads. A second all-to-all reverses this. All other operations process each token independently.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portable.model.auxiliary_losses import ROUTER_LOSS_FUNCTION
from portable.model.context_parallel_support import repeat_key_heads
from portable.model.document_attention import register_document_sdpa
from portable.private.transformers_internals import (
    get_attention_functions,
    get_attention_kernel,
    get_mask_functions,
    get_module_namespace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from torch import Tensor, nn

    from portable.config import RunConfig


class _ContextParallelState:
    """Context-parallel group of this process. The patched functions of transformers read it."""

    group: Any = None
    """Context-parallel process group of this rank. None if this rank has complete sequences."""


@contextmanager
def use_context_parallel_group(group: Any) -> Iterator[None]:
    """Use a context-parallel group within this context.

    Args:
        group: Process group of the ranks that share each sequence. None if every rank has complete
            sequences.
    """
    previous_group, _ContextParallelState.group = _ContextParallelState.group, group
    try:
        yield
    finally:
        _ContextParallelState.group = previous_group


def enable_context_parallelism(model: Any, config: RunConfig, at_stop: ExitStack) -> None:
    """Adapt the attention of a model to sequences that are split over context-parallel ranks.

    Replaces the attention, mask and router loss functions of transformers in this process. Each group
    consists of ``config.context_parallel_size`` consecutive ranks. Must be called on all ranks, because
    it creates process groups.

    Args:
        model: Transformers model that has passed
            :func:`portable.model.context_parallel_support.check_context_parallel_support`. Its
            ``generate`` method is replaced.
        config: Config of the run.
        at_stop: Exit stack that restores the replaced functions of transformers when it is closed.
    """
    at_stop.enter_context(use_context_parallel_group(dist.new_subgroups(config.context_parallel_size)[0]))
    model.generate = use_context_parallel_group(None)(model.generate)  # every rank has the complete prompt
    register_document_sdpa()  # before the wrapping, so that the exchanges are around it
    kernel = get_attention_kernel(model.config)
    for functions, name, wrap_function in (
        (get_attention_functions(), kernel, _wrap_attention_function),
        (get_mask_functions(), kernel, _wrap_mask_function),
        (get_module_namespace(model), ROUTER_LOSS_FUNCTION, _wrap_router_loss),
    ):
        if name in functions:
            original_function = functions[name]
            functions[name] = wrap_function(original_function)
            at_stop.callback(functions.__setitem__, name, original_function)


class _AllToAll(torch.autograd.Function):
    """Autograd function for an all-to-all that splits one dim over the ranks and concatenates another.

    Its backward pass is the reverse all-to-all.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
        ctx.backward_of = group, concat_dim, split_dim
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), split_dim))
        received = torch.empty_like(sent)
        # The functional collective does not work here, because torch_xla replaces it when it is imported.
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = _AllToAll.apply(gradients[0], *ctx.backward_of)
        return gradient, None, None, None


class _HeadShardedLayer:
    """Proxy for an attention layer that overrides the number of query heads per key head.

    The attention functions of transformers read this number from the layer to repeat the keys.

    Args:
        layer: Attention layer that provides all other attributes.
        groups: Number of query heads per key head on this rank.
    """

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _wrap_attention_function(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of transformers with an all-to-all before and after it.

    Without a context-parallel group, the wrapper only calls the function. ``torch.compile`` does not
    trace the wrapper.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        if (group := _ContextParallelState.group) is None:
            return inner(module, query, key, value, attention_mask, **keywords)
        key, value = (repeat_key_heads(dist.get_world_size(group), tensor) for tensor in (key, value))
        query, key, value = (_AllToAll.apply(tensor, group, 1, 2) for tensor in (query, key, value))
        # Pass the positions of this rank's part, because a kernel infers documents from them.
        keywords.pop("position_ids", None)
        layer = _HeadShardedLayer(module, query.shape[1] // key.shape[1])
        # The masks that the attention builds are for complete sequences already, so do not extend them.
        with use_context_parallel_group(None):
            output = inner(layer, query, key, value, attention_mask, **keywords)[0]
        return _AllToAll.apply(output, group, 1, 2), None

    # Shapes differ before and after an exchange, and the compiler would treat them as dynamic shapes.
    uncompiled: Callable[..., Any] = torch.compiler.disable(attend)
    return uncompiled


def _wrap_mask_function(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of transformers so that it builds masks for complete sequences.

    The model computes the query and key lengths from this rank's part of the sequences, so the wrapper
    multiplies them by the number of ranks in the group. Without a context-parallel group, the wrapper
    only calls the function.
    """

    def build_mask(*, q_length: int, kv_length: int, **keywords: Any) -> Any:
        parts = 1
        # Drop the mask of ones that some models pass, because batches have no padding.
        if _ContextParallelState.group is not None:
            parts, keywords["attention_mask"] = dist.get_world_size(_ContextParallelState.group), None
        return inner(q_length=q_length * parts, kv_length=kv_length * parts, **keywords)

    return build_mask


def _wrap_router_loss(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the router loss function of a model so that it computes the loss over complete sequences.

    The router logits are gathered from all ranks of the group. The loss is divided by the number of
    ranks, so that its sum over the ranks is correct.
    """

    def compute_loss(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        if (group := _ContextParallelState.group) is None:
            return inner(gate_logits, num_experts, top_k, attention_mask)
        parts = dist.get_world_size(group)
        gathered = [
            _AllToAll.apply(logits.expand(parts, *logits.shape), group, 0, 1)[0] for logits in gate_logits
        ]
        if attention_mask is not None:
            # The mask is for complete sequences, and the logits are ordered by part, then by sequence.
            by_part = attention_mask.unflatten(1, (parts, -1)).transpose(0, 1)
            attention_mask = by_part.flatten(0, 1)
        return inner(tuple(gathered), num_experts, top_k, attention_mask) / parts

    return compute_loss
