"""Compute token losses of a language model in chunks, so that the logits of all tokens never exist at once.

The logits would be by far the largest tensor of a step. :class:`ChunkedHead` replaces the output
head and returns the loss or other statistics of each token instead of logits. It computes one chunk
of tokens at a time, and recomputes each chunk in the backward pass to compute the gradients. The
results equal the results of the head followed by the cross-entropy, except that the head's gradient
is summed in fp32 and in a different order.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from portable.batch import IGNORED_LABEL
from portable.errors import require
from portable.model.auxiliary_losses import AuxiliaryLosses
from portable.model.layers import run_trial_forward
from portable.model.parameters import has_peft_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

MAX_CHUNK_LOGITS = 1 << 26
"""Maximum number of logits per chunk with ``memory.loss_chunk_tokens: auto`` (256 MiB in fp32)."""
_MAX_COMPILED_CHUNK_BYTES = 1 << 29
"""Maximum size of a chunk's logits if the loss is compiled, in bytes. It is larger than without
compilation, because the compiled functions do not create fp32 copies of the logits."""


class _ChunkFunctions(NamedTuple):
    """Functions that compute the token statistics and the logits gradient of a chunk of tokens.

    Both may be compiled.

    Attributes:
        compute_statistics: :func:`_compute_chunk_statistics`, for the forward pass.
        compute_logits_gradient: :func:`_compute_logits_gradient`, for the backward pass.
    """

    compute_statistics: Callable[..., Tensor]
    compute_logits_gradient: Callable[..., Tensor]


class OutputWithStatistics(NamedTuple):
    """Result of :meth:`ChunkedHead.forward_with_statistics`.

    Attributes:
        output: Output of the model. Its ``logits`` are None.
        statistics: Statistics of each token, fp32 ``[batch, tokens]``, keyed by name.
    """

    output: Any
    statistics: dict[str, Tensor]


class ChunkedHead(nn.Linear):
    """Output head that can return statistics of each token, such as its loss, instead of its logits.

    It shares the parameters of the head that it replaces, so names, ties and sharding do not
    change.

    Args:
        linear: Output head of the model.
        chunk_tokens: Number of tokens per chunk. If None, the number is chosen so that the
            logits of a chunk have at most :data:`MAX_CHUNK_LOGITS` elements or, after
            :meth:`compile`, at most :data:`_MAX_COMPILED_CHUNK_BYTES` bytes. A chunk has at
            least one token.
    """

    def __init__(self, linear: nn.Linear, chunk_tokens: int | None) -> None:
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias=bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._requested_chunk_tokens = chunk_tokens
        self._chunk_tokens = chunk_tokens or max(1, MAX_CHUNK_LOGITS // linear.out_features)
        self._chunk_functions = _ChunkFunctions(_compute_chunk_statistics, _compute_logits_gradient)
        self._labels: Tensor | None = None
        self._statistic_names: tuple[str, ...] = ()
        self.max_chunks: int | None = None
        """Maximum number of chunks to compute, used for memory measurements. None to compute all chunks."""

    def compile(self, **options: Any) -> None:  # type: ignore[override, unused-ignore]
        """Compile the two functions that process a chunk of tokens.

        One computes the statistics of the tokens in the forward pass, and the other computes the
        gradient of the logits in the backward pass. Compilation fuses the operations on the logits.
        Without it, about a dozen separate operations read or write the logits.

        Args:
            options: Arguments of ``torch.compile``.
        """
        self._chunk_functions = _ChunkFunctions(
            torch.compile(_compute_chunk_statistics, **options),
            torch.compile(_compute_logits_gradient, **options),
        )

    def needs_chunking(self, labels: Tensor) -> bool:
        """Return whether a micro-batch with these labels has more tokens than one chunk.

        If so, the statistics of its tokens must be computed one chunk at a time. The number of
        tokens is compared with the chunk size without compilation, even after :meth:`compile`.
        """
        return labels.numel() > self._chunk_tokens

    def forward_with_statistics(
        self,
        forward: Callable[..., Any],
        inputs: Mapping[str, Any],
        labels: Tensor,
        statistic_names: Sequence[str],
    ) -> OutputWithStatistics:
        """Run a forward pass whose head computes per-token statistics instead of logits.

        Args:
            forward: Forward method of the model that contains this head.
            inputs: Arguments of ``forward``.
            labels: Labels, int64 ``[batch, tokens]``. They are already shifted, so they align with
                the logits. Tokens without a label have :data:`portable.batch.IGNORED_LABEL`.
            statistic_names: Names of the statistics: ``log_probs`` (log-probability of the label, 0
                without a label), ``log_z`` (log-sum-exp of the logits), ``mean_logits`` (mean of
                the logits), ``predictions`` (most likely token), or ``hits`` (1 if the most likely
                token is the label).

        Returns:
            The output of the model, whose ``logits`` are None, and the statistics, fp32 ``[batch,
            tokens]``, keyed by name.
        """
        self._labels, self._statistic_names = labels, tuple(statistic_names)
        try:
            output = forward(**inputs)
        finally:
            self._labels = None
        statistics: Tensor = output.logits  # a model returns the result of its head as logits
        assert statistics.shape == (*labels.shape, len(statistic_names))
        output["logits"] = None
        return OutputWithStatistics(
            output, dict(zip(statistic_names, statistics.unbind(dim=-1), strict=True))
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits or, during :meth:`forward_with_statistics`, the statistics of each token.

        Args:
            hidden: Hidden states, ``[batch, tokens, hidden size]``.

        Returns:
            Logits ``[batch, tokens, vocabulary]``, or statistics, fp32 ``[batch, tokens, statistics]``.
        """
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
            self._compute_chunk_tokens(dtype),
            self.max_chunks,
            dtype,
            self._statistic_names,
            self._chunk_functions,
        )
        return statistics.view(*self._labels.shape, len(self._statistic_names))

    def _compute_chunk_tokens(self, dtype: torch.dtype) -> int:
        """Return the number of tokens per chunk.

        This is the user's setting, if there is one. Otherwise, the logits of a chunk must not
        exceed a limit:

        - If the loss is not compiled, a chunk has at most :data:`MAX_CHUNK_LOGITS` logits.
        - If the loss is compiled, the result is the largest power of two for which the logits fit
          into :data:`_MAX_COMPILED_CHUNK_BYTES`. Powers of two limit the number of different sizes
          that are compiled.

        Args:
            dtype: Dtype of the logits before they are converted to fp32.
        """
        if (
            self._chunk_functions.compute_statistics is _compute_chunk_statistics
            or self._requested_chunk_tokens is not None
        ):
            return self._chunk_tokens
        return 1 << max(1, _MAX_COMPILED_CHUNK_BYTES // dtype.itemsize // self.out_features).bit_length() - 1


def install_chunked_head(model: nn.Module, chunk_tokens: int | Literal["auto"]) -> ChunkedHead | None:
    """Replace the output head of a model with a :class:`ChunkedHead`, which computes losses in chunks.

    The replacement is possible only if the model returns the output of its head as the logits,
    without changing it.

    Args:
        model: Model with an output head, on the meta device. It is modified in place.
        chunk_tokens: Value of ``memory.loss_chunk_tokens``.

    Returns:
        The new head. None if ``chunk_tokens`` is 0, or if it is ``auto`` and the replacement is not
        possible.

    Raises:
        UserError: If ``chunk_tokens`` is positive and the replacement is not possible.
    """
    if chunk_tokens == 0:
        return None
    head: Any = cast("Any", model).get_output_embeddings()
    if has_peft_adapter(model) and hasattr(head, "modules_to_save"):  # peft trains a copy of the head
        head = head.modules_to_save[head.active_adapters[0]]
    can_replace = type(head) is nn.Linear and _returns_head_logits(model)
    require(
        can_replace or chunk_tokens == "auto",
        f"memory.loss_chunk_tokens: the loss of {type(model).__name__} cannot be computed in chunks, "
        "because its logits are not the unchanged output of a linear layer; set memory.loss_chunk_tokens to "
        "auto or 0",
    )
    if not can_replace:
        return None
    chunked = ChunkedHead(head, None if chunk_tokens == "auto" else chunk_tokens)
    _replace_module(model, head, chunked)
    return chunked


def find_chunked_head(model: nn.Module) -> ChunkedHead | None:
    """Return the :class:`ChunkedHead` of a model, or None if the model has none."""
    return next((module for module in model.modules() if isinstance(module, ChunkedHead)), None)


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the module ``old`` by ``new`` in every parent module that contains it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _returns_head_logits(model: nn.Module) -> bool:
    """Return whether a model returns its head's logits unchanged and has no other use for them.

    Another use would be an auxiliary loss that depends on the logits. Only the head of a model
    without such a use can be replaced by a :class:`ChunkedHead`, which returns statistics of each
    token, such as its loss, instead of logits. A trial forward pass determines the result. If the
    trial fails, the result is False.
    """
    # Try bf16 as well, because grouped matrix products of experts run only in bf16 on the meta device.
    for dtype in (None, torch.bfloat16):
        try:
            return _trial_returns_head_logits(model, dtype)
        except Exception:  # the model reads the shape of its logits, or cannot run on the meta device
            continue
    return False


def _trial_returns_head_logits(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Run a trial forward pass, and return whether the model returns its head's output unchanged.

    Returns False if the model changes the logits after the head, or if an auxiliary loss depends on
    the logits.

    Args:
        model: The model, on the meta device. It is not modified.
        dtype: Dtype of the parameters in the trial. None to keep their dtypes.
    """
    recorder = _RecordingHead()

    def prepare_trial(trial: Any) -> None:
        if dtype is not None:
            trial.to(dtype)
        trial.requires_grad_(False)  # the auxiliary loss then has a gradient only if it depends on the logits
        _replace_module(trial, trial.get_output_embeddings(), recorder)
        auxiliary_losses, forward = AuxiliaryLosses(trial), trial.forward

        def forward_with_labels(**inputs: Tensor) -> Any:
            labels = inputs.get("decoder_input_ids", inputs["input_ids"])
            return auxiliary_losses.run_forward(forward, inputs, labels)

        trial.forward = forward_with_labels

    output, auxiliary_loss = run_trial_forward(model, prepare_trial, enable_gradients=True)
    is_logits_used_in_loss = auxiliary_loss is not None and auxiliary_loss.requires_grad
    return len(recorder.outputs) == 1 and output.logits is recorder.outputs[0] and not is_logits_used_in_loss


class _RecordingHead(nn.Module):
    """Output head that records its outputs in a trial forward pass.

    It replaces the real head of a model, and returns one uninitialized logit per token. The
    recorded outputs show whether the model returns the logits of its head unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.outputs.append(hidden.new_empty(*hidden.shape[:-1], 1).requires_grad_())
        return self.outputs[-1]


class _TokenStatistics(torch.autograd.Function):
    """Autograd function that computes token statistics from hidden states in chunks.

    The backward pass recomputes the logits of each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk_tokens: int,
        max_chunks: int | None,
        dtype: torch.dtype,
        statistic_names: Sequence[str],
        chunk_functions: _ChunkFunctions,
    ) -> Tensor:
        """Compute the statistics of each token.

        Args:
            ctx: Autograd context.
            hidden: Hidden states, ``[tokens, hidden size]``.
            weight: Weight of the head, ``[vocabulary, hidden size]``.
            bias: Bias of the head, or None.
            labels: Labels, int64 ``[tokens]``.
            chunk_tokens: Number of tokens per chunk.
            max_chunks: Number of chunks to compute. The results of the remaining tokens are undefined. None
                to compute all chunks.
            dtype: Compute dtype of the matrix products.
            statistic_names: Names of the statistics. See :meth:`ChunkedHead.forward_with_statistics`.
            chunk_functions: Functions that compute a chunk.

        Returns:
            Statistics, fp32 ``[tokens, statistics]``.
        """
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.parts = list(islice(_iter_row_slices(len(labels), chunk_tokens), max_chunks))
        ctx.to_logits = chunk_functions.compute_logits_gradient
        ctx.dtype, ctx.wanted = dtype, statistic_names
        values = hidden.new_empty(len(labels), len(statistic_names), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight, cast_bias = _cast_parameters(weight, bias, dtype)
            for chunk in ctx.parts:
                values[chunk] = chunk_functions.compute_statistics(
                    hidden[chunk], cast_weight, cast_bias, labels[chunk], statistic_names
                )
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight, cast_bias = _cast_parameters(weight, bias, ctx.dtype)
            for chunk in ctx.parts:
                statistic_gradients = dict(zip(ctx.wanted, gradients[0][chunk].split(1, dim=1), strict=True))
                logits_gradient = ctx.to_logits(
                    hidden[chunk], cast_weight, cast_bias, labels[chunk].unsqueeze(1), statistic_gradients
                )
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = logits_gradient @ cast_weight
                if weight_gradient is not None:
                    weight_gradient += logits_gradient.t() @ hidden[chunk].to(ctx.dtype)
                if bias_gradient is not None:
                    bias_gradient += logits_gradient.sum(dim=0, dtype=torch.float32)
        input_gradients = (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
        )
        return (*input_gradients, *(None for _ in ctx.needs_input_grad[len(input_gradients) :]))


def _compute_logits_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistic_gradients: dict[str, Tensor],
) -> Tensor:
    """Compute the gradient of the loss with respect to the logits of a chunk.

    The forward pass has computed statistics from the logits, such as the log-probability of the
    label. This function recomputes the logits, and applies the chain rule to the gradients of the
    statistics.

    Args:
        hidden: Hidden states of the chunk, ``[tokens, hidden size]``.
        weight: Weight of the head, in the compute dtype.
        bias: Bias of the head, or None.
        labels: Labels, ``[tokens, 1]``.
        statistic_gradients: Gradient of the loss with respect to each statistic, ``[tokens, 1]``,
            keyed by the name of the statistic. Only ``log_probs``, ``log_z`` and ``mean_logits``
            are used.

    Returns:
        The gradient, ``[tokens, vocabulary]``, in the dtype of ``weight``.
    """
    gradient = _compute_logits(hidden, weight, bias).softmax(dim=-1)
    log_z_gradient = gradient * statistic_gradients["log_z"] if "log_z" in statistic_gradients else None
    if "log_probs" in statistic_gradients:
        # Use a comparison, because it is fused into the same pass. A scatter would need one more pass.
        if torch.compiler.is_compiling():
            gradient = gradient - (torch.arange(gradient.shape[1], device=gradient.device) == labels).float()
        else:
            gradient.scatter_add_(1, labels.clamp(min=0), gradient.new_full(labels.shape, -1.0))
        gradient.mul_(-statistic_gradients["log_probs"] * (labels != IGNORED_LABEL))
    else:
        gradient.zero_()
    if log_z_gradient is not None:
        gradient.add_(log_z_gradient)
    if "mean_logits" in statistic_gradients:
        gradient.add_(statistic_gradients["mean_logits"] / gradient.shape[1])
    return gradient.to(weight.dtype)


def _compute_chunk_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, statistic_names: Sequence[str]
) -> Tensor:
    """Compute the statistics of each token of a chunk.

    Args:
        hidden: Hidden states of the chunk, ``[tokens, hidden size]``.
        weight: Weight of the head, in the compute dtype.
        bias: Bias of the head, or None.
        labels: Labels, int64 ``[tokens]``.
        statistic_names: Names of the statistics; see :meth:`ChunkedHead.forward_with_statistics`.

    Returns:
        Statistics, fp32 ``[tokens, statistics]``, in the order of ``statistic_names``.
    """
    logits = _compute_logits(hidden, weight, bias)
    columns = [
        -functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
        if name == "log_probs"
        else logits.logsumexp(dim=-1)
        if name == "log_z"
        else logits.argmax(dim=-1) == labels
        if name == "hits"
        else logits.argmax(dim=-1)  # exact in fp32 up to 16 million tokens
        if name == "predictions"
        else logits.mean(dim=-1)
        for name in statistic_names
    ]
    return torch.stack([column.float() for column in columns], dim=1)


def _cast_parameters(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Cast the weight and the bias of the head to the compute dtype. A bias of None stays None."""
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _compute_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute fp32 logits with a matrix product in the dtype of the weight, as under autocast."""
    return functional.linear(hidden.to(weight.dtype), weight, bias).float()


def _iter_row_slices(num_rows: int, rows_per_slice: int) -> Iterator[slice]:
    """Divide rows 0 to ``num_rows`` into consecutive slices of at most ``rows_per_slice`` rows."""
    return (slice(start, start + rows_per_slice) for start in range(0, num_rows, rows_per_slice))
