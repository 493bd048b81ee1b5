"""``--check-waits``: losses and callbacks that make the host wait, or XLA compile again, are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from portable import UserError
from portable.cli import run
from portable.config import Invocation, ModelConfig
from portable.model.build import build_model, model_config
from portable.model.parameters import replace_tensors
from portable.model.training_loss import IGNORED
from portable.private.of_transformers import no_value_checks
from portable.run.check_waits import Waits
from portable.run.rank import run_rank
from tests.runs import configured
from tests.tiny_models import tiny_config

if TYPE_CHECKING:
    from pathlib import Path

    from portable.backend import Batch
    from portable.config import RunConfig
    from portable.model.training_loss import Outputs
    from portable.run.callbacks import Run
    from tests.engines import Engines

HERE = __name__


def quiet(outputs: Outputs, batch: Batch) -> Any:
    assert outputs.log_probs is not None
    return -outputs.log_probs.sum(), (batch["labels"] != IGNORED).sum()


def reading(outputs: Outputs, batch: Batch) -> Any:
    assert outputs.log_probs is not None
    losses = -outputs.log_probs
    if losses.max() > 100:
        losses = losses.clamp(max=100)
    return losses.sum(), (batch["labels"] != IGNORED).sum()


def masking(outputs: Outputs, batch: Batch) -> Any:
    assert outputs.log_probs is not None
    valid = batch["labels"] != IGNORED
    return -outputs.log_probs[valid].sum(), valid.sum()


class Changing:
    """Another shape in each step."""

    needs = ("log_probs",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        assert outputs.log_probs is not None
        self.calls += 1
        losses = torch.nn.functional.pad(-outputs.log_probs, (0, self.calls))
        return losses.sum(), (batch["labels"] != IGNORED).sum()


for one in (quiet, reading, masking):
    one.needs = ("log_probs",)  # type: ignore[attr-defined]


class Looking:
    def on_step(self, run: Run) -> None:
        weight = next(run.model.parameters())
        run.log({"first": float(torch.ones(()) * len(weight))})


def checked(config: RunConfig) -> str:
    """What is refused; empty if nothing is."""
    try:
        run_rank(config.backend, config, waits=True)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"train__loss": f"{HERE}:quiet"}, ""),
        (
            {"train__loss": f"{HERE}:reading"},
            "train.loss: waits for the device in each step: a value is read",
        ),
        ({"train__loss": f"{HERE}:masking"}, "(a boolean mask as an index) at test_check_waits.py, line"),
        ({"train__callbacks": f"{HERE}:Looking"}, f"train.callbacks {HERE}:Looking: waits for the device"),
    ],
)
def test_what_waits_is_named(settings: dict[str, Any], told: str, tmp_path: Path, corpus: Path) -> None:
    found = checked(configured(tmp_path / "run", corpus, **settings))
    assert told in found and bool(told) == bool(found) and "\n" not in found
    assert not (tmp_path / "run").exists()


@pytest.mark.xla
@pytest.mark.parametrize(
    ("loss", "told"), [("quiet", ""), ("Changing", "graphs were compiled in 4 steps after the first")]
)
def test_what_compiles_again_is_named(
    loss: str, told: str, tmp_path: Path, corpus: Path, engines: Engines
) -> None:
    config = configured(tmp_path / "run", corpus, backend="xla", train__loss=f"{HERE}:{loss}")
    found = engines.run("xla", 2, checked, config)
    assert told in found and bool(told) == bool(found)


@pytest.mark.parametrize("model_type", ["llama", "bert", "lfm2"])  # causal, in both directions, recurrent
def test_no_mask_is_read(model_type: str) -> None:
    task = "masked-lm" if model_type == "bert" else "causal-lm"
    settings = ModelConfig.model_validate({"config": tiny_config(model_type), "task": task})
    model = build_model(model_config(settings), settings)
    replace_tensors(model, lambda _, p: torch.nn.Parameter(torch.zeros(p.shape)), lambda _, b: b)
    waits, tokens = Waits(), torch.ones(2, 8, dtype=torch.int64)
    with waits.looking(), no_value_checks():
        model(input_ids=tokens, attention_mask=tokens)
    assert not waits.found


def test_by_the_switch(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path / "run", corpus, train__loss=f"{HERE}:quiet")
    assert run(Invocation(config, check_waits=True)) == 0
    assert "4 steps: no code of yours waits for the device" in capsys.readouterr().out
    with pytest.raises(UserError, match="--check-waits: takes a few steps"):
        run(Invocation(config, check_waits=True, profile=True))
