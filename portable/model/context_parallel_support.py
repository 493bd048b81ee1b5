"""Check whether context parallelism can divide the sequences and attention heads of a model."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.errors import require
from portable.model.auxiliary_losses import ROUTER_LOSS_FUNCTION
from portable.model.document_attention import MASK_READING_TYPES, check_document_separation
from portable.private.transformers_internals import get_attention_kernel, get_module_namespace

if TYPE_CHECKING:
    from torch import Tensor

    from portable.config import RunConfig

KEY = "context_parallel_size"


def check_context_parallel_support(model: Any, config: RunConfig) -> None:
    """Check that a model's sequences can be divided among context-parallel ranks or devices.

    The number of attention heads must be divisible by ``context_parallel_size``. The number of
    key-value heads must be a multiple or a divisor of this size. On XLA, this rule applies only to
    ``sdpa`` attention, and nothing else is checked.

    Args:
        model: The model, on the meta device.
        config: The config of the run.

    Raises:
        UserError: If the model's attention or router loss is not supported, if packed documents
            might influence each other (even if the run does not pack documents), or if the numbers
            of heads violate the rule.
    """
    size = config.context_parallel_size
    if config.backend != "xla":
        _check_attention_support(model, config)
    if config.backend != "xla" or get_attention_kernel(model.config) == "sdpa":
        # On XLA, other attention needs no check, because the compiler can divide any number of heads.
        heads, key_heads = count_attention_heads(model)
        require(
            heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0),
            f"{KEY}: the attention heads ({heads}) and key-value heads ({key_heads}) cannot be divided "
            f"evenly among {size} ranks; set {KEY} to a divisor of {heads} that is a divisor or a multiple "
            f"of {key_heads}",
        )


def _check_attention_support(model: Any, config: RunConfig) -> None:
    """Check that the attention of ``model`` can be divided among context-parallel ranks.

    The config must not have a separate text config, as in multimodal models. The model type must
    not be in :data:`MASK_READING_TYPES`, and the attention kernel must be ``sdpa`` or flash
    attention. A router loss is supported only if ``data.packing`` is not false, and only if
    :func:`_has_mixtral_signature` accepts its function. The model must also pass
    :func:`check_document_separation`.

    Raises:
        UserError: If one of these conditions is not met.
    """
    text = model.config.get_text_config()
    name, kernel = type(model).__name__, get_attention_kernel(text)
    require(
        text is model.config and text.model_type not in MASK_READING_TYPES,
        f"{KEY}: the attention of {name} cannot be divided among context-parallel ranks; set {KEY} to 1",
    )
    require(
        kernel == "sdpa" or "flash" in kernel,
        f"{KEY}: works only with sdpa and flash attention, but {name} uses {kernel}; set {KEY} to 1",
    )
    has_router_loss = getattr(text, "output_router_logits", False)
    require(
        # With padding, a rank would need the complete sample, because it cannot find the padding in its part.
        not has_router_loss or bool(config.data.packing),
        f"{KEY}: the router loss of {name} needs samples without padding; set data.packing to true or "
        "documents, or set model.config.output_router_logits to false",
    )
    require(
        not has_router_loss or _has_mixtral_signature(get_module_namespace(model).get(ROUTER_LOSS_FUNCTION)),
        f"{KEY}: the router loss of {name} needs complete sequences; set model.config.output_router_logits "
        "to false",
    )
    check_document_separation(model, KEY, seq_len=config.data.seq_len, separates_states=False)


def _has_mixtral_signature(router_loss: Any) -> bool:
    """Return whether a router loss function has the same parameter names as Mixtral's.

    A function with these parameters takes the gate logits of every layer. Each context-parallel
    rank computes these logits for its part of the sequences, and the ranks gather them before the
    call. Returns False if ``router_loss`` is None.
    """
    names = ["gate_logits", "num_experts", "top_k", "attention_mask"]
    return router_loss is not None and [*inspect.signature(inspect.unwrap(router_loss)).parameters] == names


def repeat_key_heads(num_ranks: int, key_states: Tensor) -> Tensor:
    """Repeat key or value heads so that each context-parallel rank gets at least one head.

    Args:
        num_ranks: Number of context-parallel ranks, a multiple or a divisor of the number of heads.
        key_states: Keys or values, ``[batch, heads, ...]``.

    Returns:
        A tensor with ``num_ranks`` heads, or ``key_states`` itself if its number of heads is already
        divisible by ``num_ranks``.
    """
    heads = key_states.shape[1]
    return key_states.repeat_interleave(num_ranks // heads, 1) if heads % num_ranks else key_states


class AttentionHeadCounts(NamedTuple):
    """Numbers of query heads and key heads in an attention layer.

    The number of value heads is equal to the number of key heads.
    """

    queries: int
    keys: int


def count_attention_heads(model: Any) -> AttentionHeadCounts:
    """Read the numbers of query heads and key heads from the text config of a model.

    Without grouped-query attention, the two numbers are equal.
    """
    text = model.config.get_text_config()
    heads: int = text.num_attention_heads
    return AttentionHeadCounts(heads, getattr(text, "num_key_value_heads", None) or heads)
