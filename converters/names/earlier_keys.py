"""Add the legacy config keys of transformers 4 to a config of transformers 5, or remove them.

transformers 5 moves `rope_theta` and similar keys into `rope_parameters`, and renames a few others.
Some programs, such as transformers 4.57, mlx-lm, and the converter of llama.cpp, still read the
legacy keys. If a legacy key is missing, these programs fail or silently use a default.

`earlier_config_keys.json` contains the legacy keys of each model type, with the path under which
transformers 5 stores the value. It also lists the model types whose `rope_scaling` has a `type`
instead of a `rope_type`. `python -m tests.earlier_keys` generates the file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TABLE = Path(__file__).with_name("earlier_config_keys.json")
_MISSING = object()
_UNSCALED = {"rope_type", "partial_rotary_factor"}


def add_earlier_keys_to_config(config: dict[str, Any]) -> bool:
    """Add missing legacy keys to a config and to its nested configs that have a `model_type`.

    The values of existing keys are not changed.

    Args:
        config: Content of a `config.json`. Modified in place.

    Returns:
        Whether keys have been added.
    """
    changed = False
    for part in _iter_nested_configs(config):
        added = {key: value for key, value in _compute_earlier_keys(part).items() if key not in part}
        part.update(added)
        changed |= bool(added)
    return changed


def remove_earlier_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config without the legacy keys that duplicate another value.

    This removes the keys that `add_earlier_keys_to_config` adds. A legacy key with a different value
    is kept.
    """
    repeated = _compute_earlier_keys(config)
    return {
        key: remove_earlier_keys(value) if _has_model_type(value) else value
        for key, value in config.items()
        if key not in repeated or not _is_equal(value, repeated[key])
    }


def _is_equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _has_model_type(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("model_type"), str)


def _iter_nested_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the nested configs that have a model type."""
    yield config
    for part in config.values():
        if _has_model_type(part):
            yield from _iter_nested_configs(part)


def _compute_earlier_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the legacy config keys of transformers 4 from a config of transformers 5.

    A legacy key is omitted if the config does not contain the value from which it is computed. The
    result is empty if the model type has no legacy keys. A key for the scaling of rotary embeddings is
    None if they are not scaled.
    """
    model_type = config.get("model_type")
    paths = _read_table()["types"].get(model_type, {}) if isinstance(model_type, str) else {}
    values = {key: _find_value(config, path) for key, path in paths.items()}
    earlier: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):  # Scaling of rotary embeddings, without the base frequency.
            scaling = {name: item for name, item in value.items() if name != "rope_theta"}
            is_default = scaling.get("rope_type", "default") == "default" and scaling.keys() <= _UNSCALED
            if model_type in _read_table()["scaling_with_type"]:
                scaling = {"type" if name == "rope_type" else name: item for name, item in scaling.items()}
            earlier[key] = None if is_default else scaling
        elif value is not _MISSING:
            earlier[key] = value
    return earlier


def _find_value(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


@cache
def _read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_TABLE.read_bytes())
    return table
