"""Detect tensor names that do not belong to the model type in a transformers config.

A tensor name consists of words, which are separated by dots. `module_words.json` contains the words
that occur in the tensor names of each model type. `python -m tests.module_words` generates the
file. A name from another program contains other words. For example,
`transformer.h.0.attn.qkv.weight` cannot be the name of a tensor in a Llama model, because the words
`h`, `attn` and `qkv` do not occur there.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_FILE = Path(__file__).with_name("module_words.json")


@cache
def _load_words() -> dict[str, str]:
    words: dict[str, str] = json.loads(_FILE.read_bytes())
    return words


def find_unknown_names(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Find the tensor names with words that are unknown to the model type.

    A word is a component of a name between dots. It is unknown if it does not occur in the names of
    the tensors and modules of the config's model type, or of the model types of its nested configs.
    Numbers are ignored. The last word is also ignored, because quantization adds tensors whose
    names end differently, such as `weight_scale`.

    Args:
        names: Names of the tensors.
        config: The model's `config.json`.

    Returns:
        The names with unknown words. Empty if the config has no model type, or if transformers does
        not implement one of the model types.
    """
    words: set[str] = set()
    for model_type in _iter_model_types(config):
        words_of_type = _load_words().get(model_type)
        if words_of_type is None:
            return []
        words.update(words_of_type.split())
    if not words:
        return []
    return [
        name
        for name in names
        if any(not word.isdigit() and word not in words for word in name.split(".")[:-1])
    ]


def find_foreign_name(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Return an unknown tensor name if more than half of the tensor names are unknown to the model type.

    Args:
        names: Names of the tensors.
        config: The model's `config.json`.

    Returns:
        The first unknown name, or None. See `find_unknown_names`.
    """
    names = list(names)
    unknown = find_unknown_names(names, config)
    return unknown[0] if 2 * len(unknown) > len(names) else None


def _iter_model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the model type of a config, and of the configs that are directly nested in it."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        yield model_type
    for value in config.values():
        if isinstance(value, dict) and isinstance(value.get("model_type"), str):
            yield value["model_type"]
