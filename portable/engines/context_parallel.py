"""Context parallelism (``context_parallel_size``): attention over sequences split over ranks.

Each rank stores a part of each sequence. Before the attention of every layer, an all-to-all
exchanges sequence parts for heads, so that each rank attends over complete sequences with
its share of the heads. A second all-to-all reverses this. The router loss is computed from
the gathered router logits of all ranks in the group. All other operations process each
token independently.

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
    """State of context parallelism in this process.

    The patched functions of transformers read this state.
    """

    group: Any = None
    """Context-parallel process group of this rank. None if this rank has complete sequences."""


@contextmanager
def use_context_parallel_group(group: Any) -> Iterator[None]:
    """Set the context-parallel group of this process within a ``with`` block.

    The functions that :func:`enable_context_parallelism` has replaced split attention over this
    group. The previous group is restored at the end of the block. The result also works as a
    decorator.

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

    Replaces functions of transformers in this process: the attention and mask functions of the
    model's attention kernel, and the router loss function in the model's Python module. Creates the
    context-parallel process groups, each of which consists of ``config.context_parallel_size``
    consecutive ranks. Because of these groups, all ranks must call this function.

    Args:
        model: Transformers model that has passed
            :func:`portable.model.context_parallel_support.check_context_parallel_support`. Its
            ``generate`` method is replaced by a method without context parallelism, because every
            rank has the complete prompt.
        config: Config of the run.
        at_stop: Exit stack that restores the replaced functions of transformers when it is closed.
    """
    at_stop.enter_context(use_context_parallel_group(dist.new_subgroups(config.context_parallel_size)[0]))
    # In generation, every rank has the complete prompt.
    model.generate = use_context_parallel_group(None)(model.generate)
    register_document_sdpa()  # must precede the wrapping, so that its attention function is also wrapped
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
        # Do not use the functional collective, because torch_xla replaces it when torch_xla is imported.
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = _AllToAll.apply(gradients[0], *ctx.backward_of)
        return gradient, None, None, None


class _HeadShardedLayer:
    """Proxy for an attention layer that overrides the attribute ``num_key_value_groups``.

    The attribute is the number of query heads per key head. The attention functions of transformers
    read it from the layer, in order to repeat the key heads.

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

    The first all-to-all exchanges sequence parts for heads, so that the function receives complete
    sequences, but only this rank's share of the heads. The second all-to-all reverses the exchange.
    The wrapper drops the argument ``position_ids``, which covers only this rank's part of the
    sequences. It returns None instead of the attention weights.

    Without a context-parallel group, the wrapper only calls the function. ``torch.compile`` does
    not trace the wrapper.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        if (group := _ContextParallelState.group) is None:
            return inner(module, query, key, value, attention_mask, **keywords)
        key, value = (repeat_key_heads(dist.get_world_size(group), tensor) for tensor in (key, value))
        query, key, value = (_AllToAll.apply(tensor, group, 1, 2) for tensor in (query, key, value))
        # Drop the positions, because they cover only this rank's part and a kernel would infer documents from
        # them.
        keywords.pop("position_ids", None)
        layer = _HeadShardedLayer(module, query.shape[1] // key.shape[1])
        # The masks that the attention builds here are already for complete sequences, so they must not be
        # extended.
        with use_context_parallel_group(None):
            output = inner(layer, query, key, value, attention_mask, **keywords)[0]
        return _AllToAll.apply(output, group, 1, 2), None

    # Do not compile it, because shapes change at an exchange and the compiler would treat them as dynamic
    # shapes.
    uncompiled: Callable[..., Any] = torch.compiler.disable(attend)
    return uncompiled


def _wrap_mask_function(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function of transformers so that it builds masks for complete sequences.

    The model computes the query and key lengths from this rank's part of the sequences, so the
    wrapper multiplies them by the number of ranks in the group. It also drops the argument
    ``attention_mask``, which covers only this rank's part. Without a context-parallel group,
    the wrapper only calls the function.
    """

    def build_mask(*, q_length: int, kv_length: int, **keywords: Any) -> Any:
        parts = 1
        # Drop the attention mask that some models pass, because batches have no padding. It covers only this
        # rank's part.
        if _ContextParallelState.group is not None:
            parts, keywords["attention_mask"] = dist.get_world_size(_ContextParallelState.group), None
        return inner(q_length=q_length * parts, kv_length=kv_length * parts, **keywords)

    return build_mask


def _wrap_router_loss(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the router loss function of a model to compute the loss over complete sequences.

    The router logits are gathered from all ranks of the context-parallel group, among which each
    sequence is split. Every rank then computes the complete loss. Because the losses of the ranks
    are summed later, each rank divides its loss by the number of ranks in the group.

    The model passes the logits of this rank's part of the sequences. The argument
    ``attention_mask``, if it is given, must cover the complete sequences. Without a
    context-parallel group, the wrapper only calls the function.
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
            # The mask is for complete sequences, but the logits are ordered by part and then by sequence.
            by_part = attention_mask.unflatten(1, (parts, -1)).transpose(0, 1)
            attention_mask = by_part.flatten(0, 1)
        return inner(tuple(gathered), num_experts, top_k, attention_mask) / parts

    return compute_loss
