"""fp16 with its search for a loss scale, under DDP, FSDP2 and ZeRO.

DeepSpeed trains in fp16 on GPUs only. torch multiplies it on CPUs as well, so the accelerator is said to
support it, and the run's precision is set past the rule that knows better. All else is real.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from portable.checkpoint.store import Checkpoints
from portable.config import RunConfig, load_config
from portable.engines.fsdp.device_loss_scale import DeviceScaler
from portable.engines.loss_scale import STATE
from portable.errors import RunError
from portable.loop import steps
from portable.registry import create_backend
from portable.run.batches import train_loader
from portable.run.prepare import prepare
from portable.run.resolve import resolve
from portable.run.restore import restore
from portable.run.save import save
from tests.ranks import RankPool
from tests.runs import configured


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


# -- legs, on every kind of engine -------------------------------------------------------------------------


class Leg(NamedTuple):
    """What a leg came to: each step's loss and scale, the search as it was loaded, and how it ended."""

    steps: list[tuple[float, float]]
    loaded: dict[str, Any]
    figures: dict[str, float]
    ended: str


@contextmanager
def supported() -> Iterator[None]:
    """Let DeepSpeed train in fp16 on this CPU."""
    from deepspeed.accelerator import get_accelerator

    from gpu.zero.runtime import import_deepspeed

    import_deepspeed("cpu")
    get_accelerator().is_fp16_supported = lambda: True
    yield
    del get_accelerator().is_fp16_supported


def leg(config: RunConfig, until: int) -> Leg:
    """Go on from the newest checkpoint to the step ``until``, and save."""
    with supported():
        backend = create_backend("cpu")
        resolved = resolve(config, backend.name)
        resolved.config.__dict__["precision"] = "fp16"  # past the rule that a CPU does not train in it
        backend.start()
        folder, taken, ended = Path(config.output_dir), [], ""
        try:
            run = prepare(resolved, backend)
            checkpoints = Checkpoints(folder / "checkpoints", keep=None, rank=backend.rank)
            restored = restore(run, checkpoints.latest())
            engine: Any = restored.engine
            probe = folder / f"probe-{backend.rank}"
            probe.mkdir(parents=True, exist_ok=True)
            engine._scaler.save(probe)
            loaded = json.loads((probe / "loss_scale.json").read_text())
            batches = iter(train_loader(run, restored.progress.samples))
            try:
                for result in steps(run, engine, batches, restored.progress, until):
                    taken.append((float(result.loss), backend.metrics()["loss_scale"]))
                assert engine.health().first_bad_update is None
            except RunError as error:
                return Leg(taken, loaded, backend.metrics(), str(error))
            batches.close()
            save(run, checkpoints, engine, restored.progress)
            checkpoints.finish()
            backend.barrier()
            return Leg(taken, loaded, backend.metrics(), ended)
        finally:
            backend.stop()


def searching(folder: Path, corpus: Path, strategy: str, total: int, **fp16: Any) -> RunConfig:
    """A run whose scale begins too high, and doubles after every second update that does not overflow."""
    scale = {"initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 2, **fp16}
    settings: dict[str, Any] = {"train__micro_batch_size": 3, "train__steps": total, "precision": "bf16"}
    settings |= {f"fp16__{name}": value for name, value in scale.items()}
    return configured(folder, corpus, strategy=strategy, **settings)


KINDS = ("full_shard", "zero3")


def saved(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"checkpoints/step-{step:06d}/loss_scale.json").read_text())
    return found


@pytest.mark.parametrize("strategy", KINDS)
def test_goes_on_bit_for_bit_scale_included(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    whole = ranks.run(2, leg, searching(tmp_path / "whole", corpus, strategy, 8), 8)
    config = searching(tmp_path / "run", corpus, strategy, 8)
    first, rest = ranks.run(2, leg, config, 4), ranks.run(2, leg, config, 8)
    assert first.steps + rest.steps == whole.steps
    assert saved(tmp_path / "run", 8) == saved(tmp_path / "whole", 8)
    assert whole.figures["overflows"] >= 1
    scales = [scale for _, scale in whole.steps]
    assert any(after > before for before, after in pairwise(scales))
    assert whole.steps[-1][0] < whole.steps[0][0] - 0.1


@pytest.mark.parametrize("strategy", KINDS)
def test_at_its_floor_the_run_ends_with_advice(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    floor = {"initial_scale_power": 30, "min_loss_scale": 2.0**30}
    ended = ranks.run(2, leg, searching(tmp_path, corpus, strategy, 8, **floor), 8).ended
    for word in ("fp16", "bf16", "fp32", "fp16.min_loss_scale", "train.learning_rate"):
        assert word in ended
    assert not list((tmp_path / "checkpoints").glob("step-*"))


# Each class of engines, with its own way to keep the search, is moved to and from.
ROUTE = (("no_shard", 2), ("zero2", 2), ("full_shard", 2), ("zero3", 2), ("no_shard", 1))


def test_the_scale_and_its_counters_move_along(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    pytest.importorskip("deepspeed")
    before: dict[str, Any] = {}
    scales = []
    for number, (strategy, world_size) in enumerate(ROUTE, 1):
        config = searching(tmp_path, corpus, strategy, 3 * len(ROUTE))
        done = ranks.run(world_size, leg, config, 3 * number)
        if before:
            assert done.loaded == before, f"moved to {strategy} on {world_size}"
        before = saved(tmp_path, 3 * number)
        assert before["cur_iter"] == 3 * number
        assert (before["cur_scale"], before["overflows"]) == (
            done.figures["loss_scale"],
            done.figures["overflows"],
        )
        scales.append(before["cur_scale"])
    assert before["overflows"] >= 2
    assert len(set(scales)) > 1
