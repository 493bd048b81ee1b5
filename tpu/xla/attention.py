"""Reduce the memory of attention on TPUs, and support sequences that are split over devices.

torch_xla implements ``scaled_dot_product_attention`` with plain matrix products. The scores and
probabilities of a layer then have the shape ``[batch, heads, tokens, tokens]``. With
``xla.attention_rows``, a loop iterates over chunks of queries instead, and the backward pass
recomputes the scores of each chunk. A chunk attends to all keys of its queries, so each softmax row
is complete and the results are the same.

Causal masks are not materialized for all queries either. They are described by the first and the
last visible key of each query. This also works if attention is limited to a window, a chunk or a
document.

With context parallelism, each device holds all heads for a part of the tokens. Sharding annotations
before and after the attention make the compiler exchange data between the devices. During the
attention, each device then has complete sequences, but only its share of the heads.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from portable.errors import require
from portable.model.context_parallel_support import repeat_key_heads
from portable.model.document_attention import (
    BIDIRECTIONAL_ARGUMENT,
    DOCUMENT_SEPARATING_TYPES,
    MASK_READING_TYPES,
    DocumentMaskFunction,
)
from portable.private import torch_internals
from portable.private.transformers_internals import (
    enable_sdpa_grouped_queries,
    get_attention_kernel,
    get_mask_functions,
)
from portable.tpu.xla.layout import constrain_with_gradient
from portable.tpu.xla.scan import Scan
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from portable.tpu.xla.layout import MeshLayout
    from portable.tpu.xla.scan import Shardings


class _AttentionState:
    """Attention settings of this process, set by :func:`configure_attention` for the latest engine.

    The functions that replace torch's attention and transformers' mask function read these
    settings.

    Attributes:
        query_rows: Number of queries to process at a time. None to process all queries at once.
        uses_spans: Whether mask functions return spans instead of masks. A span is the first and
            the last visible key of a query.
        pads_last: Whether padding is always after the tokens of a sequence.
        layout: Placement of tensors on the devices. None before the first engine.
        scans_by_options: Loops over chunks of queries, each compiled for certain attention options,
            such as the dropout probability. Keyed by these options.
    """

    query_rows: int | None = None
    uses_spans = False
    pads_last = False
    layout: MeshLayout | None = None
    scans_by_options: dict[Hashable, Scan] = {}  # noqa: RUF012 (replaced with the layout, whose shardings they have)


def configure_attention(
    model: Any, query_rows: int | None, layout: MeshLayout, *, pads_last: bool = False
) -> None:
    """Configure how attention is computed in this process.

    The first call replaces ``torch.nn.functional.scaled_dot_product_attention`` and transformers'
    mask function for ``sdpa``. Both replacements apply to all models in the process. Each call
    overwrites the settings of the previous call.

    Args:
        model: Transformers model.
        query_rows: Number of queries to process at a time. None to process all queries at once.
        layout: Placement of tensors on the devices.
        pads_last: Whether padding is always after the tokens of a sequence. In this case, causal
            attention needs no padding mask, because no token attends to later positions.

    Raises:
        UserError: If ``query_rows`` is set, but the model does not use
            ``scaled_dot_product_attention``.
    """
    used = get_attention_kernel(model.config)
    require(
        query_rows is None or used == "sdpa",
        f"xla.attention_rows: needs the attention implementation sdpa, but {model.config.model_type} uses "
        f"{used}; remove xla.attention_rows",
    )
    _AttentionState.query_rows, _AttentionState.layout, _AttentionState.scans_by_options = (
        query_rows,
        layout,
        {},
    )
    # Models of these types pass the mask to the attention unchanged. Other models compute with the mask, so
    # they cannot use spans.
    _AttentionState.uses_spans = (
        query_rows is not None
        and model.config.model_type in DOCUMENT_SEPARATING_TYPES - {*MASK_READING_TYPES}
    )
    _AttentionState.pads_last = pads_last
    _replace_attention_functions()


@cache  # once per process
def _replace_attention_functions() -> None:
    """Replace torch's attention and transformers' mask function in this process.

    The new ``torch.nn.functional.scaled_dot_product_attention`` loops over chunks of queries and
    supports context parallelism. The new mask function for ``sdpa`` can return the first and the
    last visible key of each query instead of a mask. The settings in :class:`_AttentionState`
    control both. This function also sets the environment variable ``TRANSFORMERS_SDPA_FORCE_GQA``,
    unless it is already set. Only the first call has an effect.
    """
    torch_internals.wrap_attention(lambda whole: _wrap_with_head_exchange(_wrap_with_query_chunks(whole)))
    enable_sdpa_grouped_queries()
    functions = get_mask_functions()
    functions["sdpa"] = _wrap_mask_builder(functions["sdpa"])


def _wrap_mask_builder(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a transformers mask function so that it describes causal masks by spans if possible.

    Spans are an int32 tensor ``[batch or 1, 1, tokens, 2]`` with the first and the last visible key
    of each query. The wrapped function returns None for a plain causal mask. It returns spans for a
    causal mask with a further limit, such as a sliding window or the boundaries of documents. In
    both cases, a padding mask is ignored, because padding is then always after the tokens.

    It returns the result of ``make_mask`` if spans are not enabled, or if the device is not an XLA
    device. It also does so for masks that spans might not describe correctly: if padding may be on
    the left, if the numbers of queries and keys differ, if the position of the first query is a
    tensor, or if the mask is bidirectional or is built with ``vmap``.
    """

    def build_mask(
        *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **options: Any
    ) -> Any:
        device = torch.device(options.get("device", "cpu"))
        at_start = q_length == kv_length and isinstance(options.get("q_offset", 0), int)
        padded = options.get("attention_mask") is not None and not _AttentionState.pads_last
        is_custom = BIDIRECTIONAL_ARGUMENT in options or options.get("use_vmap", False)
        lengths = {"q_length": q_length, "kv_length": kv_length}
        if not _AttentionState.uses_spans or device.type != "xla" or not at_start or padded or is_custom:
            return make_mask(**lengths, mask_function=mask_function, **options)
        options["attention_mask"] = None
        if make_mask(**lengths, mask_function=mask_function, **options) is None:  # the mask is plain causal
            return None
        last = torch.arange(q_length, device=device, dtype=torch.int32)[None]
        if isinstance(mask_function, DocumentMaskFunction):
            document_positions = mask_function.positions.int()
            first = (
                last
                - document_positions
                + _find_first_visible_key(mask_function.single_document_mask, document_positions)
            )
        else:
            first = _find_first_visible_key(mask_function, last)
        return torch.stack([first, last.expand_as(first)], -1)[:, None]

    return build_mask


def _find_first_visible_key(mask_function: Callable[..., Any], query_positions: Tensor) -> Tensor:
    """Find the first visible key of each query with binary search.

    A query must see all keys between its first visible key and its own position.

    Args:
        mask_function: Transformers function that returns whether a key is visible to a query.
        query_positions: Query positions, int32 ``[batch or 1, tokens]``.

    Returns:
        Position of each query's first visible key, with the shape of ``query_positions``.
    """
    low, high = torch.zeros_like(query_positions), query_positions
    batch = torch.arange(len(query_positions), device=query_positions.device)[:, None]
    # Use binary search, because the functions of transformers only compare a query with a key.
    for _ in range(query_positions.shape[1].bit_length()):
        middle = (low + high) >> 1
        is_visible = mask_function(batch, torch.zeros_like(batch), query_positions, middle)
        low, high = torch.where(is_visible, low, middle + 1), torch.where(is_visible, middle, high)
    return high


def _expand_spans_to_mask(spans: Tensor, num_keys: int) -> Tensor:
    """Expand spans of keys to a bool mask that is True for visible keys.

    Args:
        spans: First and last visible key of each query, both inclusive, ``[batch or 1, 1, rows,
            2]``.
        num_keys: Number of keys.

    Returns:
        The mask, ``[batch or 1, 1, rows, num_keys]``.
    """
    keys = torch.arange(num_keys, device=spans.device, dtype=torch.int32)
    return (spans[..., :1] <= keys) & (keys <= spans[..., 1:])


def _wrap_with_head_exchange(inner: Any) -> Any:
    """Wrap an attention function for context parallelism.

    Each device initially has all heads for some tokens. Before the attention, the devices exchange
    data so that each device has some heads for all tokens. After the attention, the exchange is
    reversed. Sharding annotations make the compiler insert these exchanges. If a group of devices
    has several sequences, its sequences are processed one after the other.

    The wrapped function calls ``inner`` directly if devices do not share sequences, if the query is
    not 4-D, or if it is not on an XLA device.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        layout = _AttentionState.layout
        if layout is None or layout.sequence == 1 or query.device.type != "xla" or query.dim() != 4:
            result: Tensor = inner(query, key, value, attn_mask, *rest, **options)
            return result
        if len(query) > layout.num_batch_shards and len(query) % layout.num_batch_shards == 0:
            # Process one sequence of each group at a time, because matrix products flatten batch and heads.
            # If both were sharded, the compiler would gather the heads.
            inputs = [query, key, value, attn_mask]
            split_inputs = [
                [tensor] * (len(query) // layout.num_batch_shards)
                if tensor is None or len(tensor) == 1
                else tensor.unflatten(0, (layout.num_batch_shards, -1)).unbind(1)
                for tensor in inputs
            ]
            parts = [attend(*arguments, *rest, **options) for arguments in zip(*split_inputs, strict=True)]
            return torch.stack(parts, 1).flatten(0, 1)
        key, value = (repeat_key_heads(layout.sequence, tensor) for tensor in (key, value))
        by_tokens, by_heads = (
            layout.to_op_sharding(layout.get_heads_spec(whole_sequences=is_whole))
            for is_whole in (False, True)
        )
        query, key, value = (
            constrain_with_gradient(constrain_with_gradient(tensor, by_tokens, by_tokens), by_heads, by_heads)
            for tensor in (query, key, value)
        )
        attended = inner(query, key, value, attn_mask, *rest, **options)
        return constrain_with_gradient(
            constrain_with_gradient(attended, by_heads, by_heads), by_tokens, by_tokens
        )

    return attend


def _wrap_with_query_chunks(kernel: Any) -> Any:
    """Wrap an attention kernel so that it processes chunks of queries in a loop.

    The loop is used if ``xla.attention_rows`` is set to less than the number of queries, and if the
    query is a 4-D tensor on an XLA device. Without ``xla.attention_rows``,
    :func:`_attend_with_trainable_bias` handles a mask that requires a gradient, except in fp32 and
    with the option ``enable_gqa``. All other calls go to the kernel. If the mask consists of spans,
    they are expanded to a bool mask for the kernel.
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        rows, layout = _AttentionState.query_rows, _AttentionState.layout
        supported = query.device.type == "xla" and query.dim() == 4
        # Do not use the short formula in fp32, because the compiler would then write the probabilities, which
        # takes more memory than it saves.
        uses_short_formula = supported and query.dtype != torch.float32 and options.keys() <= {"scale"}
        if uses_short_formula and rows is None and attn_mask is not None and attn_mask.requires_grad:
            return _attend_with_trainable_bias(query, key, value, attn_mask, dropout_p, **options)
        spans = attn_mask if attn_mask is not None and attn_mask.dtype == torch.int32 else None
        if rows is None or layout is None or not supported or query.shape[2] <= rows:
            attn_mask = attn_mask if spans is None else _expand_spans_to_mask(spans, key.shape[2])
            result: Tensor = kernel(query, key, value, attn_mask, dropout_p, is_causal, **options)
            return result
        if is_causal:
            last = torch.arange(query.shape[2], device=query.device, dtype=torch.int32)
            attn_mask = spans = torch.stack([torch.zeros_like(last), last], -1)[None, None]
        batch = layout.to_op_sharding(layout.get_heads_spec(whole_sequences=True))
        stacked, shared = [_split_into_query_chunks(query, rows)], [key, value]
        shardings: list[Shardings] = [(batch, batch)]
        if attn_mask is not None and attn_mask.shape[2] > 1:
            stacked.append(_split_into_query_chunks(attn_mask, rows))
            along = layout.to_op_sharding(layout.get_batch_spec(4))
            shardings.append((along, along) if len(attn_mask) > 1 else None)
        elif attn_mask is not None:
            shared.append(attn_mask)

        has_spans = spans is not None  # do not capture the tensor itself, because it changes

        def attend_chunk(_: Any, slices: Sequence[Tensor], shared: Sequence[Tensor]) -> Any:
            mask = [*slices[1:], *shared[2:], None][0]
            if has_spans and mask is not None:
                mask = _expand_spans_to_mask(mask, shared[0].shape[2])
            return (), (kernel(slices[0], *shared[:2], mask, dropout_p, False, **options),)

        option_key = (dropout_p, has_spans, *options.items())
        loop = _AttentionState.scans_by_options.setdefault(option_key, Scan(attend_chunk, recompute=True))
        _, (chunks,) = loop((), stacked, shared, shardings=shardings)
        # [chunks, batch, heads, rows, width] to [batch, heads, tokens, width]
        return chunks.movedim(0, 2).flatten(2, 3)[:, :, : query.shape[2]]

    return attend


def _attend_with_trainable_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, scale: float | None = None
) -> Tensor:
    """Compute attention with plain matrix products, and with a bias that requires a gradient.

    An optimization barrier follows the addition of the bias to the scores. Without the barrier, the
    compiler would recompute this sum in the backward pass. It would then store the scores without
    the bias in addition to the sum.
    """
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key * root).transpose(-2, -1) + bias
    xla.barrier_([scores])
    shares: Tensor = torch_internals.get_private_aten_operation("safe_softmax")(scores, -1)
    return functional.dropout(shares, dropout) @ value


def _split_into_query_chunks(tensor: Tensor, rows_per_chunk: int) -> Tensor:
    """Split ``[batch, heads, tokens, ...]`` into chunks of queries, and pad the last chunk.

    Returns:
        A tensor ``[chunks, batch, heads, rows, ...]``. It is padded with 0, or with True in a bool
        mask.
    """
    missing = -tensor.shape[2] % rows_per_chunk
    # Let padded rows attend to all keys, because the result and the gradient of a row without keys would be
    # NaN.
    padded = (
        functional.pad(tensor, (0, 0, 0, missing), value=tensor.dtype == torch.bool) if missing else tensor
    )
    return torch.movedim(torch.unflatten(padded, 2, (-1, rows_per_chunk)), 2, 0)
