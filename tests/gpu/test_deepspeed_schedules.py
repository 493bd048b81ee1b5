"""Schedules with DeepSpeed's names, compared with DeepSpeed's classes at each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("deepspeed")

from pathlib import Path

from portable.config import RunConfig, load_config
from portable.gpu.zero import runtime as zero_runtime
from portable.optim.schedule import OneCycle, build_schedule
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests import published
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import configured, losses

STEPS = 60
BLOCKS = yaml.safe_load((Path(published.__file__).parent / "deepspeed_schedules.yaml").read_text())


def json_of(block: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "scheduler": block}


def taken_over(block: dict[str, Any]) -> RunConfig:
    train = {"steps": STEPS}
    given = {"precision": "fp32", "deepspeed": {"config": json_of(block)}, "train": train}
    return resolve_run(load_config(given), "cpu", 2).config


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_deepspeed_schedules_match_rates_and_betas(block: dict[str, Any]) -> None:
    zero_runtime.import_deepspeed("cpu")
    from deepspeed.runtime import lr_schedules

    config = taken_over(block)
    ours = build_schedule(config.train, STEPS)
    group: dict[str, Any] = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": config.train.learning_rate}
    optimizer = torch.optim.AdamW([group], betas=(0.7, 0.71))
    theirs = getattr(lr_schedules, block["type"])(optimizer, **block["params"])
    for step in range(STEPS):
        (group,) = optimizer.param_groups
        assert ours(step) == pytest.approx(group["lr"], rel=1e-12, abs=1e-18), step
        betas = ours.compute_betas(step) if isinstance(ours, OneCycle) else None
        assert (betas or (0.7, 0.71)) == pytest.approx(group["betas"], rel=1e-12), step
        optimizer.step()
        theirs.step()  # after the optimizer's, as DeepSpeed's engine does


def rates_of_engine(config: RunConfig) -> list[tuple[float, tuple[float, float]]]:
    """Return the learning rates and betas of the optimizer in the engine."""
    with opened(config) as trial:
        seen = []
        inner: Any = getattr(trial.engine, "_engine", None)
        inner = inner.optimizer if inner is not None else trial.engine._optimizer
        for _ in range(4):
            trial.step()
            seen.append((inner.param_groups[0]["lr"], inner.param_groups[0]["betas"]))
        return seen


CYCLE: dict[str, Any] = {
    "train__schedule": "OneCycle",
    "train__schedule_params": {"cycle_min_lr": 0.001, "cycle_first_step_size": 2},
    "train__warmup_steps": 0,
    "train__micro_batch_size": 1,
}


def test_deepspeed_schedule_sets_rates_of_optimizer(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    seen = ranks.run(2, rates_of_engine, configured(tmp_path, corpus, strategy="zero3", **CYCLE))
    assert [rate for rate, _ in seen] == pytest.approx([0.001, 0.002, 0.003, 0.002])
    assert [betas[0] for _, betas in seen] == pytest.approx([0.8, 0.85, 0.8, 0.85])
    assert {betas[1] for _, betas in seen} == {0.99}


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    return run_rank("cpu", configured(folder, corpus, **{"train__micro_batch_size": 1} | settings))


def test_one_cycle_schedule_resumes(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """Adam's betas also continue, which affects the losses."""
    settings = {"strategy": "zero1", **CYCLE}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ranks.run(1, leg, whole, corpus, settings) == 0
    for stop in (3, None):
        assert ranks.run(1, leg, run, corpus, {**settings, "train__stop_after": stop}) == 0
    assert losses(run) == losses(whole)
