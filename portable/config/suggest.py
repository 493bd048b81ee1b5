"""The nearest valid name for one that is not."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NEAR = 0.72
_LONGEST = 120

ELSEWHERE = {
    "batch_size": "train.global_batch_size",
    "bf16": "precision",
    "block_size": "data.seq_len",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dtype": "precision",
    "early_stop": "train.stop_after",
    "fp16": "precision",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "gradient_clipping": "train.max_grad_norm",
    "logging_steps": "log.every_steps",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "max_length": "data.seq_len",
    "max_steps": "train.steps",
    "mixed_precision": "precision",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "report_to": "log.trackers",
    "resume_from_checkpoint": "checkpoint.resume",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "sharding_strategy": "strategy",
}
"""What other trainers call some settings."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``name``, by the whole dotted name or its last part; None if none is near."""
    name = name.lower().replace("-", "_")[:_LONGEST]
    leaf = name.rpartition(".")[2]
    candidates = list(candidates)
    synonym = ELSEWHERE.get(leaf)
    if synonym in candidates:
        return synonym
    best, score = None, _NEAR
    for candidate in candidates:
        # A whole match outranks a match of the last part: train.step is train.steps, not log.every_steps.
        folded = candidate.lower()
        likeness = max(_ratio(name, folded), _ratio(leaf, folded.rpartition(".")[2]) - 0.05)
        if likeness >= score:
            best, score = candidate, likeness + 1e-9
    return best


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean X?"``, or nothing."""
    found = nearest(name, candidates)
    return f"; did you mean {prefix}{found}?" if found else ""


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()
