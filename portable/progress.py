"""Result of an optimizer step, and progress of a run."""

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
        metrics: Sums from which the logged values other than the loss are computed, fp32 ``[metrics]``.
        metric_names: Names of the elements of ``metrics``.
            :meth:`portable.model.loss.TrainingObjective.compute_logged_values` converts them to the
            logged values.
        learning_rate: Learning rate used for the step.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: Tensor
    metric_names: tuple[str, ...] = ()
    learning_rate: float = 0.0


@dataclass
class RunProgress:
    """Progress of the run, saved in every checkpoint and restored on resume.

    Attributes:
        step: Number of optimizer steps taken so far.
        samples: Number of samples consumed so far. It is also the position in the data.
        skipped_updates: Number of steps whose update was skipped, as of the last read from the device.
        eval_history: Best evaluation results and the early-stopping counters.
        has_ended: Whether early stopping or a callback has ended the run.
    """

    step: int
    samples: int
    skipped_updates: int = 0
    eval_history: EvalHistory = field(default_factory=EvalHistory)
    has_ended: bool = False
