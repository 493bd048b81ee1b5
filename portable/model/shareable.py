"""Whether ranks or devices can share the sequences of a model: ``context_parallel_size``."""

from __future__ import annotations

from typing import Any

from portable.errors import require
from portable.model.document_attention import READ_THEIR_MASK, check_documents
from portable.private.of_transformers import attention_kernel, router_loss_of

KEY = "context_parallel_size"


def check(model: Any, size: int, *, padded: bool = False) -> None:
    """Raise UserError if ``size`` ranks cannot share the attention of ``model``.

    Args:
        padded: whether samples have padding, which a router loss must know of, and a part of them does not.
    """
    config = model.config
    text = config.get_text_config()
    name, kernel = type(model).__name__, attention_kernel(text)
    require(
        text is config and config.model_type not in READ_THEIR_MASK,
        f"{KEY}: {name} has attention that ranks cannot share; set it to 1",
    )
    require(
        kernel == "sdpa" or "flash" in kernel,
        f"{KEY}: works with sdpa and flash attention, and {name} runs with {kernel}; set it to 1",
    )
    routed = getattr(text, "output_router_logits", False)
    require(
        not (routed and padded),
        f"{KEY}: the router loss of {name} needs samples without padding; set data.packing to true or "
        "documents, or model.config.output_router_logits to false",
    )
    require(
        not routed or router_loss_of(model) is not None,
        f"{KEY}: the router loss of {name} needs whole sequences; set "
        "model.config.output_router_logits to false",
    )
    check_documents(model, KEY)
    check_heads(model, size)


def exchanged_width(model: Any, size: int) -> int:
    """Elements of a token that ``size`` ranks exchange in a pass forward through all layers of ``model``:
    of its queries, keys, values and results."""
    text = model.config.get_text_config()
    heads, keys = _heads(model)
    keys = max(keys, size)  # repeated, so that each has one
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    query, value = getattr(text, "qk_head_dim", head), getattr(text, "v_head_dim", head)
    return int(text.num_hidden_layers * (heads + keys) * (query + value))


def check_heads(model: Any, size: int) -> None:
    """Raise UserError if the heads of ``model`` cannot be divided among ``size`` ranks or devices."""
    heads, keys = _heads(model)
    require(
        heads % size == 0 and (keys % size == 0 or size % keys == 0),
        f"{KEY}: {heads} heads ({keys} of keys) cannot be divided among {size} ranks; use a divisor",
    )


def _heads(model: Any) -> tuple[int, int]:
    """The heads of queries, and of keys."""
    text = model.config.get_text_config()
    heads: int = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads
