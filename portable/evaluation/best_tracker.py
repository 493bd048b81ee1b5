"""Selection of the best checkpoints, and early stopping."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LOGGED_CLASSES = 100
"""Maximum number of classes for a confusion matrix in the log."""


@dataclass
class EvalHistory:
    """Results of the evaluations so far.

    Checkpoints contain the history, so a resumed run makes the same decisions as an uninterrupted one.

    Attributes:
        metric: Name of the metric that the results belong to.
        mode: Better direction of the metric, ``min`` or ``max``.
        step: Step of the last evaluation that was counted.
        best: Step and value of each of the best evaluations, the best one first.
        mark: Best value so far. None before the first finite value.
        waited: Number of evaluations since the last improvement by more than the threshold, counted as in
            transformers.
    """

    metric: str = ""
    mode: str = ""
    step: int = 0
    best: list[tuple[int, float]] = field(default_factory=list)
    mark: float | None = None
    waited: int = 0

    @classmethod
    def from_json(cls, stored: Any) -> EvalHistory:
        """Restore the history that a checkpoint stores.

        Returns:
            The stored history, or an empty one if ``stored`` does not have the expected fields.
        """
        try:
            best = [(int(step), float(value)) for step, value in stored["best"]]
            mark = None if stored["mark"] is None else float(stored["mark"])
            return cls(
                str(stored["metric"]),
                str(stored["mode"]),
                int(stored["step"]),
                best,
                mark,
                int(stored["waited"]),
            )
        except (KeyError, TypeError, ValueError):
            return cls()

    def to_json(self) -> dict[str, Any]:
        """Convert the history to plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class EvalDecision:
    """Decisions that follow from an evaluation.

    Attributes:
        save: Whether to save the checkpoint of this step.
        stop: Whether to end the run.
    """

    save: bool = False
    stop: bool = False


@dataclass(frozen=True)
class BestTracker:
    """Tracker that compares evaluations, to select the best checkpoints and to stop early.

    Attributes:
        metric: Name of the value to compare, as in ``metrics.jsonl``.
        mode: Better direction of the value, ``min`` or ``max``.
        keep_best: Number of best checkpoints to keep.
        patience: Number of consecutive evaluations without an improvement that end the run. None disables
            early stopping.
        threshold: Difference that a value has to exceed to count as an improvement.
    """

    metric: str
    mode: str
    keep_best: int = 0
    patience: int | None = None
    threshold: float = 0.0

    def __call__(self, eval_history: EvalHistory, step: int, values: Mapping[str, Any]) -> EvalDecision:
        """Count an evaluation in ``eval_history`` and decide what follows from it.

        An evaluation at a step that was already counted returns the previous decision to stop.

        Args:
            eval_history: History that is updated in place. It is reset if it belongs to another metric or
                mode.
            step: Step of the evaluation.
            values: Values of the evaluation by name.

        Returns:
            Whether to save the checkpoint of this step, and whether to end the run.

        Raises:
            UserError: If the evaluation has no number with the name ``metric``.
        """
        if (eval_history.metric, eval_history.mode) != (self.metric, self.mode):
            # Reset the history, because it belongs to another metric or mode.
            eval_history.__init__(self.metric, self.mode)  # type: ignore[misc]
        if step <= eval_history.step:
            return EvalDecision(stop=self.should_end_run(eval_history))
        value = values.get(self.metric)
        if not isinstance(value, int | float):
            numbers = [name for name, number in values.items() if isinstance(number, int | float)]
            raise UserError(
                f"checkpoint.best_metric: the evaluation has no {self.metric}; use one of "
                f"{', '.join(numbers)}"
            )
        sign = 1 if self.mode == "max" else -1
        eval_history.step = step
        finite = math.isfinite(value)
        mark = eval_history.mark
        improved = finite and (mark is None or sign * (value - mark) > self.threshold)
        eval_history.waited = 0 if improved else eval_history.waited + 1
        if finite:
            eval_history.mark = value if mark is None else sign * max(sign * mark, sign * value)
            eval_history.best.append((step, value))
            eval_history.best.sort(key=lambda entry: (-sign * entry[1], entry[0]))
        del eval_history.best[self.keep_best :]
        save = any(best_step == step for best_step, _ in eval_history.best)
        return EvalDecision(save, self.should_end_run(eval_history))

    def should_end_run(self, eval_history: EvalHistory) -> bool:
        """Return whether ``patience`` evaluations in a row did not improve the value."""
        compares_same_metric = (eval_history.metric, eval_history.mode) == (self.metric, self.mode)
        return self.patience is not None and compares_same_metric and eval_history.waited >= self.patience
