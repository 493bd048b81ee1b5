"""Tiny checkpoints of composite models, each of the class that published checkpoints use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import VOCABULARY, tiny_config

_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _build_rope_sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}}


_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen2_vl": _build_rope_sections(1, 1, 2),
    "qwen2_5_vl": _build_rope_sections(1, 1, 2),
    "qwen3_vl": _build_rope_sections(1, 1, 2),
    "qwen3_vl_moe": _build_rope_sections(1, 1, 2),
    "qwen2_5_omni_thinker": _build_rope_sections(1, 1, 2),
    "glm46v": _build_rope_sections(1, 1, 2),
    "glm4v": _build_rope_sections(1, 1, 2),
    "glm4v_moe": _build_rope_sections(0, 1, 1),
}
"""Changes to the text config of :func:`tiny_config`."""
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 16, "patch_size": 4},
    "qwen3_5": {"depth": 1, "num_position_embeddings": 16, "patch_size": 4},
    "qwen3_5_moe": {"depth": 1, "num_position_embeddings": 16, "patch_size": 4},
    "qwen3_vl": {"depth": 1, "num_position_embeddings": 16, "patch_size": 4},
}
"""Changes to the vision config of :func:`tiny_config`."""

_OTHER: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "text_config": {"vocab_size": 448},
        "vision_config": {"codebook_size": 32, "base_channels": 32, "channel_multiplier": [1, 1]},
        "audio_config": {
            "hidden_size": 32,
            "codebook_dim": 32,
            "codebook_size": 32,
            "num_filters": 4,
            "decoder_hidden_size": 32,
            "decoder_num_layers": 1,
        },
        "image_token_offset": 384,
        "audio_token_offset": 416,
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 3, **{f"IMGIMGA{chr(65 + i)}Z": 8 + i for i in range(4)}},
        "vq_config": {"num_embeddings": 4, "base_channels": 32, "channel_multiplier": [1, 1]},
    },
    "cosmos3_edge": {"text_config": _build_rope_sections(1, 1, 2)},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {
            "sam_config": {
                "image_size": 64,
                "output_channels": 16,
                "mlp_dim": 64,
                "downsample_channels": [32, 32],
            }
        },
    },
    "diffusion_gemma": {
        "text_config": {
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "per_layer_config": {},
        }
    },
    "dots3_note": {
        "text_config": {"per_layer_config": {}, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "per_layer_config": {},
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 3,
            "<|extra_200|>": 4,
            **{f"<|visual token {i:06d}|>": 8 + i for i in range(4)},
        },
        "vq_config": {"codebook_size": 4, "base_channels": 32, "channel_multiplier": [1, 1]},
    },
    "ernie4_5_vl_moe": {"text_config": _build_rope_sections(1, 1, 2)},
    "evolla": {"aligner_num_add_layers": 1},  # as in published models, not in every layer
    "exaone4_5": {"text_config": {"model_type": "exaone4_5_text"}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "index_topk": 16,
            "index_kpool": 4,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {
            "depth": 1,
            "out_hidden_size": 32,
            "projection_intermediate_size": 32,
            "patch_size": 4,
        },
    },
    "glm_ocr": {
        "text_config": _build_rope_sections(1, 1, 2),
        "vision_config": {"depth": 1, "out_hidden_size": 32},
    },
    "glmga": {
        "text_config": _build_rope_sections(1, 1, 2),
        "vision_config": {"depth": 1, "out_hidden_size": 32},
    },
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "vision_config": {"image_size": 64, "patch_size": 16, "hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64, "num_hidden_layers": 1},
    },
    "granite_docling": {
        "vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "image_size": 64}
    },
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]},
        },
        "vision_config": {
            "out_hidden_size": 32,
            "text_hidden_size": 32,
            "max_image_size": 64,
            "img_max_token_num": 16,
        },
    },
    "hy_v4_vl": {
        "text_config": {**_build_rope_sections(1, 1, 2), "num_key_value_heads": 4},
        "vision_config": {"out_hidden_size": 32, "max_image_size": 64},
    },
    "inkling2": {"vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32}},
    "inkling2_loop": {
        "text_config": {
            "num_hidden_layers": 4,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
        },
        "vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32},
    },
    "mistral_large4": {"text_config": {"num_key_value_heads": 4, "kv_source_layers": [0, 1]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, 0], "text_hidden_size": 32}},
    "muse_spark": {
        "audio_config": {
            "num_hidden_layers": 2,
            "patch_sizes": [4, 4],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "out_hidden_size": 32,
        }
    },
    "kyutai_speech_to_text": {"codec_config": {"num_filters": 4, "upsample_groups": 32, "codebook_dim": 16}},
    "nemo_speechlm": {
        "audio_config": {
            "asr_config": {"num_key_value_heads": 4},
            "diarization_config": {
                "audio_config": {"num_key_value_heads": 4},
                "head_config": {"audio_hidden_size": 32},
            },
        },
        "text_config": _LINEAR,
        "word_timestamp_config": {"num_key_value_heads": 4},
    },
    # Published configs have it, and the classes of transformers have no default.
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 64}}
    },
    "qwen4_exp": {
        "text_config": {
            **_LINEAR,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        "vision_config": {"depth": 1},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": {"text_config": {**_build_rope_sections(1, 1, 2), "num_key_value_heads": 2}},
    "paligemma": {
        "text_config": {"num_key_value_heads": 1},
        "vision_config": {"projection_dim": 32},
        "projection_dim": 32,
    },
    "pi0": {"vlm_config": {"vision_config": {"vision_use_head": False}}},
}
"""Changes to the config of :func:`tiny_config`, also inside its parts."""


def _merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for key, value in changes.items():
        inside = merged.get(key)
        if isinstance(inside, dict) and isinstance(value, dict) and value and key not in _REPLACED:
            merged[key] = _merge(inside, value)
        else:
            merged[key] = value
    return merged


_PUBLISHED = {"shieldgemma2": "ShieldGemma2ForImageClassification"}
"""Published classes that differ from the classes of transformers' table."""
_REPLACED = ("vocabulary_map", "rope_parameters", "per_layer_config")


def build_composite_config(model_type: str, *, named: bool = True, **changes: Any) -> Any:
    """Return a tiny config of a composite model.

    Args:
        model_type: The model type of transformers.
        named: Whether the config names its class in ``architectures``.
        changes: Other values for the keys of the config.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    settings = {**_merge(tiny_config(model_type), _OTHER.get(model_type, {})), **changes}
    settings.pop("model_type")
    if model_type in _VISION:
        settings["vision_config"] = {**settings.get("vision_config", {}), **_VISION[model_type]}
    if model_type in _TEXT:
        settings["text_config"] = {**settings["text_config"], **_TEXT[model_type]}
    config = AutoConfig.for_model(model_type, **settings)
    for part in (config, config.get_text_config()):
        part.bos_token_id, part.eos_token_id, part.pad_token_id = 1, 2, 0
    if named:
        config.architectures = [
            _PUBLISHED.get(model_type) or MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type]
        ]
    return config


def write_composite(folder: Path, model_type: str, corpus: Path, **changes: Any) -> Path:
    """Write a checkpoint with a tokenizer, in which no parameter has its initial value.

    Args:
        folder: Folder to write to.
        model_type: The model type of transformers.
        corpus: Text file on which the tokenizer is trained.
        changes: Other values for the keys of the config.

    Returns:
        The folder.
    """
    from portable.data.dataset import build_data
    from tests.runs import configured

    model = build_composite(model_type, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", VOCABULARY)  # PI0 has none
    data = build_data(configured(folder, corpus).data, model_vocab_size=vocab_size)
    data.tokenizer.save_pretrained(folder)
    return folder


def build_composite(model_type: str, **changes: Any) -> Any:
    """Build a tiny composite model in fp32 with the weights that transformers draws.

    Args:
        model_type: The model type of transformers.
        changes: Other values for the keys of the config.
    """
    import transformers

    config = build_composite_config(model_type, **changes)
    torch.manual_seed(1)
    return getattr(transformers, config.architectures[0])(config).to(torch.float32)
