from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from portable.api import with_objects
from portable.config import RunConfig, load_config
from portable.errors import UserError
from portable.optim.schedule import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    WarmupStableDecay,
    build_schedule,
)
from portable.run.user_code import digests
from tests.runs import checked


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    ("kind", "floor", "theirs", "params"),
    [
        (Cosine, 0.0, "cosine", None),
        (Cosine, 1e-4, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        (Linear, 0.0, "linear", None),
        (Constant, 0.0, "constant_with_warmup", None),
        (InverseSqrt, 0.0, "inverse_sqrt", None),
        (partial(InverseSqrt, timescale=3), 0.0, "inverse_sqrt", {"timescale": 3}),
    ],
)
def test_they_are_those_of_transformers(
    kind: Any, floor: float, theirs: str, params: Any, warmup: int
) -> None:
    found = rates_of(theirs, warmup, 40, params)
    assert [kind(1e-3, floor, warmup, 40)(step) for step in range(40)] == pytest.approx(found, rel=1e-9)
    if theirs == "inverse_sqrt":
        lowest = [max(rate, 4e-4) for rate in found[warmup:]]
        ours = [kind(1e-3, 4e-4, warmup, 40)(step) for step in range(warmup, 40)]
        assert ours == pytest.approx(lowest, rel=1e-9)


@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize(
    ("warmup", "warmup_type", "share", "floor"),
    [(0, "linear", 0.2, 0.0), (5, "cosine", 0.5, 0.1), (3, "1-sqrt", 0.0, 0.0), (11, "linear", 1.0, 0.3)],
)
def test_warmup_stable_decay(decay: Any, warmup: int, warmup_type: Any, share: float, floor: float) -> None:
    length = min(math.ceil(share * 23), 23 - warmup)
    params = {"num_decay_steps": length, "decay_type": decay, "warmup_type": warmup_type}
    found = rates_of("warmup_stable_decay", warmup, 23, {**params, "min_lr_ratio": floor})
    ours = WarmupStableDecay(1e-3, floor * 1e-3, warmup, 23, length / 23, decay, warmup_type)
    assert [ours(step) for step in range(23)] == pytest.approx(found, rel=1e-9, abs=1e-12)
    cut = WarmupStableDecay(1e-3, floor * 1e-3, warmup, 23, share, decay, warmup_type)
    assert [cut(step) for step in range(23)] == pytest.approx(found, rel=1e-9, abs=1e-12)


def rates_of(name: str, warmup: int, steps: int, params: dict[str, Any] | None = None) -> list[float]:
    """The rates of transformers' schedule as its Trainer goes through them."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=params)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def halving(step: int, total_steps: int, every: int = 10) -> float:
    return 0.5 ** (step // every) * (total_steps == 30)


def falling_below_zero(step: int, total_steps: int) -> float:
    return 1 - step


def test_one_of_your_own() -> None:
    train = {"steps": 30, "learning_rate": 0.01, "schedule": f"{__name__}:halving(every=7)"}
    config = load_config({"train": train})
    assert config.train.warmup_steps == 0
    schedule = build_schedule(config.train, 30)
    halved = [0.01 * 0.5 ** (step // 7) for step in range(30)]
    assert [schedule(step) for step in range(30)] == pytest.approx(halved)
    assert digests(config).keys() == {"train.schedule"}
    assert load_config(config.model_dump(by_alias=True)) == config
    ours = with_objects(load_config({"train": {"steps": 30}}), schedule=partial(halving, every=7))
    assert ours.train.schedule == f"{__name__}:halving(every=7)"


def test_one_of_your_own_that_is_wrong() -> None:
    def config(name: str, **more: Any) -> RunConfig:
        return checked({"train": {"schedule": f"{__name__}:{name}", "steps": 30, **more}})

    with pytest.raises(UserError, match=r"train.schedule: .*:falling_below_zero: returns -1 for step 2"):
        build_schedule(config("falling_below_zero").train, 30)(2)
    with pytest.raises(UserError, match=r"halving.*: fails \(ZeroDivisionError.*; correct it"):
        build_schedule(config("halving(every=0)").train, 30)(2)


def test_deepspeeds_schedulers_need_no_deepspeed() -> None:
    train = {
        "steps": 30,
        "learning_rate": 1.0,
        "schedule": "OneCycle",
        "schedule_params": {"cycle_min_lr": 0.1, "cycle_first_step_size": 10, "cycle_momentum": False},
    }
    config = load_config({"strategy": "zero2", "train": train})
    assert config.train.warmup_steps == 0
    schedule = build_schedule(config.train, 30)
    assert [schedule(step) for step in (0, 5, 10, 20, 29)] == pytest.approx([0.1, 0.55, 1.0, 0.1, 0.1])
    with pytest.raises(UserError, match=r"schedule OneCycle needs DeepSpeed; use strategy zero1, .*cosine"):
        checked({"train": train})


@pytest.mark.parametrize("steps", [1, 7, 333])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 1.0])
def test_a_warm_up_ratio_is_the_trainers(steps: int, ratio: float) -> None:
    from transformers import TrainingArguments

    theirs = TrainingArguments(output_dir="/nowhere", warmup_steps=ratio) if ratio < 1 else None
    expected = steps if theirs is None else theirs.get_warmup_steps(steps)
    by_steps = load_config(None, {"train.steps": steps, "train.warmup_ratio": ratio})
    assert by_steps.train.warmup_steps == expected
    by_epochs = load_config(None, {"train.epochs": 2.5, "train.warmup_ratio": ratio})
    for config in (by_steps, by_epochs):
        assert build_schedule(config.train, steps).warmup_steps == expected
    both = load_config(None, {"train.warmup_ratio": ratio, "train.warmup_steps": 0})
    assert build_schedule(both.train, steps).warmup_steps == expected
    # What a run writes down reads back as the same config.
    assert load_config(by_steps.model_dump(by_alias=True)) == by_steps
