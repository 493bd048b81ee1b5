"""The search for a loss scale goes on where a checkpoint left it.

DeepSpeed trains in fp16 on GPUs only; torch multiplies it on CPUs as well, so the accelerator is said to
support it and the run's precision is set past the rule that knows better. The scaler, its state and the files
are real.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("deepspeed")

from tests.runs import configured

if TYPE_CHECKING:
    from portable.config import RunConfig
    from tests.ranks import RankPool

STEPS, BREAK = 8, 4


def fp16_leg(config: RunConfig, start: int, stop: int) -> list[tuple[float, float]]:
    """Loss and loss scale of each step from ``start`` on; a checkpoint is read before and written after."""
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
        engine, progress = restored.engine, restored.progress
        assert progress.step == start
        batches = iter(train_loader(run, progress.samples))
        taken = []
        for result in steps(run, engine, batches, progress, stop):
            taken.append((float(result.loss), backend.metrics()["loss_scale"]))
        batches.close()
        save(run, checkpoints, engine, progress)
        checkpoints.finish()
        backend.barrier()
        return taken
    finally:
        backend.stop()
        del get_accelerator().is_fp16_supported


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_scale_goes_on(strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    # It begins too high, and rises again every second step that does not overflow.
    fp16 = {"enabled": "auto", "initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 2}
    document = {"zero_optimization": {"stage": int(strategy[-1])}, "fp16": fp16}

    def config(name: str) -> RunConfig:
        return configured(
            tmp_path / name,
            corpus,
            precision="bf16",
            train__micro_batch_size=3,
            train__steps=STEPS,
            deepspeed__config=document,
        )

    whole = ranks.run(2, fp16_leg, config("whole"), 0, STEPS)
    run = ranks.run(2, fp16_leg, config("run"), 0, BREAK)
    kept = tmp_path / "run" / "checkpoints" / f"step-{BREAK:06d}" / "loss_scale.json"
    assert json.loads(kept.read_text())["cur_scale"] == run[-1][1]
    run += ranks.run(2, fp16_leg, config("run"), BREAK, STEPS)
    assert run == whole
    scales = [scale for _, scale in whole]
    assert scales[0] < 2**19  # it overflowed
    assert any(after > before for before, after in zip(scales[BREAK:], scales[BREAK + 1 :], strict=False))
