"""Defaults that follow from other settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.config.run_config import RunConfig
    from portable.config.sections import TrainConfig

ZERO = ("zero1", "zero2", "zero3")
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
PADDED_TASKS = ("seq2seq-lm", "sequence-classification")
WITHOUT_WARMUP = ("OneCycle", "LRRangeTest")
"""Schedules that have no warm-up; one of the user's has none, either."""
_MOST_WARMUP = 20


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``, in O(sqrt(number))."""
    if most >= number:
        return number
    small = (n for n in range(1, math.isqrt(number) + 1) if number % n == 0)
    return max(divisor for n in small for divisor in (n, number // n) if divisor <= most)


def warms_up(schedule: str) -> bool:
    """Whether ``train.schedule`` uses the steps of the warm-up; user code, with a colon, does not."""
    return schedule not in WITHOUT_WARMUP and ":" not in schedule


def warmup_steps(settings: TrainConfig, total_steps: int) -> int:
    """The number of warmup steps. A ratio is rounded up, as in the Trainer."""
    if settings.warmup_ratio is not None:
        return math.ceil(total_steps * settings.warmup_ratio)
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return min(_MOST_WARMUP, total_steps // 10) if warms_up(settings.schedule) else 0


def derived(config: RunConfig) -> dict[str, Any]:
    """Defaults that depend on other settings, by dotted key, for keys that the user did not set."""
    model, train, checkpoint = config.model, config.train, config.checkpoint
    found: dict[str, Any] = {}
    if model.name_or_path is not None:
        found["model.config"] = None
    if model.task in PADDED_TASKS or config.data.format in ("preference", "samples"):
        found["data.packing"] = False
    elif config.data.format not in ("auto", "text") and model.task == "causal-lm":
        found["data.packing"] = "documents"
    if config.data.eval is not None or (config.data.stream and not config.data.sources):
        found["data.eval_fraction"] = 0.0
    if checkpoint.export_best:
        found["checkpoint.keep_best"] = 1
    if train.epochs is not None:
        found["train.steps"] = None
    if train.eval_every_epochs is not None:
        found["train.eval_every"] = None
    if checkpoint.every_epochs is not None:
        found["checkpoint.every_steps"] = None
    steps = train.steps if train.epochs is None or config.is_set("train.steps") else None
    if steps is not None:  # with epochs, it depends on the data
        found["train.warmup_steps"] = warmup_steps(train, steps)
    if train.micro_batch_size != "auto":
        found["train.micro_batch_size"] = largest_divisor(train.global_batch_size, train.micro_batch_size)
    # A null that is written asks for the default as well.
    null_too = () if train.warmup_steps is not None else ("train.warmup_steps",)
    return {key: value for key, value in found.items() if key in null_too or not config.is_set(key)}
