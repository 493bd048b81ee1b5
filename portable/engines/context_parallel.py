"""Attention over sequences that several ranks share: ``context_parallel_size``.

A rank has a part of the tokens of each sequence. Around the attention of every layer it exchanges them for
heads, so it attends over whole sequences with its share of the heads. All else works on each token by itself.

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
    """How models of this process attend, as the last engine wants it."""

    group: Any = None
    """The ranks that share each sequence with this one; None: it has whole sequences."""


@contextmanager
def use_context_parallel_group(group: Any) -> Iterator[None]:
    """Within this context, the ranks of ``group`` share each sequence; with None, all have whole ones."""
    previous_group, _ContextParallelState.group = _ContextParallelState.group, group
    try:
        yield
    finally:
        _ContextParallelState.group = previous_group


def enable_context_parallelism(model: Any, config: RunConfig, at_stop: ExitStack) -> None:
    """Have ``config.context_parallel_size`` ranks in a row share each sequence of ``model``. Collective.

    Args:
        model: a transformers model, which
        :func:`portable.model.context_parallel_support.check_context_parallel_support` has seen. at_stop: puts
        back what is replaced in transformers.
    """
    at_stop.enter_context(use_context_parallel_group(dist.new_subgroups(config.context_parallel_size)[0]))
    model.generate = use_context_parallel_group(None)(model.generate)  # every rank has the whole prompt
    register_document_sdpa()  # within the exchange
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
    """Cut dimension ``cut`` over the ranks of a group, and join their parts of dimension ``joined``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
        ctx.backward_of = group, concat_dim, split_dim
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), split_dim))
        received = torch.empty_like(sent)
        # Not the functional collective, which torch_xla replaces as soon as it is imported.
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = _AllToAll.apply(gradients[0], *ctx.backward_of)
        return gradient, None, None, None


class _HeadShardedLayer:
    """Stands for an attention layer of which each rank has a share of the heads."""

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _wrap_attention_function(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Attention with the exchanges before and after it."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        if (group := _ContextParallelState.group) is None:
            return inner(module, query, key, value, attention_mask, **keywords)
        key, value = (repeat_key_heads(dist.get_world_size(group), tensor) for tensor in (key, value))
        query, key, value = (_AllToAll.apply(tensor, group, 1, 2) for tensor in (query, key, value))
        keywords.pop("position_ids", None)  # of this rank's part, in which a kernel would look for documents
        layer = _HeadShardedLayer(module, query.shape[1] // key.shape[1])
        with use_context_parallel_group(
            None
        ):  # masks that are made within the attention are of whole sequences already
            output = inner(layer, query, key, value, attention_mask, **keywords)[0]
        return _AllToAll.apply(output, group, 1, 2), None

    # The compiler would take shapes that differ around an exchange for dynamic ones.
    uncompiled: Callable[..., Any] = torch.compiler.disable(attend)
    return uncompiled


def _wrap_mask_function(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Masks of whole sequences, where transformers asks for those of a part."""

    def build_mask(*, q_length: int, kv_length: int, **keywords: Any) -> Any:
        parts = 1
        if (
            _ContextParallelState.group is not None
        ):  # batches have no padding: some models make a mask of ones for a part
            parts, keywords["attention_mask"] = dist.get_world_size(_ContextParallelState.group), None
        return inner(q_length=q_length * parts, kv_length=kv_length * parts, **keywords)

    return build_mask


def _wrap_router_loss(inner: Callable[..., Any]) -> Callable[..., Any]:
    """This rank's share of the router loss, which is of the logits of whole sequences."""

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
