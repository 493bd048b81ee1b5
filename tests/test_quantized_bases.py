"""Training on a quantized base: on every engine as on its floats, and exported in its own layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from converters.cli import main as convert
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
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
    """A model as blocks of FP8 and as packed INT4, and each of these as floats."""
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
def test_as_on_its_floats(
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
    # The same codes as of the floats that it would have exported.
    like = [str(tmp_path / "floats" / "final"), str(tmp_path / "like"), "--quiet"]
    assert convert([*like, "--quantize-like", str(bases / form)]) == 0
    again = load_file(tmp_path / "like" / "model.safetensors")
    assert all(torch.equal(raw(value), raw(again[name])) for name, value in tensors.items())
    key = "quantization_config"
    configs = [json.loads((folder / "config.json").read_text())[key] for folder in (made, bases / form)]
    assert configs[0] == configs[1]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_an_adapter_merged_in_the_layout_of_its_base(bases: Path, corpus: Path, tmp_path: Path) -> None:
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
    # Rounding to four bits takes some of what was learned.
    assert (found - tuned).abs().mean() < (before - tuned).abs().mean()
