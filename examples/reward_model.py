"""A reward model: a number for each answer, so that chosen answers score higher than rejected ones.

In this folder: portable-train --config reward_model.yaml --data.source preferences.jsonl
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification


def score_head(model: Any) -> Any:
    """The language model with one score in place of its logits; called on the meta device."""
    model.config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32)


class Pairwise:
    """The Bradley-Terry loss: minus the log-probability that the chosen answer wins."""

    whole = True  # the score is asked for at the last token of an answer

    def weight(self, batch: Any) -> float:
        """The number of pairs; what only fills up a batch has no labels."""
        return float((batch["labels"] != -100).any(dim=-1).all(dim=-1).sum())

    def __call__(self, outputs: Any, batch: Any) -> Any:
        pairs = (batch["labels"] != -100).any(dim=-1).all(dim=-1)
        chosen, rejected = outputs.logits[..., 0].float().unbind(dim=1)  # [batch, 2, 1], the chosen one first
        losses = -functional.logsigmoid(chosen - rejected)
        numbers = {"accuracy": chosen > rejected, "margin": chosen - rejected}
        sums = {name: torch.where(pairs, value.float(), 0.0).sum() for name, value in numbers.items()}
        return torch.where(pairs, losses, 0.0).sum(), pairs.sum(), sums
