"""Configs of a few thousand parameters for every architecture of transformers, from its defaults."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY = 384

SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_)?hidden_layers|(n|num|encoder|decoder)_layers?|num_(en|de)coder_layers|n_layer", 2),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|num_key_value_groups|n_kv_heads", 2),
    (r"(n|num|encoder|decoder)(_attention)?_heads?|num_encoder_attention_heads|n_heads", 4),
    (r"(hidden|embedding|model|embed)_(size|dim)|d_model|n_embd|dim|emb_dim|d_embed|word_embed_proj_dim", 32),
    (r"head_dim|d_head|d_kv|attention_head_size|v_head_dim|kv_channels", 8),
    (r"(moe_|shared_expert_|expert_|encoder_|decoder_|local_)?(intermediate_size|ffn_dim|ff_dim)(_mlp)?", 64),
    (r"d_ff|ffn_hidden_size|n_inner|d_inner|ffn_size|feed_forward_size|dim_ff|hidden_dim", 64),
    (r"shared_intermediate_size|moe_shared_expert_intermediate_size|feed_forward_proj_dim", 64),
    (
        r"vocab_size|unpadded_vocab_size|n_words|emb_vocab_size|vocab_size_per_layer_input|src_vocab_size|tgt_vocab_size",
        VOCABULARY,
    ),
    (r"(max_)?(encoder_|decoder_|target_|source_)?(n_)?positions?(_embeddings)?|max_seq_len|n_ctx", 64),
    (r"(num|n)(_local|_routed|_total)?_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_?k_experts|num_experts_per_token", 2),
    (r"rotary_dim", 4),
    (r"kv_lora_rank|q_lora_rank|qk_nope_head_dim|qk_rope_head_dim", 8),
)
"""All names that transformers has for a size, and the value that replaces a larger one."""

_ROPE_BY_LAYER = {
    kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MLA = (
    "axk2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
)
_QSA = {
    **_LINEAR,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_LINEAR_HEADS = {"num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in _MLA},
    "axk1": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "bailing_hybrid": {**_LINEAR_HEADS, "num_expert_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_LAYER},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 16},
    "kimi_linear": _LINEAR_HEADS,
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "visual_embed": False},
    "led": {"attention_window": 8},
    "lilt": {"hidden_size": 48},
    "bamba": _MAMBA,
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "mobilebert": {"embedding_size": 16},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "flint": {"mlp_only_layers": [0]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "gemma3n_audio": {
        "conf_num_hidden_layers": 2,
        "conf_num_attention_heads": 4,
        "sscp_conv_channel_size": [8, 4],
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma3n_vision": {"architecture": "test_efficientnet"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"num_key_value_heads": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 8},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mluke": {"entity_vocab_size": 16, "entity_emb_size": 8},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": _QSA,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 8],  # the length of the samples, which is the maximum
        "max_position_embeddings": 32,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
    },
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,  # a masked language model has the same number of logits
    },
    "timm_wrapper": {"architecture": "test_vit", "model_args": {"embed_dim": 64}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layer_types": ["mamba", "hybrid"] * 3},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
    },
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
}
"""Settings that the rules do not set, also for nested configs."""


def tiny_config(model_type: str, task: str | None = None) -> dict[str, Any]:
    """Return settings for ``model.config``: the defaults of a type, made small, without dropout.

    Args:
        model_type: Model type of transformers.
        task: Task of the settings, if they depend on it.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    settings = {"model_type": model_type, **_small(default)}
    if task == "causal-lm":
        settings |= {name: value for name, value in _CAUSAL.items() if hasattr(default, name)}
        if model_type == "reformer":
            settings["is_decoder"] = True
    return settings


_CAUSAL: dict[str, Any] = {"is_decoder": True, "causal": True, "attn_type": "uni"}
"""Settings without which models of these types attend in both directions."""


def _small(config: Any) -> dict[str, Any]:
    from transformers import PretrainedConfig

    changed: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            changed[key] = _small(value)
        elif ("drop" in key and isinstance(value, float)) or "jitter" in key:
            changed[key] = 0.0
        elif key in ("layer_types", "layers_block_type") and isinstance(value, list):
            other = next((kind for kind in value if kind != value[0]), value[0])
            changed[key] = [value[0], other]
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for name, size in SIZES if re.fullmatch(name, key)), None)
            if size is not None and value > size:
                changed[key] = size
            elif key.endswith("_token_id") and value >= VOCABULARY:
                changed[key] = 1
    return {**changed, **OVERRIDES.get(config.model_type, {})}


def tiny_model(model_type: str, head: str = "AutoModelForCausalLM", **changes: Any) -> Any:
    """Return a model of `tiny_config` with these changes, in evaluation mode, always with equal values."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings = {key: value for key, value in tiny_config(model_type).items() if key != "model_type"} | changes
    config = transformers.AutoConfig.for_model(model_type, **settings)
    return getattr(transformers, head).from_config(config).eval()
