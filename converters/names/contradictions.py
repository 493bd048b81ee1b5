"""Settings of a `config.json` that contradict the tensors, and that a conversion corrects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from converters.names.expected import find_expected_tensors, is_tied
from converters.names.name_rules import get_architecture
from converters.names.tied_weights import HEADS, ends_with, find_split_ties
from converters.tensors.dtypes import QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.names.expected import ExpectedTensors
    from converters.tensors.tensor import Tensor

_CODES = re.compile(
    r"(^|\.|_)(qweight|weight_packed|packed|qzeros|scales|codes|codebooks?|g_idx|absmax|qdata|SCB|blocks)\b"
    r"|scale|quant|:"
)


def find_stale_quantization(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Return whether a config describes a quantization, but no tensor is quantized."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    if not tensors or not any(isinstance(part.get("quantization_config"), dict) for part in parts):
        return False
    return not any(
        (tensor.dtype in QUANTIZED and tensor.shape) or tensor.dtype == "F8_E8M0" or _CODES.search(name)
        for name, tensor in tensors.items()
    )


def find_split_tie(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find output embeddings that differ from the input embeddings although the config ties them.

    Args:
        tensors: Tensors of the checkpoint without aliases.
        config: Content of the `config.json`.

    Returns:
        Names of the output and input embeddings, or None.
    """
    expected = find_class(config)
    # Some classes have output embeddings that transformers never ties, regardless of the config.
    if expected is None or not any(ends_with(name, HEADS) for name in expected.untied):
        return None
    if config.get("tie_word_embeddings") is False or not is_tied(config, default=expected.tied):
        return None
    return next(iter(find_split_ties(tensors)), None)


def find_class(config: Mapping[str, Any]) -> ExpectedTensors | None:
    """Return the parameters of the class that a config names, or None if the class is unknown."""
    model_type, architecture = config.get("model_type"), get_architecture(config)
    if not isinstance(model_type, str) or architecture is None:
        return None
    return find_expected_tensors(model_type, architecture)
