"""Configs of a few thousand parameters, for any architecture of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Whatever of these a config has; the first names that fit are those of most architectures.
SIZES: dict[str, int] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "d_ff": 48,
    "ffn_dim": 48,
    "hidden_dim": 48,
    "n_inner": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 1,
}

# What an architecture needs besides, or instead; None takes a size away.
OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8, "d_inner": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
    },
}


def _names(mapping: str) -> Callable[[], list[str]]:
    def names() -> list[str]:
        from transformers.models.auto import modeling_auto

        return sorted(getattr(modeling_auto, mapping))

    return names


TASKS: dict[str, Callable[[], list[str]]] = {
    "causal-lm": _names("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked-lm": _names("MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq-lm": _names("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "sequence-classification": _names("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
}


def tiny_config(model_type: str) -> dict[str, Any]:
    """``model.config`` of a small model of that type."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type)
    sizes = {key: size for key, size in SIZES.items() if _has(known, key)}
    given = {**sizes, **OWN.get(model_type, {})}
    return {"model_type": model_type, **{key: value for key, value in given.items() if value is not None}}


def _has(config: Any, key: str) -> bool:
    return key in config.to_dict() or key in getattr(config, "attribute_map", {})
