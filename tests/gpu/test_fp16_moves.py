"""The search for a loss scale goes along when a run in fp16 moves to another strategy or number of ranks.

DeepSpeed trains in fp16 on GPUs only; torch multiplies it on CPUs as well, so the accelerator is said to
support it and the precision is set past the rule that knows better. Engines, scalers and files are real.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("deepspeed")

from tests.runs import configured

if TYPE_CHECKING:
    from portable.config import RunConfig
    from tests.ranks import RankPool

STEPS = 3  # of a leg
# Each class of engines, with its own way to keep the search, is moved to and from.
CLASSES = (("no_shard", 2), ("zero2", 2), ("full_shard", 2), ("zero3", 2), ("no_shard", 1))
# Each strategy is, ZeRO from and to each of the others' kind.
STRATEGIES = (
    ("no_shard", 2),
    ("full_shard", 3),
    ("zero2", 2),
    ("shard_grad_op", 2),
    ("zero3", 3),
    ("zero1", 2),
    ("no_shard", 1),
)


def leg(config: RunConfig) -> tuple[dict[str, Any], dict[str, float]]:
    """Where the search stands once the newest checkpoint is loaded, and after the leg, which saves."""
    from deepspeed.accelerator import get_accelerator

    from gpu.zero.runtime import import_deepspeed
    from portable.checkpoint.store import Checkpoints
    from portable.loop import steps
    from portable.registry import create_backend
    from portable.run.batches import train_loader
    from portable.run.prepare import prepare
    from portable.run.restore import restore
    from portable.run.save import save
    from portable.run.settle import settle

    import_deepspeed("cpu")
    get_accelerator().is_fp16_supported = lambda: True
    backend = create_backend("cpu")
    settled = settle(config, backend.name)
    settled.config.__dict__["precision"] = "fp16"  # past the rule that a CPU does not train in it
    backend.start()
    try:
        run = prepare(settled, backend)
        checkpoints = Checkpoints(Path(config.output_dir) / "checkpoints", keep=None, rank=backend.rank)
        restored = restore(run, checkpoints.latest())
        engine: Any = restored.engine
        progress = restored.progress
        probe = Path(config.output_dir) / f"probe-{backend.rank}"
        probe.mkdir(parents=True, exist_ok=True)
        engine._scaling.save(probe)
        loaded = json.loads((probe / "loss_scale.json").read_text())
        batches = iter(train_loader(run, progress.samples))
        list(steps(run, engine, batches, progress, progress.step + STEPS))
        batches.close()
        save(run, checkpoints, engine, progress)
        checkpoints.finish()
        backend.barrier()
        return loaded, backend.metrics()
    finally:
        backend.stop()
        del get_accelerator().is_fp16_supported


@pytest.mark.parametrize(
    "legs",
    [CLASSES, pytest.param(STRATEGIES, marks=pytest.mark.exhaustive)],
    ids=["classes", "strategies"],
)
def test_the_scale_and_its_counters_go_along(
    legs: tuple[tuple[str, int], ...], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    saved: dict[str, Any] | None = None
    scales = []
    for number, (strategy, world_size) in enumerate(legs):
        config = configured(
            tmp_path,
            corpus,
            strategy=strategy,
            precision="bf16",
            train__micro_batch_size=1,
            train__steps=STEPS * len(legs),
            # Too high to begin with, and doubled after every second update that does not overflow.
            fp16__initial_scale_power=19,
            fp16__hysteresis=1,
            fp16__loss_scale_window=2,
        )
        loaded, figures = ranks.run(world_size, leg, config)
        if saved is not None:
            assert loaded == saved, f"moved to {strategy} on {world_size}"
        step = STEPS * (number + 1)
        path = tmp_path / "checkpoints" / f"step-{step:06d}" / "loss_scale.json"
        saved = json.loads(path.read_text())
        assert saved["cur_iter"] == step
        assert (saved["cur_scale"], saved["overflows"]) == (figures["loss_scale"], figures["overflows"])
        scales.append(saved["cur_scale"])
    assert saved is not None
    assert saved["overflows"] >= 2
    assert len(set(scales)) > 1
