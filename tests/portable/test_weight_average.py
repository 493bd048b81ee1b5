"""Average of the weights: it matches a plain loop on every engine, and is saved, evaluated and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from portable.converters import open_checkpoint
from portable.run.evaluation import evaluate_all_sources
from tests.engines import ENGINES, Engines
from tests.gpu.test_parity import plain_losses
from tests.parity import opened
from tests.portable.test_custom_optimizer import leg
from tests.runs import configured

# Not Adam, which blows up the rounding of gradients near zero.
BATCH: dict[str, Any] = {
    "train__global_batch_size": 12,
    "train__micro_batch_size": 1,
    "train__optimizer": "sgd",
    "train__learning_rate": 3e-2,
}
DECAY = 0.8
IMPLY = ("full_shard", "zero2", "zero3, offload", "xla")


def averaged(folder: Path, config: Any) -> dict[str, Any]:
    """Train on one rank, evaluate with the average and without it, and save. Returns the losses."""
    with opened(config) as trial:
        for _ in range(4):
            trial.step()
        run, found = trial.run, {}
        assert run.data.first_eval is not None
        plain = replace(run, config=run.config.replaced({"train.eval_ema": False}))
        for what, one in {"weights": plain, "average": run, "weights again": plain}.items():
            found[what] = evaluate_all_sources(one, trial.engine)["eval_loss"]
        folder.mkdir(exist_ok=True)
        trial.engine.save_shards(folder, background=False).wait()
        return found


@pytest.fixture(scope="module")
def plain_average(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the average in a plain loop, by name."""
    found: dict[str, torch.Tensor] = {}
    config = configured(tmp_path_factory.mktemp("truth"), corpus, **BATCH, train__steps=4)
    model: Any = None

    def prepared(given: Any) -> list[dict[str, Any]]:
        nonlocal model
        model = given
        found.update({name: p.detach().clone() for name, p in model.named_parameters()})
        decays = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]

    def made(groups: Any) -> Any:
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)

        def after(*_: Any) -> None:
            for name, p in model.named_parameters():
                found[name] = DECAY * found[name] + (1 - DECAY) * p.detach()

        optimizer.register_step_post_hook(after)
        return optimizer

    plain_losses(config, prepared=prepared, made=made)
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in IMPLY else pytest.mark.exhaustive) for n in ENGINES],
)
def test_weight_average_matches_plain_loop(
    name: str, plain_average: dict[str, torch.Tensor], corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    config = configured(
        tmp_path / "run",
        corpus,
        **BATCH,
        train__steps=4,
        train__ema=DECAY,
        train__eval_ema=True,
        **ENGINES[name].settings,
    )
    found = engines.run(name, ENGINES[name].sizes[0], averaged, tmp_path / "saved", config)
    state = open_checkpoint(tmp_path / "saved").optimizer
    assert state is not None
    for key, expected in plain_average.items():
        values = torch.from_numpy(state.state[key]["ema"].read())  # type: ignore[union-attr]
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    assert found["weights"] == found["weights again"]
    assert abs(found["average"] - found["weights"]) > 1e-4


@pytest.mark.xla
def test_weight_average_moves_between_engines_and_is_exported(
    corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    given: dict[str, Any] = {
        **BATCH,
        "train__ema": DECAY,
        "train__optimizer": "torch.optim:NAdam(momentum_decay=0.004)",
        "train__learning_rate": 1e-3,
        "checkpoint__export_ema": True,
    }
    assert leg(tmp_path / "whole", corpus, {**given, "strategy": "no_shard"}) == 0
    for name, size, until in [("full_shard", 3, 2), ("zero2", 2, 3), ("xla", 2, 5), ("zero3", 2, 6)]:
        there = {**given, **ENGINES[name].settings, "train__stop_after": until}
        assert engines.run(name, size, leg, tmp_path / "moving", corpus, there) == 0
    ours, theirs = (load_file(tmp_path / one / "final" / "model.safetensors") for one in ("moving", "whole"))
    checkpoint = open_checkpoint(tmp_path / "whole")
    assert checkpoint.optimizer is not None and ours.keys() == theirs.keys() == checkpoint.tensors.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-6)
        average = torch.from_numpy(checkpoint.optimizer.state[name]["ema"].read())  # type: ignore[union-attr]
        assert torch.equal(value, average)
        assert not torch.equal(value, torch.from_numpy(checkpoint.tensors[name].read()))
