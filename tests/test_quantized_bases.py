"""Training on a quantized base: equal to its floats on every engine, and exported in the base's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from portable.converters.cli import main as convert
from portable.errors import UserError
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.run.prepare import prepare_run
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests.engines import Engines
from tests.parity import launched
from tests.runs import TINY_MODEL, configured

SIZES = {**TINY_MODEL, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
STEPS = {
    "train__steps": 2,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 2,
    "model__config": None,
}


@pytest.fixture(scope="module")
def bases(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in blocks of FP8 and in packed INT4, and each of these as floats."""
    folder = tmp_path_factory.mktemp("bases")
    assert run_rank("cpu", configured(folder, corpus, train__steps=1, model__config=SIZES)) == 0
    for form in ("fp8-block", "int4"):
        codes, floats = folder / form, folder / f"{form} floats"
        assert convert([str(folder / "final"), str(codes), "--quantize", form, "--quiet"]) == 0
        assert convert([str(codes), str(floats), "--dequantize", "float32", "--quiet"]) == 0
    return folder


def losses(
    engines: Engines, engine: str, size: int, folder: Path, corpus: Path, settings: Any
) -> list[float]:
    config = configured(folder, corpus, **{**STEPS, "train__micro_batch_size": 4 // size // 2, **settings})
    assert engines.run(engine, size, launched, config) == 0
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize(
    ("form", "engine", "size"), [("int4", "full_shard", 2), ("fp8-block", "zero3", 2), ("int4", "xla", 2)]
)
def test_quantized_base_trains_like_its_floats(
    form: str, engine: str, size: int, engines: Engines, bases: Path, corpus: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"strategy": engine} if engine != "xla" else {"backend": "xla"}
    there = {"model__name_or_path": str(bases / form), "checkpoint__export": "like_base"}
    found = losses(engines, engine, size, tmp_path / "codes", corpus, {**settings, **there})
    there = {"model__name_or_path": str(bases / f"{form} floats")}
    wanted = losses(engines, engine, size, tmp_path / "floats", corpus, {**settings, **there})
    assert found == wanted and found[1] < found[0]
    base, made = load_file(bases / form / "model.safetensors"), tmp_path / "codes" / "final"
    tensors = load_file(made / "model.safetensors")
    assert {name: (value.dtype, value.shape) for name, value in tensors.items()} == {
        name: (value.dtype, value.shape) for name, value in base.items()
    }
    # The codes equal the quantized exported floats.
    like = [str(tmp_path / "floats" / "final"), str(tmp_path / "like"), "--quiet"]
    assert convert([*like, "--quantize-like", str(bases / form)]) == 0
    again = load_file(tmp_path / "like" / "model.safetensors")
    assert all(torch.equal(raw(value), raw(again[name])) for name, value in tensors.items())
    key = "quantization_config"
    configs = [json.loads((folder / "config.json").read_text())[key] for folder in (made, bases / form)]
    assert configs[0] == configs[1]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_adapter_merges_into_layout_of_quantized_base(bases: Path, corpus: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {**STEPS, "adapter__type": "lora", "train__learning_rate": 0.02}
    settings["model__name_or_path"] = str(bases / "int4")
    for name, export in (("alone", True), ("merged", "like_base")):
        config = configured(tmp_path / name, corpus, **settings, checkpoint__export=export)
        assert run_rank("cpu", config) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "final", dtype=torch.float32)
    base: Any = AutoModelForCausalLM.from_pretrained(bases / "int4 floats")
    tokens = torch.arange(90, 110)[None]
    with torch.no_grad():
        before = base(tokens).logits
        tuned = PeftModel.from_pretrained(base, str(tmp_path / "alone" / "final"))(tokens).logits
        found = merged(tokens).logits
    # Rounding to four bits loses a part of the training.
    assert (found - tuned).abs().mean() < (before - tuned).abs().mean()


MIXTURE = {
    "model_type": "deepseek_v3",
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(scope="module")
def mixture(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a mixture of experts in block-wise FP8 with a multi-token prediction layer, like DeepSeek-V3."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("mixture")
    config = configured(folder, corpus, train__steps=1, data__packing=True, model__config=MIXTURE)
    assert run_rank("cpu", config) == 0
    path = folder / "final" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.experts.0.gate_proj.weight"] = torch.randn(128, 128)
    tensors["model.layers.2.enorm.weight"] = torch.ones(128)
    save_file(tensors, path, {"format": "pt"})
    assert convert([str(folder / "final"), str(folder / "fp8"), "--quantize", "fp8-block", "--quiet"]) == 0
    return folder / "fp8"


def test_like_base_export_of_mixture_has_published_layout(
    mixture: Path, corpus: Path, tmp_path: Path
) -> None:
    settings = {**STEPS, "model__name_or_path": str(mixture), "data__packing": True}
    config = configured(tmp_path / "run", corpus, **settings, checkpoint__export="like_base")
    assert run_rank("cpu", config) == 0
    base = load_file(mixture / "model.safetensors")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in final.items()} == {
        name: (t.dtype, t.shape) for name, t in base.items()
    }
    untrained = [name for name in base if name.startswith("model.layers.2.")]
    assert len(untrained) == 3 and all(torch.equal(raw(base[name]), raw(final[name])) for name in untrained)
    trained = "model.layers.1.mlp.experts.1.gate_proj.weight"
    assert not torch.equal(raw(base[trained]), raw(final[trained]))
    assert "`model.layers.*.enorm.weight`" in (tmp_path / "run" / "final" / "README.md").read_text()


def test_adapter_merges_into_quantized_mixture(mixture: Path, corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**STEPS, "model__name_or_path": str(mixture), "data__packing": True}
    settings |= {"adapter__type": "lora", "adapter__target_modules": ["o_proj", "kv_b_proj"]}
    config = configured(tmp_path / "run", corpus, **settings, checkpoint__export="like_base")
    assert run_rank("cpu", config) == 0
    base = load_file(mixture / "model.safetensors")
    assert load_file(tmp_path / "run" / "final" / "model.safetensors").keys() == base.keys()
    config = configured(tmp_path / "alone", corpus, **settings)
    assert run_rank("cpu", config) == 0
    merge = [str(tmp_path / "alone" / "final"), "--merge-into", str(mixture), "--dequantize", "--quiet"]
    assert convert([*merge, str(tmp_path / "floats")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())
    assert convert([*merge, str(tmp_path / "codes"), "--quantize-like", str(mixture)]) == 0
    codes = load_file(tmp_path / "codes" / "model.safetensors")
    assert {name: t.dtype for name, t in codes.items()} == {name: t.dtype for name, t in base.items()}
    assert "quantization_config" in json.loads((tmp_path / "codes" / "config.json").read_text())


def test_like_base_export_with_additional_parameter_is_rejected(
    mixture: Path, corpus: Path, tmp_path: Path
) -> None:
    config = configured(
        tmp_path / "run",
        corpus,
        **STEPS,
        model__name_or_path=str(mixture),
        model__function="tests.test_quantized_bases:add_a_bias",
        checkpoint__export="like_base",
    )
    with pytest.raises(UserError, match=r"like_base: .* does not contain the tensor lm_head\.bias of"):
        prepare_run(resolve_run(config, "cpu"), create_backend("cpu"))


def add_a_bias(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features))
