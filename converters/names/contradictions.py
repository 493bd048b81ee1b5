"""Find settings in a `config.json` that are invalid or contradict the tensors."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from portable.converters.names.expected_tensors import SIZE_KEYS, find_expected_tensors, may_tie_embeddings
from portable.converters.names.name_rules import get_architecture
from portable.converters.names.tied_weights import HEAD_NAMES, ends_with_name, find_untied_embeddings
from portable.converters.tensors.dtypes import QUANTIZED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from portable.converters.names.expected_tensors import ExpectedTensors
    from portable.converters.names.tied_weights import TiedPair
    from portable.converters.tensors.tensor import Tensor

_MAX_SHOWN = 60
_CODES = re.compile(
    r"(^|\.|_)(qweight|weight_packed|packed|qzeros|scales|codes|codebooks?|g_idx|absmax|qdata|SCB|blocks)\b"
    r"|scale|quant|:"
)
# Types of the settings that a conversion reads. Null is always valid, because it means that a setting is not
# set.
_TYPES: dict[str, tuple[type, str]] = {
    "model_type": (str, "a string"),
    "architectures": (list, "a list of strings"),
    "text_config": (dict, "an object"),
    "vision_config": (dict, "an object"),
    "audio_config": (dict, "an object"),
    "quantization_config": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "rope_scaling": (dict, "an object"),
    "id2label": (dict, "an object"),
    "label2id": (dict, "an object"),
    "layer_types": (list, "a list of strings"),
    "tie_word_embeddings": (bool, "true or false"),
}
_STRINGS = ("architectures", "layer_types")
# Sizes that are positive in all models.
_POSITIVE = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")
_MAX_SIZE = (1 << 31) - 1
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERT_COUNT = re.compile(
    r"(n|num)(_local|_routed|_total|_moe)?_experts|moe_num_(routed_|local_)?experts|num_experts_per_layer"
)
"""Pattern of the config keys that contain the number of experts in a layer."""


def describe_invalid_settings(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Describe the settings whose values are invalid for every model.

    A value can be invalid because of its type, its sign or its magnitude. Null is always valid,
    because it means that a setting is not set.

    Args:
        config: Content of the `config.json`. A nested `text_config` is also checked.
        names: Names of the tensors. If no tensor belongs to an expert, the number of experts is not
            checked.

    Returns:
        One description per invalid setting, with the current value and the valid values. A long
        value is truncated. If a setting is invalid in both configs, only the top-level value is
        described.
    """
    is_known = find_tensors_of_class(config) is not None
    has_experts = any("experts." in name for name in names)
    text = config.get("text_config")
    invalid: dict[str, str] = {}
    for part in (config, text if isinstance(text, dict) else {}):
        for key, value in part.items():
            if key == "head_dim" and value == 0 and part.get("qk_rope_head_dim") == 0:
                continue  # With latent attention, head_dim is the size of the rotary part, which may be 0.
            wanted = None if value is None else _describe_valid_values(key, value, is_known, has_experts)
            if wanted is not None:
                shown = json.dumps(value)
                shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
                invalid.setdefault(key, f"{key} is {shown}, but must be {wanted}")
    return list(invalid.values())


def _describe_valid_values(key: str, value: Any, is_known: bool, has_experts: bool) -> str | None:
    """Describe the valid values of a setting if its value is invalid.

    Args:
        key: Name of the setting.
        value: Value of the setting.
        is_known: Whether `expected_tensors.json` contains the model class.
        has_experts: Whether the model has experts. Otherwise, numbers of experts are not checked.

    Returns:
        The description. None if the value is valid or not checked.
    """
    if key in _TYPES:
        valid, description = _TYPES[key]
        is_valid = isinstance(value, valid)
        if is_valid and key in _STRINGS:
            is_valid = all(isinstance(entry, str) for entry in value)
        return None if is_valid else description
    is_count = bool(EXPERT_COUNT.fullmatch(key))
    if not (key in SIZE_KEYS or key in _DEPTHS or is_count) or (is_count and not has_experts):
        return None
    least = 1 if key in _POSITIVE and is_known else 0
    if isinstance(value, list) and key not in _DEPTHS:
        # Some models have one value per layer.
        return None if all(_is_size(entry, 0) for entry in value) else "a list of whole numbers"
    # A float is accepted for custom model code, which transformers does not contain and which may convert it.
    is_integral = isinstance(value, float) and value.is_integer() and not is_known
    if _is_size(int(value) if is_integral else value, least):
        return None
    return f"a whole number from {least} to {_MAX_SIZE:,}"


def _is_size(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MAX_SIZE


def has_stale_quantization(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Return whether a config has a `quantization_config` although no tensor is quantized.

    A tensor counts as quantized if its dtype or its name is typical of quantized weights or of
    their scales. Always False if there are no tensors.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    if not tensors or not any(isinstance(part.get("quantization_config"), dict) for part in parts):
        return False
    return not any(
        (tensor.dtype in QUANTIZED_DTYPES and tensor.shape)
        or tensor.dtype == "F8_E8M0"
        or _CODES.search(name)
        for name, tensor in tensors.items()
    )


def find_contradicted_tie(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> TiedPair | None:
    """Find an output embedding that differs from the input embedding although the config ties them.

    Args:
        tensors: Tensors of the checkpoint, keyed by name. Aliases of tied tensors are not included.
        config: Content of the `config.json`.

    Returns:
        Names of the output and input embeddings. None if the tensors agree with the config, if the
        model class is unknown, or if transformers never ties the embeddings of this class.
    """
    expected = find_tensors_of_class(config)
    # Some classes have output embeddings that transformers never ties, regardless of the config.
    if expected is None or not any(ends_with_name(name, HEAD_NAMES) for name in expected.untied):
        return None
    if config.get("tie_word_embeddings") is False or not may_tie_embeddings(config, default=expected.tied):
        return None
    return next(iter(find_untied_embeddings(tensors)), None)


def has_contradicted_text_tie(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Return whether `text_config` wrongly states that the input and output embeddings are tied.

    This is the case if `text_config` sets `tie_word_embeddings` to true, the top-level config sets
    it to false, and the checkpoint contains separate input and output embeddings. transformers 5
    writes such a config for Qwen3-VL-MoE: it reads the top-level setting, but writes the default
    into `text_config`. transformers 4.57 and vLLM read the setting in `text_config`.
    """
    text = config.get("text_config")
    is_contradicted = isinstance(text, dict) and text.get("tie_word_embeddings") is True
    return (
        is_contradicted
        and config.get("tie_word_embeddings") is False
        and bool(find_untied_embeddings(tensors))
    )


def find_tensors_of_class(config: Mapping[str, Any]) -> ExpectedTensors | None:
    """Return the parameters of the model class that a config specifies.

    None if the config does not specify both a model type and a class, or if `expected_tensors.json`
    does not contain this class for the model type.
    """
    model_type, architecture = config.get("model_type"), get_architecture(config)
    if not isinstance(model_type, str) or architecture is None:
        return None
    return find_expected_tensors(model_type, architecture)
