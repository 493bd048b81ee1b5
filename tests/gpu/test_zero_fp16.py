"""fp16 with its dynamic loss scale.

DeepSpeed trains in fp16 on GPUs only; torch multiplies it on CPUs as well, so that its scaler can be watched
there once the accelerator is said to support the type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("deepspeed")

from portable.errors import RunError
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig
    from tests.ranks import RankPool

STEPS = 12


def fp16_steps(config: RunConfig) -> tuple[list[float], dict[str, float], str]:
    """The losses of some steps in fp16, what was counted, and how it ended if not well."""
    from deepspeed.accelerator import get_accelerator

    from gpu.zero.runtime import import_deepspeed
    from portable.loop import Progress, steps
    from portable.registry import create_backend
    from portable.run.batches import train_loader
    from portable.run.prepare import prepare
    from portable.run.restore import restore
    from portable.run.settle import settle

    import_deepspeed("cpu")
    get_accelerator().is_fp16_supported = lambda: True
    backend = create_backend("cpu")
    settled = settle(config, backend.name)
    settled.config.__dict__["precision"] = "fp16"  # past the rule that knows what DeepSpeed will do on a CPU
    backend.start()
    losses: list[float] = []
    figures, ended = {}, ""
    try:
        run = prepare(settled, backend)
        engine = restore(run, None).engine
        batches = iter(train_loader(run, 0))
        for result in steps(run, engine, batches, Progress(0, 0), STEPS):
            losses.append(float(result.loss))
        assert engine.health().first_bad_update is None
    except RunError as error:
        ended = str(error)
    finally:
        figures = backend.metrics()
        backend.stop()
        del get_accelerator().is_fp16_supported
    return losses, figures, ended


def fp16_config(folder: Path, corpus: Path, strategy: str, **fp16: Any) -> RunConfig:
    document = {"zero_optimization": {"stage": int(strategy[-1])}, "fp16": {"enabled": "auto", **fp16}}
    settings: dict[str, Any] = {"precision": "bf16", "train__steps": STEPS, "train__micro_batch_size": 3}
    return configured(folder, corpus, deepspeed__config=document, **settings)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_scale_is_found_and_the_model_learns(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    config = fp16_config(tmp_path, corpus, strategy, initial_scale_power=19, hysteresis=1)
    losses, figures, ended = ranks.run(2, fp16_steps, config)
    assert not ended
    assert losses[-1] < losses[0] - 0.2
    assert figures["overflows"] >= 1
    assert figures["loss_scale"] == 2 ** (19 - figures["overflows"])


def test_at_its_floor_the_run_ends_with_advice(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    power = 30
    config = fp16_config(
        tmp_path, corpus, "zero2", initial_scale_power=power, min_loss_scale=2**power, hysteresis=1
    )
    _, _, ended = ranks.run(1, fp16_steps, config)
    for word in ("fp16", "bf16", "fp32", "fp16.min_loss_scale", "train.learning_rate"):
        assert word in ended
