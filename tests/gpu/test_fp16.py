"""fp16 with a dynamic loss scale, under DDP, FSDP2 and ZeRO.

DeepSpeed trains in fp16 only on GPUs. Because torch supports fp16 products on CPUs, the tests override the
accelerator's answer and remove the rule against fp16. Everything else is real.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from portable.config import RunConfig, load_config
from portable.engines.fsdp.device_loss_scale import DeviceLossScale
from portable.engines.loss_scale import STATE_NAMES
from portable.errors import ReportedElsewhereError, RunError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.ranks import RankPool
from tests.runs import configured, losses


@pytest.mark.parametrize("seed", range(3))
def test_loss_scale_matches_deepspeed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(scaling.dist, "get_rank", lambda: 1)  # the first rank prints
    draw = random.Random(seed)
    settings = {"initial_scale_power": 10, "loss_scale_window": 5, "hysteresis": 2, "min_loss_scale": 0.25}
    ours = DeviceLossScale(load_config({"fp16": settings}).fp16, torch.device("cpu"))
    theirs = scaling.DynamicLossScaler(
        init_scale=2**10,
        scale_window=5,
        min_scale=0.25,
        delayed_shift=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.half,
    )
    overflows = 0
    for _ in range(400):
        overflow = draw.random() < 0.4
        overflows += overflow
        exhausted = bool(ours.update(torch.tensor(overflow)))
        try:
            theirs.update_scale(overflow)
        except Exception as error:
            assert "already at minimum" in str(error)
            assert exhausted
            return
        assert not exhausted
        expected = {**{name: getattr(theirs, name) for name in STATE_NAMES}, "overflows": overflows}
        assert ours.read_state() == expected
        assert float(ours.scale) == theirs.cur_scale
    pytest.fail("the lowest scale was not reached")


# -- legs, on every kind of engine -------------------------------------------------------------------------


@contextmanager
def supported() -> Iterator[None]:
    """Let DeepSpeed train in fp16 on this CPU."""
    from deepspeed.accelerator import get_accelerator

    from portable.gpu.zero.runtime import import_deepspeed

    import_deepspeed("cpu")
    get_accelerator().is_fp16_supported = lambda: True
    with patch("portable.gpu.zero.checks.find_problems", return_value=()):
        yield
    del get_accelerator().is_fp16_supported


def leg(config: RunConfig, until: int) -> str:
    """Continue to the step ``until``, and save. Returns the error, or an empty string."""
    with supported():
        try:
            run_rank("cpu", config.replaced({"precision": "fp16", "train.stop_after": until}))
        except (RunError, ReportedElsewhereError) as error:
            return str(error)
        return ""


def search(folder: Path) -> list[tuple[float, float]]:
    """Return the scale of each step, and the number of overflows."""
    return [(row["loss_scale"], row["overflows"]) for row in read_metrics(folder) if "loss" in row]


def searching(folder: Path, corpus: Path, strategy: str, total: int, **fp16: Any) -> RunConfig:
    """Build a run whose initial scale is too high and which doubles after two updates without overflow."""
    scale = {"initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 2, **fp16}
    settings: dict[str, Any] = {"train__micro_batch_size": 3, "train__steps": total, "precision": "bf16"}
    settings |= {"checkpoint__export": False, "data__eval_fraction": 0, "log__sample_tokens": 0}
    settings |= {f"fp16__{name}": value for name, value in scale.items()}
    return configured(folder, corpus, strategy=strategy, **settings)


KINDS = ("full_shard", "zero3")


def saved(folder: Path, step: int) -> Any:
    return json.loads((folder / f"checkpoints/step-{step:06d}/loss_scale.json").read_text())


@pytest.mark.parametrize("strategy", KINDS)
def test_fp16_run_resumes_bit_for_bit_with_loss_scale(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ranks.run(2, leg, searching(whole, corpus, strategy, 8), 8) == ""
    for until in (4, 8):
        assert ranks.run(2, leg, searching(run, corpus, strategy, 8), until) == ""
    assert losses(run) == losses(whole) and search(run) == search(whole)
    assert saved(run, 8) == saved(whole, 8)
    assert search(whole)[-1][1] >= 1
    assert any(after > before for (before, _), (after, _) in pairwise(search(whole)))
    assert losses(whole)[8] < losses(whole)[1] - 0.1


@pytest.mark.parametrize("strategy", KINDS)
def test_fp16_run_ends_at_minimum_loss_scale(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    floor = {"initial_scale_power": 30, "min_loss_scale": 2.0**30}
    ended = ranks.run(2, leg, searching(tmp_path, corpus, strategy, 8, **floor), 8)
    for word in ("fp16", "bf16", "fp32", "fp16.min_loss_scale", "train.learning_rate"):
        assert word in ended
    assert not list((tmp_path / "checkpoints").glob("step-*"))


# Each class of engines stores the search differently, so the run moves to and from each.
ROUTE = (("no_shard", 2), ("zero2", 2), ("full_shard", 2), ("zero3", 2), ("no_shard", 1))


def test_fp16_loss_scale_moves_between_engines(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """No move restarts the search for the scale."""
    pytest.importorskip("deepspeed")
    total = 3 * len(ROUTE)
    for number, (strategy, world_size) in enumerate(ROUTE, 1):
        config = searching(tmp_path, corpus, strategy, total)
        assert ranks.run(world_size, leg, config, 3 * number) == ""
    scaler = DeviceLossScale(config.fp16, torch.device("cpu"))
    for scale, overflows in search(tmp_path):
        scaler.update(torch.tensor(overflows > scaler.read_state()["overflows"]))
        assert (float(scaler.scale), scaler.read_state()["overflows"]) == (scale, overflows)
    assert saved(tmp_path, total) == scaler.read_state()
    assert scaler.read_state()["overflows"] >= 2 and len({scale for scale, _ in search(tmp_path)}) > 1
