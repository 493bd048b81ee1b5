"""Config keys of transformers 4 in converted folders; `tests/test_owners.py` reads them with 4.57."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from portable.converters.names.earlier_keys import add_earlier_keys_to_config, remove_earlier_keys
from tests.earlier_keys import FILE, build_probed_config

transformers: Any = pytest.importorskip("transformers")
TYPES: dict[str, dict[str, str]] = json.loads(FILE.read_bytes())["types"]


SOME = [*{tuple(paths.items()): name for name, paths in TYPES.items()}.values()]
"""One model type per combination of keys."""


@pytest.mark.parametrize(
    "types", [SOME, pytest.param([*TYPES], marks=pytest.mark.exhaustive)], ids=["some", "every"]
)
def test_earlier_keys_do_not_change_values_in_transformers_5(types: list[str]) -> None:
    for model_type in types:
        paths = TYPES[model_type]
        config = build_probed_config(model_type, paths)
        added = copy.deepcopy(config)
        assert add_earlier_keys_to_config(added) and added.keys() - config.keys() == set(paths), model_type
        assert remove_earlier_keys(added) == config
        assert not add_earlier_keys_to_config(added)
        read, wanted = (
            transformers.CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values)).to_dict()
            for values in (added, config)
        )
        rope = read.get("rope_parameters") or {}
        assert rope.pop("type", rope.get("rope_type")) == rope.get("rope_type")
        assert {key: read[key] for key in wanted} == wanted, model_type


def test_earlier_keys_of_source_are_kept() -> None:
    config = {"model_type": "llama", "rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}
    add_earlier_keys_to_config(config)
    assert config["rope_theta"] == 5.0
    assert remove_earlier_keys(config)["rope_theta"] == 5.0


def test_earlier_keys_keep_multimodal_sections() -> None:
    rope = {"rope_type": "default", "rope_theta": 5.0, "mrope_section": [1, 1, 2]}
    config: dict[str, Any] = {"model_type": "qwen3_vl_text", "rope_parameters": rope}
    assert add_earlier_keys_to_config(config)
    assert config["rope_scaling"] == {"rope_type": "default", "mrope_section": [1, 1, 2]}


def test_earlier_keys_are_added_to_nested_configs() -> None:
    rope = {"sliding_attention": {"rope_theta": 2.0}, "full_attention": {"rope_theta": 3.0}}
    text: dict[str, Any] = {"model_type": "gemma3_text", "rope_parameters": rope}
    config = {"model_type": "gemma3", "text_config": text}
    assert add_earlier_keys_to_config(config)
    assert text["rope_theta"] == 3.0 and text["rope_local_base_freq"] == 2.0 and text["rope_scaling"] is None
    assert config.keys() == {"model_type", "text_config"}
