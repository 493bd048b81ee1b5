"""Learning rates: a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then ``kind`` down to ``minimum`` at the last step.

    Attributes:
        kind: ``cosine``, ``linear`` or ``constant``.
        peak: learning rate after the warm-up.
        minimum: learning rate at the end of a cosine or linear schedule.
        warmup_steps: steps until the peak is reached; the first step already learns.
        total_steps: length of the schedule in optimizer steps.
    """

    kind: str
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        # The minimum is approached and never quite reached, so that no step is spent at a rate of zero.
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.minimum + (self.peak - self.minimum) * shape
