"""fp16 with its search for a loss scale, under DDP and FSDP2. torch multiplies fp16 on CPUs as well."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from portable.config import load_config
from portable.engines.fsdp.device_loss_scale import DeviceScaler
from portable.engines.loss_scale import STATE, LossScale
from portable.errors import RunError
from portable.optim.sharded import local
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.run.prepare import prepare
from portable.run.rank import run_rank
from portable.run.restore import restore
from portable.run.settle import settle
from tests.gpu.test_fsdp import losses
from tests.gpu.test_parity import Losses, assert_close, our_losses
from tests.parity import opened
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

FP16: dict[str, Any] = {
    "precision": "fp16",
    "train__micro_batch_size": 1,
    "fp16__initial_scale_power": 12,
    "log__sample_tokens": 0,
}
ONE_OVERFLOW_HALVES = {"fp16__hysteresis": 1}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    return our_losses(configured(tmp_path_factory.mktemp("truth"), corpus))


@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, "no_shard"), (2, "no_shard"), (2, "full_shard"), (2, "shard_grad_op")]
)
def test_fp16_follows_fp32(
    world_size: int, strategy: str, truth: Losses, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    found = ranks.run(world_size, our_losses, configured(tmp_path, corpus, strategy=strategy, **FP16))
    assert_close(found, truth, 1e-2)
    assert [loss for loss, _ in found] != [loss for loss, _ in truth]  # it did compute in fp16


@pytest.mark.parametrize("seed", range(3))
def test_the_search_is_deepspeeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(scaling.dist, "get_rank", lambda: 1)  # the first rank prints
    draw = random.Random(seed)
    settings = {"initial_scale_power": 10, "loss_scale_window": 5, "hysteresis": 2, "min_loss_scale": 0.25}
    ours = DeviceScaler(load_config({"fp16": settings}).fp16, torch.device("cpu"))
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
        expected = {**{name: getattr(theirs, name) for name in STATE}, "overflows": overflows}
        assert ours.state() == expected
        assert float(ours.scale) == theirs.cur_scale
    pytest.fail("the lowest scale was not reached")


def overflow_of_one_rank(folder: Path, corpus: Path, strategy: str) -> list[Any]:
    """Two steps; the gradient of the last rank's last micro-batch overflows in the first of them."""
    config = configured(folder, corpus, strategy=strategy, **FP16, **ONE_OVERFLOW_HALVES)
    with opened(config) as trial:
        backend, engine = trial.backend, trial.engine
        seen: list[Any] = []
        last_rank = backend.rank == backend.world_size - 1

        def infinite(gradient: torch.Tensor) -> torch.Tensor:
            return torch.full_like(gradient, torch.inf) if last_rank and not seen else gradient

        def poison(module: Any, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(infinite)

        engine.model.model.norm.register_forward_hook(poison)
        parameters = list(engine.model.parameters())
        for _ in range(2):
            before = [local(p.detach()).clone() for p in parameters]
            trial.step(1e-3)
            changed = not all(torch.equal(local(p), old) for p, old in zip(parameters, before, strict=True))
            everywhere = (backend.any(changed), not backend.any(not changed))
            seen.append((everywhere, backend.metrics()))
        assert engine.health().first_bad_update is None
        return seen


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_an_overflow_on_one_rank_masks_the_update_on_all(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    first, second = ranks.run(2, overflow_of_one_rank, tmp_path, corpus, strategy)
    assert first == ((False, False), {"overflows": 1, "loss_scale": 2.0**11})
    assert second == ((True, True), {"overflows": 1, "loss_scale": 2.0**11})


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    return run_rank("cpu", configured(folder, corpus, **{**FP16, **settings}))


def test_goes_on_bit_for_bit_scale_included(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    # Doubled every third update, until it overflows: the search is under way at every step.
    settings: dict[str, Any] = {
        "fp16__initial_scale_power": 18,
        "fp16__loss_scale_window": 3,
        "train__global_batch_size": 2,
        **ONE_OVERFLOW_HALVES,
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ranks.run(2, leg, whole, corpus, settings) == 0
    assert ranks.run(2, leg, run, corpus, settings | {"train__stop_after": 4}) == 0
    assert ranks.run(2, leg, run, corpus, settings) == 0
    assert losses(run) == losses(whole)
    scales = {row["step"]: row["loss_scale"] for row in read_metrics(whole) if "loss_scale" in row}
    assert {row["step"]: row["loss_scale"] for row in read_metrics(run) if "loss_scale" in row} == scales
    assert len(set(scales.values())) > 2
    saved = [json.loads((f / "checkpoints/step-000008/loss_scale.json").read_text()) for f in (whole, run)]
    assert saved[0] == saved[1]
    assert saved[0]["cur_iter"] == 8
    # Another strategy on another number of ranks goes on with the scale as well.
    assert ranks.run(1, kept, run, corpus, {**settings, "strategy": "no_shard"}) == saved[0]["cur_scale"]


def kept(folder: Path, corpus: Path, settings: dict[str, Any]) -> float:
    backend = create_backend("cpu")
    backend.start()
    settled = settle(configured(folder, corpus, **{**FP16, **settings}), backend.name)
    restore(prepare(settled, backend), folder / "checkpoints" / "step-000008")
    scale = backend.metrics()["loss_scale"]
    backend.stop()
    return scale


def test_at_its_floor_the_run_ends_with_advice(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    settings = {"fp16__initial_scale_power": 32, "fp16__min_loss_scale": 2.0**32, **ONE_OVERFLOW_HALVES}
    told = ranks.run(2, ended, tmp_path, corpus, settings)
    for word in ("fp16", "bf16", "fp32", "fp16.min_loss_scale", "train.learning_rate"):
        assert word in told
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def ended(folder: Path, corpus: Path, settings: dict[str, Any]) -> str:
    with pytest.raises(RunError) as stopped:
        leg(folder, corpus, settings)
    return str(stopped.value)


def test_without_a_search_nothing_is_counted() -> None:
    assert LossScale(None).metrics() == {}
