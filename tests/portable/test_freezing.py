"""Selection of the frozen parameters, and their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from portable.config import RunConfig
from portable.converters import open_checkpoint
from portable.errors import UserError
from portable.model.build import build_and_freeze_model, load_model_config
from portable.model.freezing import build_tied_parameter_notes, freeze_parameters, list_frozen_names
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.runs import configured, write_pretrained


@pytest.fixture
def run_of(tmp_path: Path, corpus: Path) -> Any:
    return lambda **settings: configured(tmp_path, corpus, **settings)


def model_of(config: RunConfig) -> PreTrainedModel:
    return build_and_freeze_model(load_model_config(config.model), config)


def trained(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_freezing_selects_parameters_by_pattern(run_of: Any) -> None:
    untied = {"model__config__tie_word_embeddings": False}
    model = model_of(run_of(train__trainable=["lm_head", r"layers\.1\."], train__frozen="norm", **untied))
    found = trained(model)
    assert "lm_head.weight" in found and "model.embed_tokens.weight" not in found
    assert {name.split(".")[2] for name in found if "layers" in name} == {"1"}
    assert not any("norm" in name for name in found)
    assert sorted(found + list_frozen_names(model)) == sorted(name for name, _ in model.named_parameters())
    assert len(trained(model_of(run_of(train__frozen="embed", **untied)))) == len([*model.parameters()]) - 1


def test_freezing_treats_tied_parameter_as_one(run_of: Any) -> None:
    config = run_of(train__trainable="lm_head", model__config__tie_word_embeddings=True)
    model = model_of(config)
    assert trained(model) == ["model.embed_tokens.weight"]
    assert len(build_tied_parameter_notes(model, config.train)) == 1 and not build_tied_parameter_notes(
        model, run_of().train
    )
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    freeze_parameters(model, ["lm_head.weight"], torch.bfloat16)
    assert head.weight is embedding.weight and embedding.weight.dtype == torch.bfloat16
    assert not trained(model)


def test_frozen_parameters_stay_bit_identical(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a stop, a resume and an export, frozen parameters equal the pretrained ones bit for bit."""
    source = write_pretrained(tmp_path / "pretrained", corpus)
    settings: dict[str, Any] = {
        "strategy": "no_shard",
        "precision": "bf16",
        "model__config": None,
        "model__name_or_path": str(source),
        "train__trainable": ["lm_head", r"layers\.2"],
        "train__parameter_groups": [{"pattern": "lm_head", "learning_rate": 1e-2}],
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_rank("cpu", configured(whole, corpus, **settings)) == 0
    assert run_rank("cpu", configured(run, corpus, **settings, train__stop_after=4)) == 0
    assert "parameters, of which 36,960 are trained" in capsys.readouterr().err
    other = {**settings, "train__frozen": "q_proj"}
    with pytest.raises(UserError, match=r"train\.frozen: \[\] there"):
        run_rank("cpu", configured(run, corpus, **other))
    assert run_rank("cpu", configured(run, corpus, **settings)) == 0
    given, alone, ours = (
        open_checkpoint(folder).tensors for folder in (source, whole / "final", run / "final")
    )
    for name, tensor in given.items():
        trained = name == "lm_head.weight" or "layers.2" in name
        assert ours[name].dtype == alone[name].dtype == ("F32" if trained else tensor.dtype)
        assert ours[name].read().tobytes() == alone[name].read().tobytes()
        assert trained or ours[name].read().tobytes() == tensor.read().tobytes()
    (row, *_) = read_metrics(run)
    assert row["learning_rate/lm_head"] == pytest.approx(row["learning_rate"] / 3e-3 * 1e-2)
