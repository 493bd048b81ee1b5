"""Adapters in the model and in the config: rejected settings, initial values and cost."""

from __future__ import annotations

import inspect
import json
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.adapters.adapter import Adapter, find_outermost_module, inject_adapter
from portable.adapters.settings import resolve_adapter_config, to_peft_document
from portable.checks import check_config
from portable.config import load_config
from portable.converters.adapters import patterns
from portable.errors import UserError
from portable.model import build as models
from portable.model.initialize import derive_named_seed
from portable.model.parameters import get_checkpointed_tensors, materialize_model
from portable.private.peft_internals import peft
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import tiny_config

UNTIED = {**TINY_MODEL, "tie_word_embeddings": False}
MOE = tiny_config("qwen3_moe")


def adapted(folder: Path, **settings: Any) -> tuple[Any, Adapter]:
    """Build a model on the meta device with its adapter."""
    config = configured(folder, folder, **{"adapter__type": "lora", **settings})
    check_config(config)
    config = resolve_adapter_config(config)
    model_config = models.load_model_config(config.model)
    model = models.build_and_freeze_model(model_config, config)
    found = inject_adapter(model, model_config, config)
    assert found is not None
    return model, found


def test_adapter_target_pattern_without_full_match_suggests_list(tmp_path: Path) -> None:
    """See ``command_line_refused.yaml`` for other targets that do not exist in the model."""
    with pytest.raises(
        UserError,
        match=r"target_modules: .* 'q_proj' matches no complete .*; write the names as a list: \[q_proj\]",
    ):
        adapted(tmp_path, adapter__target_modules="q_proj")


@pytest.mark.parametrize(
    ("name", "other_names", "module"),
    [
        ("score.weight", ["model.norm.weight"], "score"),
        ("model.norm.weight", ["model.layers.0.mlp.weight"], "model.norm"),
        ("classifier.dense.weight", ["model.norm.weight"], "classifier"),
        ("classifier.dense.weight", ["classifier.out.weight"], "classifier.dense"),
        ("classifier.dense.weight", ["classifier.dense.bias"], ""),
        ("scale", ["model.norm.weight"], ""),
    ],
)
def test_module_to_save_contains_no_weight_of_base(name: str, other_names: list[str], module: str) -> None:
    assert find_outermost_module(name, other_names) == module


KINDS: list[dict[str, Any]] = [
    {},
    {"adapter__use_dora": True, "adapter__modules_to_save": ["lm_head"], "model__config": UNTIED},
    {"adapter__bias": "all", "model__config": {**TINY_MODEL, "attention_bias": True}},
    {"adapter__bias": "lora_only", "model__config": {**TINY_MODEL, "attention_bias": True}},
    {"adapter__type": "ia3", "adapter__target_modules": ["k_proj", "down_proj"]},
    {"adapter__target_parameters": ["mlp.experts.gate_up_proj"], "model__config": MOE},
    {"adapter__trainable_token_indices": [3, 5]},
    {"adapter__trainable_token_indices": {"embed_tokens": [3], "lm_head": [5]}, "model__config": UNTIED},
]


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_checkpoint_has_names_and_shapes_of_peft(kind: dict[str, Any], tmp_path: Path) -> None:
    model, adapter = adapted(tmp_path, **kind)
    materialize_model(model, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model_state_dict(model)
    ours = {adapter._saved_names[name]: tensor for name, tensor in get_checkpointed_tensors(model).items()}
    assert set(ours) == {f"base_model.model.{name}" for name in theirs}
    assert all(ours[f"base_model.model.{name}"].shape == tensor.shape for name, tensor in theirs.items())


def test_adapter_initial_values_match_peft_for_seed_and_name(tmp_path: Path) -> None:
    from peft.tuners.lora import Linear

    for init in (True, "gaussian", "orthogonal"):
        _, adapter = adapted(tmp_path, adapter__init=init, adapter__r=4)
        values = adapter.get_initial_values({})
        name = "model.layers.1.mlp.up_proj"
        layer = torch.nn.Linear(48, 80, bias=False)
        torch.manual_seed(derive_named_seed(0, name))
        lone: Any = Linear(layer, "default", adapter.config, r=4, lora_alpha=32)
        if init == "orthogonal":  # which draws after the creation of the replaced layer
            torch.manual_seed(derive_named_seed(0, name))
            layers: Any = lone
            layers.lora_A["default"].reset_parameters()
            layers.lora_B["default"].reset_parameters()
            layers.orthogonal_init("default")
        for part in ("lora_A", "lora_B"):
            wanted = getattr(lone, part)["default"].weight.detach()
            assert torch.equal(torch.from_numpy(values[f"{name}.{part}.default.weight"].read()), wanted), init
    first, second = (values[f"model.layers.{i}.mlp.up_proj.lora_A.default.weight"].read() for i in range(2))
    assert abs(first - second).max() > 0.01


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": "(.|[a-z])*_"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["(.|[a-z])*[t-z_]"]},
        {"target_modules": ["q_proj"], "rank_pattern": {"(.|[a-z])*_": 4}},
    ],
    ids=lambda values: list(values)[-1],
)
def test_adapter_patterns_time_out(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_TIMEOUT_SECONDS", 0.2)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 5, **values}))
    with pytest.raises(UserError, match=r"adapter.* takes too long to match; use a simpler pattern"):
        adapted(tmp_path, adapter__type=None, adapter__config=str(path))


def test_adapter_config_file_of_peft_is_used(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 2}, use_rslora=True
    )
    config.save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"
    model, adapter = adapted(tmp_path, adapter__type=None, adapter__config=str(path))
    shapes = {name: tuple(t.shape) for name, t in get_checkpointed_tensors(model).items()}
    assert shapes["model.layers.0.self_attn.q_proj.lora_A.default.weight"] == (3, 48)
    assert shapes["model.layers.0.mlp.up_proj.lora_A.default.weight"] == (2, 48)
    assert (
        to_peft_document(adapter.config)["lora_alpha"],
        to_peft_document(adapter.config)["use_rslora"],
    ) == (5, True)
    with pytest.raises(UserError, match=r"adapter\.r: is 4, but .* has 3; remove adapter\.r"):
        adapted(tmp_path, adapter__config=str(path), adapter__r=4)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "peft_type": "VERA"}))
    with pytest.raises(
        UserError, match="peft_type 'VERA' is not supported; use an adapter with peft_type LORA or IA3"
    ):
        adapted(tmp_path, adapter__config=str(path))
    for lacking, wanted in (
        ({"r": None, "lora_alpha": None, "rank_pattern": None}, {"r": 8, "lora_alpha": 8}),
        ({"target_modules": None}, {"target_modules": ["q_proj", "v_proj"]}),
        ({"target_modules": ["up_proj", "c_attn"], "modules_to_save": ["score"]}, {"r": 3}),
        ({"layers_to_transform": [], "eva_config": {"rho": 2.0}}, {"layers_to_transform": None}),
    ):
        values = {**document, **lacking}
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
        _, adapter = adapted(tmp_path, adapter__type=None, adapter__config=str(path))
        assert {key: to_peft_document(adapter.config)[key] for key in wanted} == wanted
    path.write_text(json.dumps({"peft_type": "IA3"}))
    _, adapter = adapted(tmp_path, adapter__type=None, adapter__config=str(path))
    assert set(adapter.config.target_modules) == {"k_proj", "v_proj", "down_proj"}
    assert set(adapter.config.feedforward_modules) == {"down_proj"}


def test_adapter_trains_classifier_head(tmp_path: Path) -> None:
    """A pretrained model has no classification head, so the adapter is useless without the trained head."""
    given = {"model__task": "sequence-classification", "model__config": tiny_config("bert")}
    model, adapter = adapted(tmp_path, **given)
    assert any(name.startswith("classifier.modules_to_save.") for name in get_checkpointed_tensors(model))
    assert to_peft_document(adapter.config)["task_type"] == "SEQ_CLS"


def test_check_source_adapter_reads_headers_without_asserts() -> None:
    """With ``python -O``, which removes asserts, the check still runs before memory is allocated."""

    class Unreadable:
        _run = load_config(None, {"adapter.name_or_path": "missing"})

        @property
        def _source_adapter(self) -> None:
            raise UserError("adapter.name_or_path: cannot be read")

    namespace: dict[str, Any] = {}
    source = textwrap.dedent(inspect.getsource(Adapter.check_source_adapter))
    exec(compile(source, "adapter.py", "exec", optimize=1), namespace)
    with pytest.raises(UserError, match="cannot be read"):
        namespace["check_source_adapter"](Unreadable())
