"""Token losses of a language model without its logits, by far the largest tensor of a step.

The output head returns each token's loss, or other statistics, in place of its logits. It computes a chunk of
tokens at a time, and recomputes it in the backward pass to get the gradients. The results equal those of the
head followed by the cross-entropy, except for the summation order of the head's gradient, which is
accumulated in fp32.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from portable.batch import IGNORED
from portable.errors import require
from portable.model.auxiliary_losses import AuxiliaryLosses
from portable.model.layers import run_trial_forward
from portable.model.parameters import has_peft_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

LOGITS_HELD = 1 << 26
"""Number of logits per chunk with ``memory.loss_chunk_tokens: auto``; 256 MiB in fp32."""
_BYTES_HELD = 1 << 29
"""Bytes of a chunk's logits where the loss is compiled: it holds them and their gradient, neither in fp32."""


class _ChunkFunctions(NamedTuple):
    """Functions that compute one chunk of tokens, which may be compiled."""

    compute_statistics: Callable[..., Tensor]
    compute_logits_gradient: Callable[..., Tensor]


class MeasuredOutput(NamedTuple):
    """Result of :meth:`ChunkedHead.measure`.

    Attributes:
        output: Output of the model, with None for its logits.
        statistics: Statistics of each token by name, fp32 ``[batch, tokens]``.
    """

    output: Any
    statistics: dict[str, Tensor]


class ChunkedHead(nn.Linear):
    """An output head that can return losses in place of logits.

    Shares the parameters of the head that it replaces, so names, ties and sharding do not change.

    Args:
        linear: the model's own head.
        tokens: tokens per chunk; None for as many as have :data:`LOGITS_HELD` logits.
    """

    def __init__(self, linear: nn.Linear, tokens: int | None) -> None:
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias=bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._given = tokens
        self._tokens = tokens or max(1, LOGITS_HELD // linear.out_features)
        self._functions = _ChunkFunctions(_measure, _to_logits)
        self._labels: Tensor | None = None
        self._names: tuple[str, ...] = ()
        self.most_parts: int | None = None
        """Compute at most this many chunks, to measure memory; None for all."""

    def compile(self, **how: Any) -> None:  # type: ignore[override, unused-ignore]
        """Compile what follows the head's product: two kernels in place of a dozen passes over the logits.

        Args:
            how: Arguments of ``torch.compile``.
        """
        self._functions = _ChunkFunctions(torch.compile(_measure, **how), torch.compile(_to_logits, **how))

    def needs_chunking(self, labels: Tensor) -> bool:
        """Return whether a micro-batch has more than one chunk of tokens."""
        return labels.numel() > self._tokens

    def measure(
        self, forward: Callable[..., Any], inputs: Mapping[str, Any], labels: Tensor, names: Sequence[str]
    ) -> MeasuredOutput:
        """Run a forward pass of the model in which the head computes statistics of each token, not logits.

        Args:
            forward: The forward method of the model that this head belongs to.
            inputs: Arguments of ``forward``.
            labels: Labels, int64 ``[batch, tokens]``.
            names: Names of the statistics. ``log_probs`` are the log-probabilities of the labels, 0 where
                there is no label; ``log_z`` the log-sum-exp of the logits, ``mean_logits`` their mean,
                ``predictions`` the most likely token, and ``hits`` 1 if it is the label.

        Returns:
            The output of the model, with None for its logits, and the statistics by name, fp32
            ``[batch, tokens]``.
        """
        self._labels, self._names = labels, tuple(names)
        try:
            output = forward(**inputs)
        finally:
            self._labels = None
        statistics: Tensor = output.logits  # a model returns there what its head returns
        assert statistics.shape == (*labels.shape, len(names))
        output["logits"] = None
        return MeasuredOutput(output, dict(zip(names, statistics.unbind(dim=-1), strict=True)))

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits or, during :meth:`measure`, the statistics, fp32 ``[batch, tokens, names]``."""
        if self._labels is None:
            return super().forward(hidden)
        statistics: Tensor
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        statistics = _TokenStatistics.apply(  # type: ignore[no-untyped-call, unused-ignore]
            hidden.reshape(-1, hidden.shape[-1]),
            self.weight,
            self.bias,
            self._labels.reshape(-1),
            self._get_chunk_size(dtype),
            self.most_parts,
            dtype,
            self._names,
            self._functions,
        )
        return statistics.view(*self._labels.shape, len(self._names))

    def _get_chunk_size(self, dtype: torch.dtype) -> int:
        """Tokens of a chunk; a power of two where the loss is compiled, so that few have another size."""
        if self._functions.compute_statistics is _measure or self._given is not None:
            return self._tokens
        return 1 << max(1, _BYTES_HELD // dtype.itemsize // self.out_features).bit_length() - 1


def install_chunked_head(model: nn.Module, wanted: int | Literal["auto"]) -> ChunkedHead | None:
    """Replace the head of ``model``, on the meta device, by one that computes losses in chunks.

    Args:
        model: a model with an output head.
        wanted: ``memory.loss_chunk_tokens``.

    Returns:
        the new head; None if ``wanted`` is 0, or is ``auto`` and the model needs its logits.

    Raises:
        UserError: for a number of tokens with a model that does not return its head's logits unchanged.
    """
    if wanted == 0:
        return None
    head: Any = cast("Any", model).get_output_embeddings()
    if has_peft_adapter(model) and hasattr(head, "modules_to_save"):  # a copy is trained in place of the head
        head = head.modules_to_save[head.active_adapters[0]]
    fits = type(head) is nn.Linear and _returns_head_logits(model)
    require(
        fits or wanted == "auto",
        f"memory.loss_chunk_tokens: {type(model).__name__} does not return its head's logits unchanged; set "
        "it to auto or 0",
    )
    if not fits:
        return None
    chunked = ChunkedHead(head, None if wanted == "auto" else wanted)
    _replace(model, head, chunked)
    return chunked


def find_chunked_head(model: nn.Module) -> ChunkedHead | None:
    """Return the head that :func:`install_chunked_head` has put into ``model``, or None."""
    return next((module for module in model.modules() if isinstance(module, ChunkedHead)), None)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _returns_head_logits(model: nn.Module) -> bool:
    """Whether the logits are returned as the head computes them: not scaled, capped or used in a loss."""
    for dtype in (None, torch.bfloat16):  # grouped products of experts run only in bf16 on the meta device
        try:
            return _try_head_logits(model, dtype)
        except Exception:  # the model reads the shape of its logits, or cannot run on the meta device
            continue
    return False


def _try_head_logits(model: nn.Module, dtype: torch.dtype | None) -> bool:
    head = _Recorder()

    def watch(trial: Any) -> None:
        if dtype is not None:
            trial.to(dtype)
        trial.requires_grad_(False)  # the auxiliary loss then has a gradient only if it depends on the logits
        _replace(trial, trial.get_output_embeddings(), head)
        auxiliary_losses, forward = AuxiliaryLosses(trial), trial.forward

        def forward_with_labels(**inputs: Tensor) -> Any:
            labels = inputs.get("decoder_input_ids", inputs["input_ids"])
            return auxiliary_losses.compute(forward, inputs, labels)

        trial.forward = forward_with_labels

    output, auxiliary_loss = run_trial_forward(model, watch, gradients=True)
    used = auxiliary_loss is not None and auxiliary_loss.requires_grad
    return len(head.given) == 1 and output.logits is head.given[0] and not used


class _Recorder(nn.Module):
    """A head with one logit per token that records its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.given.append(hidden.new_empty(*hidden.shape[:-1], 1).requires_grad_())
        return self.given[-1]


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tokens: int,
        most_parts: int | None,
        dtype: torch.dtype,
        wanted: Sequence[str],
        functions: _ChunkFunctions,
    ) -> Tensor:
        """What is wanted of each row of ``hidden``, fp32 ``[tokens, wanted]``."""
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.parts = list(islice(_split_rows(len(labels), tokens), most_parts))
        ctx.to_logits = functions.compute_logits_gradient
        ctx.dtype, ctx.wanted = dtype, wanted
        values = hidden.new_empty(len(labels), len(wanted), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            head, offset = _cast(weight, bias, dtype)
            for part in ctx.parts:
                values[part] = functions.compute_statistics(hidden[part], head, offset, labels[part], wanted)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head, offset = _cast(weight, bias, ctx.dtype)
            for part in ctx.parts:
                to = dict(zip(ctx.wanted, gradients[0][part].split(1, dim=1), strict=True))
                to_logits = ctx.to_logits(hidden[part], head, offset, labels[part].unsqueeze(1), to)
                if to_hidden is not None:
                    to_hidden[part] = to_logits @ head
                if to_weight is not None:
                    to_weight += to_logits.t() @ hidden[part].to(ctx.dtype)
                if to_bias is not None:
                    to_bias += to_logits.sum(dim=0, dtype=torch.float32)
        input_gradients = (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
        )
        return (*input_gradients, *(None for _ in ctx.needs_input_grad[len(input_gradients) :]))


def _to_logits(
    rows: Tensor, head: Tensor, offset: Tensor | None, target: Tensor, to: dict[str, Tensor]
) -> Tensor:
    """The gradient of the logits, in the head's dtype.

    Args:
        target: labels, ``[tokens, 1]``. to: the gradient of what is wanted, each ``[tokens, 1]``.
    """
    share = _compute_logits(rows, head, offset).softmax(dim=-1)
    more = share * to["log_z"] if "log_z" in to else None
    if "log_probs" in to:
        if torch.compiler.is_compiling():  # compared in the same pass; a scatter would be one more
            share = share - (torch.arange(share.shape[1], device=share.device) == target).float()
        else:
            share.scatter_add_(1, target.clamp(min=0), share.new_full(target.shape, -1.0))
        share.mul_(-to["log_probs"] * (target != IGNORED))
    else:
        share.zero_()
    if more is not None:
        share.add_(more)
    if "mean_logits" in to:
        share.add_(to["mean_logits"] / share.shape[1])
    return share.to(head.dtype)


def _measure(
    rows: Tensor, head: Tensor, offset: Tensor | None, labels: Tensor, wanted: Sequence[str]
) -> Tensor:
    """What is wanted of each of the ``rows``, fp32 ``[tokens, wanted]``."""
    logits = _compute_logits(rows, head, offset)
    columns = [
        -functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        if name == "log_probs"
        else logits.logsumexp(dim=-1)
        if name == "log_z"
        else logits.argmax(dim=-1) == labels
        if name == "hits"
        else logits.argmax(dim=-1)  # exact in fp32 up to 16 million tokens
        if name == "predictions"
        else logits.mean(dim=-1)
        for name in wanted
    ]
    return torch.stack([column.float() for column in columns], dim=1)


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _compute_logits(rows: Tensor, head: Tensor, offset: Tensor | None) -> Tensor:
    """Logits in fp32. The product runs in the head's dtype, as under autocast."""
    return functional.linear(rows.to(head.dtype), head, offset).float()


def _split_rows(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
