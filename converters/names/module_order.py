"""Sort parameter names in the order in which the modules of a model define them.

An optimizer that is keyed by index numbers its parameters in this order. A pickled state dict also
has this order, but a safetensors file is sorted by name. Each list below contains sibling modules
and parameters in the order in which transformers' classes create them. A test compares the lists
with these classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.converters.names.canonical import is_parameter_index
from portable.converters.storage.safe_open import read_json_object_or_empty

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.converters.storage.path_or_url import AnyPath

_DECODER = (
    "model embed_tokens layers self_attn q_proj k_proj v_proj o_proj q_norm k_norm mlp gate_proj up_proj "
    "down_proj input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm "
    "norm lm_head weight bias"
)
_GPT2 = "transformer wte wpe h ln_1 attn c_attn c_fc c_proj ln_2 mlp ln_f lm_head weight bias"
_NEOX = (
    "gpt_neox embed_in layers input_layernorm post_attention_layernorm attention query_key_value dense mlp "
    "dense_h_to_4h dense_4h_to_h final_layer_norm lm_head embed_out weight bias"
)
_BERT = (
    "bert embeddings word_embeddings position_embeddings token_type_embeddings encoder layer attention self "
    "query key value intermediate output weight bias transform dense LayerNorm pooler cls predictions "
    "decoder seq_relationship dropout classifier"
)
_T5 = (
    "shared encoder decoder block layer SelfAttention EncDecAttention q k v o relative_attention_bias "
    "DenseReluDense wi wi_0 wi_1 wo layer_norm final_layer_norm lm_head weight"
)
_ORDERS = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2"),
            *("stablelm", "cohere", "smollm3"),
        ),
        _DECODER,
    ),
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "bert": _BERT,
    "t5": _T5,
}
MODEL_TYPES = tuple(_ORDERS)


def sort_in_module_order(names: Iterable[str], config_path: AnyPath | None) -> list[str] | None:
    """Sort names in the order in which the model defines its parameters.

    Args:
        names: Names of parameters.
        config_path: Path of a `config.json` with the `model_type`. None if there is no config.

    Returns:
        The sorted names. None if there is no config, or if the order is unknown for the model type or
        one of the names.
    """
    model_type = read_json_object_or_empty(config_path).get("model_type")
    order = _ORDERS.get(model_type) if isinstance(model_type, str) else None
    if order is None:
        return None
    ranks = {part: rank for rank, part in enumerate(order.split())}
    keyed: list[tuple[list[int], str]] = []
    for name in names:
        key = [int(part) if is_parameter_index(part) else ranks.get(part, -1) for part in name.split(".")]
        if -1 in key:
            return None
        keyed.append((key, name))
    return [name for _, name in sorted(keyed)]
