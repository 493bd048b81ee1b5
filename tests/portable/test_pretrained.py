"""Pretrained weights: those that ``from_pretrained`` gives; nothing is silently random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from portable.config import load_config
from portable.errors import UserError
from portable.model import build as models
from portable.model.parameters import state_tensors
from portable.model.pretrained import PretrainedWeights, pretrained_weights

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MOE = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2}
# By what transformers does to them between the file and the model.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("causal-lm", SMALL),  # another name for the head
    "mixtral": ("causal-lm", {**MOE, "num_local_experts": 4}),  # experts are stacked
    "llama": ("causal-lm", {**SMALL, "tie_word_embeddings": True}),
    "bert": ("masked-lm", SMALL),
    "t5": ("seq2seq-lm", {"vocab_size": 96, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}


def chosen(task: str, **model: Any) -> Any:
    data = {} if task == "causal-lm" else {"data": {"source": "text.jsonl"}}
    return load_config({"model": {"task": task, **model}, **data}).model


def built(settings: Any) -> Any:
    return models.build_model(models.model_config(settings), settings)


def saved(folder: Path, model_type: str, task: str, config: dict[str, Any]) -> Any:
    """A checkpoint in the layout that transformers publishes, of numbers that no initialization draws."""
    import transformers

    auto: Any = getattr(transformers, models.AUTO_CLASSES[task])
    model = auto.from_config(transformers.AutoConfig.for_model(model_type, **config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32)


def read(weights: PretrainedWeights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(weight.read().copy()) for name, weight in weights.found.items()}


def rewritten(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_weights_are_those_of_from_pretrained(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, config = ARCHITECTURES[model_type]
    theirs = state_tensors(saved(tmp_path, model_type, task, config))
    settings = chosen(task, name_or_path=str(tmp_path))
    model = built(settings)

    def whole(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model was loaded into the host's memory")

    monkeypatch.setattr(type(model), "from_pretrained", whole)
    weights = pretrained_weights(settings, model)
    assert weights.notes() == []
    ours = read(weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_slices_of_stacked_experts_are_slices_of_the_whole(tmp_path: Path) -> None:
    theirs = state_tensors(saved(tmp_path, "mixtral", *ARCHITECTURES["mixtral"]))
    settings = chosen("causal-lm", name_or_path=str(tmp_path))
    found = pretrained_weights(settings, built(settings)).found
    name = "model.layers.1.mlp.experts.gate_up_proj"
    part = found[name].read((slice(1, 3), slice(5, 9), slice(0, 32)))
    assert torch.equal(torch.from_numpy(part), theirs[name][1:3, 5:9])


def test_a_table_that_cannot_be_read_leaves_the_work_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = state_tensors(saved(tmp_path, "mixtral", *ARCHITECTURES["mixtral"]))
    settings = chosen("causal-lm", name_or_path=str(tmp_path))
    model = built(settings)
    monkeypatch.setattr("portable.model.pretrained._translated", lambda *_: None)
    ours = read(pretrained_weights(settings, model))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_language_model_without_its_head_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "gpt_neox", "causal-lm", {**SMALL, "tie_word_embeddings": False})

    def beheaded(tensors: dict[str, torch.Tensor]) -> None:
        tensors["a.head.of.old"] = tensors.pop("embed_out.weight")

    rewritten(tmp_path, beheaded)
    settings = chosen("causal-lm", name_or_path=str(tmp_path))
    with pytest.raises(UserError, match=r"output head lm_head\.weight \(it has a\.head\.of\.old, not used\)"):
        pretrained_weights(settings, built(settings))


def test_what_the_checkpoint_has_for_nothing_is_told(tmp_path: Path) -> None:
    """A causal language model's folder for a classifier: the head goes, another comes."""
    saved(tmp_path, "llama", "causal-lm", {**SMALL, "tie_word_embeddings": False})
    rewritten(
        tmp_path, lambda tensors: tensors.update({f"model.layers.{i}.new": torch.ones(2) for i in (0, 1)})
    )
    settings = chosen("sequence-classification", name_or_path=str(tmp_path))
    assert pretrained_weights(settings, built(settings)).notes() == [
        "newly initialized: score.weight",
        "in the checkpoint but not used: lm_head.weight, model.layers.*.new (2)",
    ]


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "causal-lm", SMALL)
    save_file({"something.else": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    settings = chosen("causal-lm", name_or_path=str(tmp_path))
    with pytest.raises(UserError, match="none of the checkpoint's 1 tensors belongs to a LlamaForCausalLM"):
        pretrained_weights(settings, built(settings))


def test_a_tied_pair_that_differs_in_the_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "causal-lm", {**SMALL, "tie_word_embeddings": False})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    settings = chosen("causal-lm", name_or_path=str(tmp_path))
    with pytest.raises(UserError, match=r"lm_head\.weight differ in the checkpoint, but its config ties"):
        pretrained_weights(settings, built(settings))


# -- quantized -----------------------------------------------------------------------------------------------


PROJECTION = "model.layers.0.mlp.up_proj.weight"


def test_what_cannot_be_dequantized_here_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "causal-lm", SMALL)
    rewritten(tmp_path, lambda tensors: tensors.update({PROJECTION: tensors[PROJECTION].to(torch.int8)}))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for description, message in (
        ({}, r"up_proj\.weight is stored as .*use a checkpoint in float32"),
        ({"quant_method": "gptq", "bits": 4}, r"up_proj\.weight belongs to no weight"),
        ({"quant_method": "a new one"}, r"quantized \(a new one\)"),
    ):
        path.write_text(json.dumps(config | ({"quantization_config": description} if description else {})))
        settings = chosen("causal-lm", name_or_path=str(tmp_path))
        with pytest.raises(UserError, match=message):
            pretrained_weights(settings, built(settings))
