"""Initial weights: as transformers draws them, and the same whoever draws them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.config import load_config
from portable.config.sections import ModelConfig
from portable.errors import UserError
from portable.model import build as models
from portable.model.initialize import InitialWeights
from portable.model.layers import transformer_layers
from portable.model.parameters import materialize
from portable.model.pretrained import pretrained_weights
from tests.tiny_models import tiny_config

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "bert": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4},
}
TASKS = {"bert": "masked-lm", "t5": "seq2seq-lm"}


def settings_of(family: str, **config: Any) -> Any:
    task = TASKS.get(family, "causal-lm")
    given: dict[str, Any] = {"model": {"config": {"model_type": family, **config}, "task": task}}
    if task != "causal-lm":
        given["data"] = {"source": "text.jsonl"}
    return load_config(given).model


def blueprint(family: str) -> InitialWeights:
    settings = settings_of(family, vocab_size=300, **FAMILIES[family])
    return InitialWeights.of(models.build_model(models.model_config(settings), settings))


def test_a_pretrained_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    def build(hidden: int) -> Any:
        config = {"model_type": "llama", "vocab_size": 300, **FAMILIES["llama"], "hidden_size": hidden}
        settings = load_config({"model": {"config": config}}).model
        return models.build_model(models.model_config(settings), settings)

    small = build(32)
    materialize(small, torch.device("cpu"))
    small.save_pretrained(tmp_path)
    settings = load_config({"model": {"name_or_path": str(tmp_path)}}).model
    with pytest.raises(UserError, match=r"has shape .* in the checkpoint"):
        pretrained_weights(settings, build(64))
    config = {"model_type": "llama", "hidden_size": 63, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"^model\.name_or_path: .*63.* is not a multiple"):
        models.model_config(settings)


def test_a_base_model_fits_a_model_with_a_head(tmp_path: Path) -> None:
    """The way of every fine-tuning: what the checkpoint lacks is named, what it has is found."""
    from transformers import AutoModel

    bert = blueprint("bert").model
    base = AutoModel.from_config(bert.config)
    base.save_pretrained(tmp_path)
    settings = load_config(
        {"model": {"name_or_path": str(tmp_path), "task": "masked-lm"}, "data": {"source": "text.jsonl"}}
    ).model
    weights = pretrained_weights(settings, bert)
    assert all(name.startswith("cls.") for name in weights.missing)
    key = "bert.encoder.layer.0.attention.self.query.weight"
    expected = base.state_dict()["encoder.layer.0.attention.self.query.weight"]
    assert torch.equal(torch.from_numpy(weights.found[key].read()), expected)


PUBLISHED = {
    "architectures": ["T5ForConditionalGeneration"],
    "decoder_start_token_id": 0,
    "gradient_checkpointing": False,
    "n_positions": 512,
    "num_beams": 4,
    "output_past": True,
    "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    "torch_dtype": "float32",
    "transformers_version": "4.6.0",
}


def test_keys_of_published_configs_are_taken_and_others_refused(tmp_path: Path) -> None:
    """What is for generation, and for programs of the past, changes nothing here."""
    settings = settings_of("t5", **PUBLISHED)
    config = models.model_config(settings)
    assert config.decoder_start_token_id == 0
    config.save_pretrained(tmp_path)
    models.build_model(config, settings)
    for key in ("numm_beams", "_from_model_config"):
        with pytest.raises(UserError, match=rf"^model\.config\.{key}: T5Config has no such setting"):
            models.model_config(settings_of("t5", **{key: 4}))


@pytest.mark.parametrize(("model_type", "key"), [("gemma4_text", "head_dim"), ("neomme", "sliding_window")])
def test_a_setting_that_differs_from_layer_to_layer(model_type: str, key: str) -> None:
    """Such a config has an error for whoever asks it for the one value."""
    from transformers import AutoConfig

    value = AutoConfig.for_model(model_type).to_dict()[key]
    config = models.model_config(settings_of(model_type, **{key: value}))
    assert config.to_dict()[key] == value


@pytest.mark.parametrize(("model_type", "task"), [("phi3", "causal-lm"), ("modernbert", "masked-lm")])
def test_a_default_padding_id_beyond_a_small_vocabulary(model_type: str, task: str) -> None:
    """The planner builds the model before there is a tokenizer."""
    config = {"model_type": model_type, "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 4} if model_type == "phi3" else {}
    data = {"source": "text.jsonl"}
    settings = load_config({"model": {"config": config, "task": task}, "data": data}).model
    models.build_model(models.model_config(settings), settings)
    given = load_config(
        {"model": {"config": {**config, "pad_token_id": 96}, "task": task}, "data": data}
    ).model
    with pytest.raises(UserError, match="building the model failed"):
        models.build_model(models.model_config(given), given)


@pytest.mark.parametrize("name", ["eager", "grouped_mm"])
def test_the_way_that_experts_are_computed(name: str) -> None:
    def built(**config: Any) -> Any:
        given = {"config": {"vocab_size": 300, **FAMILIES["llama"], **config}, "experts": name}
        settings = load_config({"model": given}).model
        return models.build_model(models.model_config(settings), settings)

    mixtral = built(model_type="mixtral", num_local_experts=4, num_key_value_heads=2)
    assert mixtral.config._experts_implementation == name
    with pytest.raises(UserError, match=r"model.experts: LlamaForCausalLM has no experts in one tensor"):
        built(model_type="llama")


def test_lists_within_a_list_are_no_layers() -> None:
    """They are never called: nothing would gather what is in them."""
    model_of = {"config": tiny_config("funnel"), "task": "masked-lm"}
    settings = load_config({"model": model_of, "data": {"source": "text.jsonl"}}).model
    model = models.build_model(models.model_config(settings), settings)
    layers = transformer_layers(model)
    assert {type(layer).__name__ for _, layer in layers} == {"FunnelLayer"}
    assert layers[0][0] == "funnel.encoder.blocks.0.0"


def test_models_that_are_not_of_the_task_are_refused() -> None:
    for model_type, task, told in (
        ("gpt2", "seq2seq-lm", "model.task: seq2seq-lm needs an encoder-decoder model"),
        ("musicgen", "causal-lm", "model.config: Multiple valid text configs"),
        ("gemma4_assistant", "causal-lm", "model.config: gemma4_assistant: Class validation error"),
    ):
        settings = ModelConfig(config={"model_type": model_type}, task=task)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=f"^{told}"):
            models.model_config(settings)
