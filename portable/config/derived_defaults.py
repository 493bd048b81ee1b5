"""Defaults of settings that depend on other settings, for example on the kind of training.

The kind of training is, for example, pretraining or fine-tuning.
"""

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
"""Values of ``train.schedule`` whose final learning rate is set by ``train.min_learning_rate_ratio``."""


@dataclass(frozen=True)
class TrainingKindDefault:
    """Default of a setting for each kind of training.

    See :func:`classify_training_kind` for the exact distinction.

    Attributes:
        pretraining: Default for training from random weights, unless the data consists of
            conversations or preference pairs, or an adapter is trained.
        continued: Default for training all or some pretrained weights on plain text, without an
            adapter, for the tasks ``causal-lm`` and ``masked-lm``.
        finetuning: Default for all other runs. Examples are runs that train an adapter, use
            conversations or preference pairs, or train a pretrained model for classification.
    """

    pretraining: Any
    continued: Any
    finetuning: Any

    def get_default(self, kind: TrainingKind) -> Any:
        """Return the default value of the setting for a kind of training."""
        return {
            PRETRAINING: self.pretraining,
            CONTINUED_PRETRAINING: self.continued,
            FINETUNING: self.finetuning,
        }[kind]


DEFAULTS_BY_TRAINING_KIND: dict[str, TrainingKindDefault] = {
    "train.weight_decay": TrainingKindDefault(0.1, 0.1, 0.0),
    "train.betas": TrainingKindDefault((0.9, 0.95), (0.9, 0.95), (0.9, 0.999)),
    "train.warmup_ratio": TrainingKindDefault(0.01, 0.01, 0.03),
    "train.min_learning_rate_ratio": TrainingKindDefault(0.1, 0.0, 0.0),
    "train.eval_every_epochs": TrainingKindDefault(None, None, 1.0),
    "checkpoint.every_epochs": TrainingKindDefault(None, None, 1.0),
    "data.seq_len": TrainingKindDefault(256, 4096, 4096),
}
"""Defaults that depend on the kind of training, keyed by the dotted key of the setting.

docs/decisions.md explains the values.
"""
DEFAULT_DESCRIPTIONS = {
    "data.packing": "`documents` for conversations; `false` for seq2seq-lm, sequence-classification, "
    "preference pairs and samples from custom code; otherwise `true`",
    "data.eval_fraction": "`null`, or `0` if data.eval is set or data.stream is `true`",
    "data.seq_len": "`{finetuning}`, or the maximum number of positions of the model if it is smaller, for "
    "fine-tuning and continued pretraining with causal-lm (except on samples from custom code); otherwise "
    "`{pretraining}`",
    "train.steps": "`{schema}`, or `null` if train.epochs is set",
    "train.micro_batch_size": "`{schema}`, or the largest smaller number that divides "
    "train.global_batch_size",
    "train.betas": "`{finetuning}` for fine-tuning, otherwise `{pretraining}`",
    "train.weight_decay": "`{finetuning}` for fine-tuning, otherwise `{pretraining}`",
    "train.warmup_ratio": "`{finetuning}` for fine-tuning, otherwise `{pretraining}`; `null` if "
    "train.warmup_steps is set or the schedule has no warmup (`OneCycle`, "
    "`LRRangeTest` and custom schedules)",
    "train.min_learning_rate_ratio": "`{pretraining}` for pretraining with the schedule `cosine`, "
    "`linear` or `wsd`, otherwise `{finetuning}`",
    "train.eval_every": "`{schema}`, or `null` if train.eval_every_epochs has a value",
    "train.eval_every_epochs": "`{finetuning}` for fine-tuning if train.epochs is set and train.eval_every "
    "is not, otherwise `{pretraining}`",
    "checkpoint.every_steps": "`{schema}`, or `null` if checkpoint.every_epochs has a value",
    "checkpoint.every_epochs": "`{finetuning}` for fine-tuning if train.epochs is set and "
    "checkpoint.every_steps is not, otherwise `{pretraining}`",
    "checkpoint.keep_best": "`null`, or `1` if checkpoint.export_best is `true`",
}
"""Descriptions of the defaults that depend on other settings, keyed by the dotted key of the setting.

Values have backticks. ``{pretraining}`` and ``{finetuning}`` are replaced by the values in
:data:`DEFAULTS_BY_TRAINING_KIND`, and ``{schema}`` is replaced by the default in the schema.
"""
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
    of the steps, but at most 20. The default is 0 for schedules without a warmup.

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
    """Return the kind of training.

    The kind of training selects the defaults in :data:`DEFAULTS_BY_TRAINING_KIND`. The first
    condition that is met determines the result:

    - :data:`FINETUNING` if the run trains an adapter, or if the data consists of conversations or
      preference pairs.
    - :data:`PRETRAINING` if training starts from random weights.
    - :data:`CONTINUED_PRETRAINING` if the data is plain text and the task is ``causal-lm`` or
      ``masked-lm``.
    - :data:`FINETUNING` in all other cases.

    While ``data.format`` is ``auto``, the data is assumed to be plain text, so the result is
    preliminary. :func:`portable.run.resolve.resolve_run` replaces ``auto`` with the format of the
    first record. The defaults are then computed again.
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

    A setting is omitted in five cases:

    - The user has set it. A null ``train.warmup_ratio`` counts as not set, unless the user has also
      set ``train.warmup_steps``.
    - The user has set another setting that replaces it. For example, ``train.eval_every`` replaces
      ``train.eval_every_epochs``.
    - It has no effect in this run. For example, ``train.min_learning_rate_ratio`` has no effect if
      the schedule does not decay.
    - It is an interval in epochs (``train.eval_every_epochs`` or ``checkpoint.every_epochs``), but
      the length of the run is not set in epochs.
    - It is ``data.seq_len``. :func:`portable.model.build.apply_default_seq_len` chooses this
      default for the model.

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
