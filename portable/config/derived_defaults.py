"""Compute the defaults that depend on other settings, such as whether the run pretrains or fine-tunes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NewType

if TYPE_CHECKING:
    # Only for annotations: RunConfig imports this module, so importing it here would be circular.
    from portable.config.run_config import RunConfig
    from portable.config.sections import TrainConfig

ZERO_STRATEGIES = ("zero1", "zero2", "zero3")
"""Values of ``strategy`` for DeepSpeed's engine."""
HYBRID_STRATEGIES = ("hybrid_shard", "hybrid_shard_zero2")
"""Values of ``strategy`` that shard within a group of ranks and replicate across groups."""
PADDED_TASKS = ("seq2seq-lm", "sequence-classification")
"""Tasks whose samples are padded instead of packed."""
SCHEDULES_WITHOUT_WARMUP = ("OneCycle", "LRRangeTest")
"""Values of ``train.schedule`` without a warmup. See :func:`has_warmup`."""
CONVERSATION_FORMATS = ("messages", "sharegpt", "prompt_completion", "alpaca")
"""Values of ``data.format`` for conversations."""
TrainingKind = NewType("TrainingKind", str)
"""One of :data:`PRETRAINING`, :data:`CONTINUED_PRETRAINING` and :data:`FINETUNING`."""
PRETRAINING = TrainingKind("pretraining")
"""Training from random weights."""
CONTINUED_PRETRAINING = TrainingKind("continued pretraining")
"""Training of pretrained weights on plain text."""
FINETUNING = TrainingKind("fine-tuning")
"""Training of an adapter, or of a pretrained model on conversations, pairs or other tasks."""
_DECAYING_SCHEDULES = ("cosine", "linear", "wsd")
"""Values of ``train.schedule`` whose final learning rate ``train.min_learning_rate_ratio`` determines."""


@dataclass(frozen=True)
class TrainingKindDefault:
    """Default of a setting for each kind of training.

    Attributes:
        pretraining: Default for training from random weights.
        continued: Default for training pretrained weights on plain text.
        finetuning: Default for adapters, conversations, pairs, and other tasks of pretrained models.
        condition: Condition under which the default applies, printed in the reference. Empty if it
            always applies.
    """

    pretraining: Any
    continued: Any
    finetuning: Any
    condition: str = ""

    def get_default(self, kind: TrainingKind) -> Any:
        """Return the default for a kind of training."""
        return {
            PRETRAINING: self.pretraining,
            CONTINUED_PRETRAINING: self.continued,
            FINETUNING: self.finetuning,
        }[kind]


DEFAULTS_BY_TRAINING_KIND: dict[str, TrainingKindDefault] = {
    "train.weight_decay": TrainingKindDefault(0.1, 0.1, 0.0),
    "train.betas": TrainingKindDefault((0.9, 0.95), (0.9, 0.95), (0.9, 0.999)),
    "train.warmup_ratio": TrainingKindDefault(0.01, 0.01, 0.03, "without train.warmup_steps"),
    "train.min_learning_rate_ratio": TrainingKindDefault(
        0.1, 0.0, 0.0, f"for {', '.join(_DECAYING_SCHEDULES)}"
    ),
    "train.eval_every_epochs": TrainingKindDefault(None, None, 1.0, "with train.epochs"),
    "checkpoint.every_epochs": TrainingKindDefault(None, None, 1.0, "with train.epochs"),
    "data.seq_len": TrainingKindDefault(
        256, 4096, 4096, "for causal-lm, limited by the positions of the model; otherwise 256"
    ),
}
"""Defaults of the settings whose default depends on the kind of training, by dotted key.

docs/decisions.md explains the values."""
REPLACED_SETTINGS = {
    "train.warmup_ratio": "train.warmup_steps",
    "train.eval_every_epochs": "train.eval_every",
    "checkpoint.every_epochs": "checkpoint.every_steps",
}
"""Pairs of alternative settings. If the first setting of a pair has a value, the second becomes null."""


def find_largest_divisor(dividend: int, max_divisor: int) -> int:
    """Return the largest divisor of ``dividend`` that is at most ``max_divisor``.

    Both arguments must be positive. If ``max_divisor`` is larger than ``dividend``, the result is
    ``dividend``. Runs in O(sqrt(dividend)) time.
    """
    if max_divisor >= dividend:
        return dividend
    small = (n for n in range(1, math.isqrt(dividend) + 1) if dividend % n == 0)
    return max(divisor for n in small for divisor in (n, dividend // n) if divisor <= max_divisor)


def has_warmup(schedule_name: str) -> bool:
    """Return whether a schedule has a warmup.

    Args:
        schedule_name: Value of ``train.schedule``. A name with a colon refers to a custom schedule,
            which has no warmup.
    """
    return schedule_name not in SCHEDULES_WITHOUT_WARMUP and ":" not in schedule_name


def compute_warmup_steps(settings: TrainConfig, total_steps: int) -> int:
    """Compute the number of warmup steps.

    ``train.warmup_ratio`` takes precedence over ``train.warmup_steps``. The ratio times the number of
    steps is rounded up, as in transformers' Trainer. If both settings are null, the default is a tenth
    of the steps, but at most 20. It is 0 for schedules without a warmup.

    Args:
        settings: Section ``train``.
        total_steps: Number of optimizer steps of the schedule.
    """
    if settings.warmup_ratio is not None:
        return math.ceil(total_steps * settings.warmup_ratio)
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    # Both settings can be null, because runs of version 0.1 with train.epochs have this in their config.yaml.
    return min(20, total_steps // 10) if has_warmup(settings.schedule) else 0


def classify_training_kind(config: RunConfig) -> TrainingKind:
    """Return the kind of training, which selects the defaults in :data:`DEFAULTS_BY_TRAINING_KIND`.

    If ``data.format`` is ``auto``, it is treated as plain text. The kind may change later, because
    :func:`portable.run.resolve.resolve_run` replaces ``auto`` with the format of the first record
    before the defaults are used.
    """
    adapter, data, model = config.adapter, config.data, config.model
    has_adapter = (adapter.type, adapter.name_or_path, adapter.config) != (None, None, None)
    if has_adapter or data.format in (*CONVERSATION_FORMATS, "preference"):
        return FINETUNING
    if model.from_scratch:
        return PRETRAINING
    is_plain_text = model.task in ("causal-lm", "masked-lm") and data.format in ("auto", "text")
    return CONTINUED_PRETRAINING if is_plain_text else FINETUNING


def compute_training_kind_defaults(config: RunConfig) -> dict[str, Any]:
    """Compute the defaults in :data:`DEFAULTS_BY_TRAINING_KIND` that apply to a run.

    A setting is omitted if the user has set it or an alternative, or if the condition of its default is
    not met. ``data.seq_len`` is always omitted, because
    :func:`portable.model.build.apply_default_seq_len` chooses it for the model.

    Returns:
        Default values, keyed by dotted key.
    """
    train, kind = config.train, classify_training_kind(config)
    is_applicable = {
        "train.warmup_ratio": has_warmup(train.schedule) and train.warmup_steps is None,
        "train.min_learning_rate_ratio": train.schedule in _DECAYING_SCHEDULES,
        "train.eval_every_epochs": train.epochs is not None and not config.is_set("train.eval_every"),
        "checkpoint.every_epochs": train.epochs is not None and not config.is_set("checkpoint.every_steps"),
        "data.seq_len": False,
    }
    defaults = {
        key: default.get_default(kind)
        for key, default in DEFAULTS_BY_TRAINING_KIND.items()
        if is_applicable.get(key, True)
    }
    # If the user has set the ratio to null, apply its default nevertheless, unless the user has also set the
    # steps to null. Both are null in the config.yaml of old runs, which must not change: see
    # compute_warmup_steps.
    keys_with_null_as_default = () if config.is_set("train.warmup_steps") else ("train.warmup_ratio",)
    return {
        key: value
        for key, value in defaults.items()
        if not config.is_set(key) or (key in keys_with_null_as_default and config.get(key) is None)
    }


def compute_derived_defaults(config: RunConfig) -> dict[str, Any]:
    """Compute the defaults that depend on other settings. Called whenever a ``RunConfig`` is validated.

    Returns:
        Default values, keyed by dotted key, of settings that the user has not set.
        ``train.warmup_ratio`` is also included if the user has set it to null, which selects the
        default.
    """
    model, train, checkpoint = config.model, config.train, config.checkpoint
    defaults: dict[str, Any] = {}
    if model.name_or_path is not None:
        defaults["model.config"] = None
    if model.task in PADDED_TASKS or config.data.format in ("preference", "samples"):
        defaults["data.packing"] = False
    elif config.data.format in CONVERSATION_FORMATS and model.task == "causal-lm":
        defaults["data.packing"] = "documents"
    if config.data.eval is not None or (config.data.stream and not config.data.sources):
        defaults["data.eval_fraction"] = 0.0
    if checkpoint.export_best:
        defaults["checkpoint.keep_best"] = 1
    if train.epochs is not None:
        defaults["train.steps"] = None
    defaults |= compute_training_kind_defaults(config)
    for key, replaced_key in REPLACED_SETTINGS.items():
        if key != "train.warmup_ratio" and defaults.get(key, config.get(key)) is not None:
            defaults[replaced_key] = None
    if train.micro_batch_size != "auto":
        defaults["train.micro_batch_size"] = find_largest_divisor(
            train.global_batch_size, train.micro_batch_size
        )
    return {
        key: value for key, value in defaults.items() if key == "train.warmup_ratio" or not config.is_set(key)
    }
