"""Data classes for the result of an optimizer step and the progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portable.evaluation.best_tracker import EvalHistory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step.

    The tensors stay on the device, so creating a result does not trigger a host-device sync.

    Attributes:
        loss: Mean loss over the valid tokens of the global batch, an fp32 scalar.
        grad_norm: Global gradient norm before clipping, an fp32 scalar.
        metrics: Sums for the logged values other than the loss, fp32 ``[metrics]``.
            :meth:`portable.model.loss.TrainingObjective.compute_logged_values` computes the logged
            values from the sums.
        metric_names: Name of each element of ``metrics``.
        learning_rate: Learning rate used for the step.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: Tensor
    metric_names: tuple[str, ...] = ()
    learning_rate: float = 0.0


@dataclass
class RunProgress:
    """Progress of the run.

    All attributes except ``has_ended`` are saved in every checkpoint and restored on resume.

    Attributes:
        step: Number of optimizer steps taken so far.
        samples: Number of samples consumed so far. It is also the position in the data.
        skipped_updates: Number of steps whose update was skipped, as of the last read from the
            device.
        eval_history: Best evaluation results and the early-stopping counters.
        has_ended: Whether early stopping or a callback has ended the run. It is False after a
            resume, until early stopping is determined again from ``eval_history``.
    """

    step: int
    samples: int
    skipped_updates: int = 0
    eval_history: EvalHistory = field(default_factory=EvalHistory)
    has_ended: bool = False
