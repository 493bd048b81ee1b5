"""vLLM and SGLang can load the names that we write, by their own sources: see tests/server_names.py.

A name is accepted if the server's mappings lead it to a parameter of the server's model class. Shapes and
values are not compared, and no server is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from portable.converters.names.name_rules import get_default_rules
from portable.converters.names.published_names import arrange_for_files
from tests.composite import build_composite_config
from tests.server_names import NEEDS_SERVERS, VARIABLE, Server
from tests.tiny_models import tiny_config

transformers: Any = pytest.importorskip("transformers")
FOLDER = Path(os.environ.get(VARIABLE, ""), "servers")
pytestmark = [
    pytest.mark.owners,
    pytest.mark.skipif(VARIABLE not in os.environ or not FOLDER.is_dir(), reason=NEEDS_SERVERS),
]

BOTH = [
    "apertus",
    "gemma3_text",
    "glm4_moe",
    "glm4_moe_lite",
    "granite",
    "hy_v3",
    "lfm2",
    "lfm2_moe",
    "llama",
    "mimo_v2_flash",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_next",
    "falcon_h1",
    "gemma3",
    "glm4v_moe",
    "llama4",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
]
TYPES = {
    "vllm": [
        *BOTH,
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "gpt_oss",
        "internvl",
        "jamba",
        "llava",
        "paligemma",
        "qwen3_moe",
        "qwen3_vl_moe",
    ],
    "sglang": [
        *BOTH,
        "gpt_oss",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "kimi_linear",
        "llava+pixtral",
        "olmo2",
    ],
}
"""Model types whose classes `Server` can follow to every parameter. The other types are not judged.

A name after a plus is the type of the vision tower: SGLang does not have the CLIP tower of LLaVA."""
CASES = [(server, model_type) for server, types in TYPES.items() for model_type in types]
READ_NAMES_IN_MEMORY = {
    ("sglang", "lfm2_moe"),
    ("sglang", "qwen3_5_moe"),
    *(("vllm", name) for name in ("glm4_moe", "glm4v_moe", "jamba", "lfm2_moe", "olmoe", "qwen2_5_vl")),
    *(
        ("vllm", name)
        for name in ("internvl", "mistral3", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next")
    ),
}
"""Servers for which `Server` also accepts the names in memory. Most of them read the experts of a layer from
one tensor."""
SIZES_OF_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NAMES_PER_TYPE = 12
"""Number of names per type with one changed part, which the server must reject."""


class Names(NamedTuple):
    """Names of a model's tensors.

    Attributes:
        architecture: Name of the model class.
        live: Names in memory.
        files: Names in converted files.
    """

    architecture: str
    live: list[str]
    files: list[str]


@cache
def list_names(model_type: str) -> Names:
    """Return the names of a tiny model of a type, without the tensors that are tied to others."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not model_type.startswith(
        ("qwen3_5", "gemma3_", "llama4")
    ):
        settings = tiny_config(model_type)
        settings.pop("model_type")
        config = transformers.AutoConfig.for_model(model_type, **settings)
        model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    elif model_type == "gemma3_text":
        settings = tiny_config(model_type)
        settings.pop("model_type")
        config = transformers.AutoConfig.for_model(model_type, **settings)
        model_class = transformers.Gemma3ForCausalLM
    else:
        model_type, _, tower = model_type.partition("+")
        vision: dict[str, Any] = {"model_type": tower, **SIZES_OF_TOWER}
        changes: dict[str, Any] = {"vision_config": vision} if tower else {}
        config = build_composite_config(model_type, **changes)
        model_class = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = model_class(config)
    tied = set(model.all_tied_weights_keys)
    live = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in tied and "vision_tower.head." not in name  # published towers do not have a head
    }
    rules = get_default_rules({**config.to_dict(), "architectures": [model_class.__name__]})
    files = live if rules is None else arrange_for_files(live, rules)
    return Names(model_class.__name__, [*live], [*files])


@cache
def read_server(package: str) -> Server:
    return Server(FOLDER, package)


def iterate_wrong_names(names: list[str]) -> Iterable[str]:
    """Yield some names with one part changed."""
    for name in names[:: max(1, len(names) // NAMES_PER_TYPE)]:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if not part.isdigit():
                yield ".".join([*parts[:i], f"x_{part}", *parts[i + 1 :]])


@pytest.mark.parametrize(("package", "model_type"), CASES)
def test_server_loads_written_names(package: str, model_type: str) -> None:
    server, names = read_server(package), list_names(model_type)
    assert server.find_unknown(names.architecture, names.files) == []
    wrong = list(iterate_wrong_names(names.files))
    assert wrong and server.find_unknown(names.architecture, wrong) == wrong
    if set(names.live) != set(names.files) and (package, model_type) not in READ_NAMES_IN_MEMORY:
        assert server.find_unknown(names.architecture, names.live)


@pytest.mark.parametrize("package", TYPES)
def test_server_does_not_load_stacked_experts_of_mixtral(package: str) -> None:
    names = list_names("mixtral")
    unknown = read_server(package).find_unknown(names.architecture, names.live)
    assert unknown == [name for name in names.live if ".mlp." in name]
