"""Tiny checkpoints of composite models, each of the class that published checkpoints use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_models import tiny_config

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


def build_composite_config(model_type: str, *, named: bool = True, **changes: Any) -> Any:
    """Return a tiny config of a composite model.

    Args:
        model_type: The model type of transformers.
        named: Whether the config names its class in ``architectures``.
        changes: Other values for the keys of the config.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    settings = {**tiny_config(model_type), **changes}
    settings.pop("model_type")
    if model_type in _VISION:
        settings["vision_config"] = {**settings.get("vision_config", {}), **_VISION[model_type]}
    if model_type in _TEXT:
        settings["text_config"] = {**settings["text_config"], **_TEXT[model_type]}
    config = AutoConfig.for_model(model_type, **settings)
    for part in (config, config.get_text_config()):
        part.bos_token_id, part.eos_token_id, part.pad_token_id = 1, 2, 0
    if named:
        config.architectures = [MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type]]
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
    import torch
    import transformers

    from portable.data.dataset import build_data
    from tests.runs import configured

    config = build_composite_config(model_type, **changes)
    torch.manual_seed(1)
    model = getattr(transformers, config.architectures[0])(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    data = build_data(configured(folder, corpus).data, model_vocab_size=config.get_text_config().vocab_size)
    data.tokenizer.save_pretrained(folder)
    return folder
