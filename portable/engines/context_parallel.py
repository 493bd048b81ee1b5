"""Context parallelism (``context_parallel_size``): attention over sequences that ranks share.

A rank has a part of the tokens of each sequence. Around the attention of every layer, an all-to-all exchanges
tokens for heads, so that a rank attends over full sequences with its share of the heads. All other operations
work on each token independently.

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
    """Set the context-parallel group within this context.

    Args:
        group: Ranks that share each sequence. None if every rank has complete sequences.
    """
    previous_group, _ContextParallelState.group = _ContextParallelState.group, group
    try:
        yield
    finally:
        _ContextParallelState.group = previous_group


def enable_context_parallelism(model: Any, config: RunConfig, at_stop: ExitStack) -> None:
    """Split each sequence of a model over ``config.context_parallel_size`` consecutive ranks. A collective.

    Args:
        model: Transformers model that has passed
            :func:`portable.model.context_parallel_support.check_context_parallel_support`. Its ``generate``
            method is replaced.
        config: Config of the run.
        at_stop: Exit stack that restores the replaced functions of transformers.
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
    """All-to-all that splits one dim over the ranks of a group and concatenates another dim."""

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
    """Proxy of an attention layer for a rank that has a share of the heads.

    Args:
        layer: Attention layer, whose other attributes the proxy returns.
        groups: Query heads per key head on this rank.
    """

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _wrap_attention_function(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of transformers with the exchanges before and after it."""

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
    """Wrap a mask function of transformers to build masks of complete sequences instead of parts."""

    def build_mask(*, q_length: int, kv_length: int, **keywords: Any) -> Any:
        parts = 1
        # Drop the mask of ones that some models pass, because batches have no padding.
        if _ContextParallelState.group is not None:
            parts, keywords["attention_mask"] = dist.get_world_size(_ContextParallelState.group), None
        return inner(q_length=q_length * parts, kv_length=kv_length * parts, **keywords)

    return build_mask


def _wrap_router_loss(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the router loss of a model to return this rank's share of the loss of complete sequences."""

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
