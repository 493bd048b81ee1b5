"""Attention over sequences that several ranks share: ``context_parallel_size``.

A rank has a part of the tokens of each sequence. Around the attention of every layer it exchanges them for
heads, so it attends over whole sequences with its share of the heads. All else works on each token by itself.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from portable.model.document_attention import let_sdpa_take_documents
from portable.model.shareable import check
from portable.private.of_transformers import (
    attention_functions,
    attention_kernel,
    mask_functions,
    router_loss_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from torch import Tensor, nn

    from portable.config import RunConfig
    from portable.engines.machine import Machine


class SharedSequences:
    """The ranks that share each sequence with this one.

    Args:
        group: of these ranks; None where every rank has whole sequences.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @property
    def parts(self) -> int:
        """The number of ranks that share a sequence, here and now."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within this context every rank has whole sequences, such as a prompt."""
        group, self._group = self._group, None
        try:
            yield
        finally:
            self._group = group

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of ``tensor``, which is overwritten, over these ranks."""
        dist.all_reduce(tensor, group=self._group)
        return tensor.div_(self.parts)

    def exchange(self, tensor: Tensor) -> Tensor:
        """``[batch, n, part of m, width]`` to ``[batch, part of n, m, width]``, or back."""
        exchanged: Tensor = _Exchange.apply(tensor, self._group, 1, 2)
        return exchanged


def share_sequences(model: Any, config: RunConfig, machine: Machine, at_stop: ExitStack) -> SharedSequences:
    """Have ``config.context_parallel_size`` ranks in a row share each sequence of ``model``. Collective.

    Args:
        model: a transformers model, on the meta device.
        at_stop: puts back what is replaced in transformers.

    Raises:
        UserError: if its attention cannot be divided.
    """
    size = config.context_parallel_size
    if size == 1:
        return SharedSequences()
    check(model, size, padded=not config.data.packing)
    groups = [dist.new_group(list(range(at, at + size))) for at in range(0, machine.world_size, size)]
    sequences = SharedSequences(groups[machine.rank // size])
    let_sdpa_take_documents()  # within the exchange
    kernel = attention_kernel(model.config)
    for functions, wrapped in ((attention_functions(), _over_heads), (mask_functions(), _of_whole)):
        before = functions[kernel]
        functions[kernel] = wrapped(before, sequences)
        at_stop.callback(functions.__setitem__, kernel, before)
    if (place := router_loss_of(model)) is not None:
        before = getattr(*place)
        setattr(*place, _of_all_tokens(before, sequences))
        at_stop.callback(setattr, *place, before)
    return sequences


class _Exchange(torch.autograd.Function):
    """Cut dimension ``cut`` over the ranks of a group, and join their parts of dimension ``joined``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, cut: int, joined: int) -> Tensor:
        ctx.backward_of = group, joined, cut
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
        received = torch.empty_like(sent)
        # Not the functional collective, which torch_xla replaces as soon as it is imported.
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = _Exchange.apply(gradients[0], *ctx.backward_of)
        return gradient, None, None, None


class _Layer:
    """Stands for an attention layer of which each rank has a share of the heads."""

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _over_heads(inner: Callable[..., Any], sequences: SharedSequences) -> Callable[..., Any]:
    """Attention with the exchanges before and after it."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> tuple[Tensor, None]:
        parts = sequences.parts
        if parts == 1:
            whole: tuple[Tensor, None] = inner(module, query, key, value, attention_mask, **keywords)
            return whole
        if key.shape[1] % parts:  # each rank needs a head of keys
            times = parts // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        query, key, value = (sequences.exchange(tensor) for tensor in (query, key, value))
        keywords.pop("position_ids", None)  # of this rank's part, in which a kernel would look for documents
        layer = _Layer(module, query.shape[1] // key.shape[1])
        with sequences.whole():  # masks that are made within the attention are of whole sequences already
            found = inner(layer, query, key, value, attention_mask, **keywords)[0]
        return sequences.exchange(found), None

    # The compiler would take shapes that differ around an exchange for dynamic ones.
    uncompiled: Callable[..., Any] = torch.compiler.disable(attention)
    return uncompiled


def _of_all_tokens(inner: Callable[..., Any], sequences: SharedSequences) -> Callable[..., Any]:
    """This rank's share of the router loss of whole sequences: the shares of all ranks add up to it.

    The loss is a product, for each expert, of its share of the tokens and of its mean probability. The first
    has no gradient and is that of all ranks; the second is this rank's.
    """

    @functools.wraps(inner)
    def loss(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        parts = sequences.parts
        if parts == 1:
            return inner(gate_logits, num_experts, top_k, attention_mask)
        with _CountsOfAll(sequences):  # batches have no padding
            return inner(gate_logits, num_experts, top_k, None) / parts

    return loss


class _CountsOfAll(TorchFunctionMode):
    """Within this context, ``torch.histc`` gives the mean over the ranks that share a sequence."""

    def __init__(self, sequences: SharedSequences) -> None:
        super().__init__()
        self._sequences = sequences

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return self._sequences.mean(found.float()) if func is torch.histc else found


def _of_whole(inner: Callable[..., Any], sequences: SharedSequences) -> Callable[..., Any]:
    """Masks of whole sequences, where transformers asks for those of a part."""

    def mask(*, q_length: int, kv_length: int, **given: Any) -> Any:
        parts = sequences.parts
        if parts > 1:  # batches have no padding: some models make a mask of ones, as long as their part
            given["attention_mask"] = None
        return inner(q_length=q_length * parts, kv_length=kv_length * parts, **given)

    return mask
