"""Distillation: a student learns the distributions of a teacher, a frozen model on the same ranks.

In this folder: portable-train --config distillation.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass
class Distillation:
    """The cross-entropy, mixed with the divergence from a teacher with the same tokenizer.

    Models of one family may pad their vocabularies to different sizes. The divergence is over the tokens that
    both have.

    Attributes:
        teacher: a folder or hub id.
        temperature: flattens both distributions.
        share: of the divergence in the loss.
    """

    teacher: str
    temperature: float = 2.0
    share: float = 0.5
    _model: Any = field(default=None, init=False, repr=False)

    def before(self, forward: Any, batch: Any) -> dict[str, torch.Tensor]:
        """The teacher's logits; called without gradients."""
        if self._model is None:
            named = AutoConfig.from_pretrained(self.teacher).architectures or [""]
            # AutoModelForCausalLM has no class for many multimodal models.
            model_class = getattr(transformers, named[0], AutoModelForCausalLM)
            self._model = model_class.from_pretrained(self.teacher)
            self._model.eval().requires_grad_(False).to(batch["labels"].device)
        return {"teacher_logits": forward(self._model).logits}

    def __call__(self, outputs: Any, batch: Any) -> Any:
        labels, valid = batch["labels"], batch["labels"] != -100
        student, teacher = outputs.logits.float(), batch["teacher_logits"].float()
        hard = functional.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="sum")
        shared = min(student.shape[-1], teacher.shape[-1])
        ours, theirs = (
            (one[..., :shared] / self.temperature).log_softmax(dim=-1) for one in (student, teacher)
        )
        kl = (theirs.exp() * (theirs - ours)).sum(dim=-1) * self.temperature**2
        soft = torch.where(valid, kl, 0.0).sum()
        total = (1 - self.share) * hard + self.share * soft
        return total, valid.sum(), {"divergence": soft, "cross_entropy": hard}
