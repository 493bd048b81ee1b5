"""Select the best checkpoints, and decide when to stop early."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LOGGED_CLASSES = 100
"""Maximum number of classes for which a confusion matrix is logged."""


@dataclass
class EvalHistory:
    """State of :class:`BestTracker`: the best evaluation results and the early-stopping counter.

    Checkpoints contain the history, so that a resumed run makes the same decisions as an
    uninterrupted run.

    Attributes:
        metric: Name of the compared metric.
        mode: ``max`` if higher values of the metric are better, or ``min`` if lower values are
            better.
        step: Step of the last evaluation in the history. 0 before the first evaluation.
        best: Step and value of each evaluation whose checkpoint is kept, best first.
        mark: Best value so far. None before the first finite value.
        waited: Number of consecutive evaluations that were not better than ``mark`` by more than
            :attr:`BestTracker.threshold`. Transformers counts in the same way for early stopping.
    """

    metric: str = ""
    mode: str = ""
    step: int = 0
    best: list[tuple[int, float]] = field(default_factory=list)
    mark: float | None = None
    waited: int = 0

    @classmethod
    def from_json(cls, stored: Any) -> EvalHistory:
        """Restore the history that a checkpoint contains.

        Args:
            stored: Parsed JSON from :meth:`to_json`.

        Returns:
            The stored history. If ``stored`` does not have the expected fields, an empty history.
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
    """Decisions of :class:`BestTracker` after an evaluation.

    Attributes:
        save: Whether to save a checkpoint of this step, because it is one of the best.
        stop: Whether to end the run, because the metric has not improved for too long.
    """

    save: bool = False
    stop: bool = False


@dataclass(frozen=True)
class BestTracker:
    """Tracker of evaluation results that selects the best checkpoints and decides when to stop early.

    Attributes:
        metric: Name of the metric to compare, as in ``metrics.jsonl``.
        mode: ``max`` if higher values are better, or ``min`` if lower values are better.
        keep_best: Number of best checkpoints to keep.
        patience: Number of consecutive evaluations without an improvement after which the run ends.
            None disables early stopping.
        threshold: Margin by which a value must exceed the best previous value to count as an
            improvement (or fall below it for ``min``). A difference equal to the margin does not count.
    """

    metric: str
    mode: str
    keep_best: int = 0
    patience: int | None = None
    threshold: float = 0.0

    def __call__(self, eval_history: EvalHistory, step: int, values: Mapping[str, Any]) -> EvalDecision:
        """Add an evaluation to ``eval_history``, and decide whether to save and to stop.

        Saving means to keep a checkpoint of this step, and stopping means to end the run early.

        A value that is not finite does not count as an improvement, and its checkpoint is not kept.
        If two values are equal, the earlier evaluation counts as better.

        An evaluation may be repeated, for example after a resume. If its step has already been
        counted, the history does not change and no checkpoint is saved. The run still stops if the
        history already meets the condition for early stopping.

        Args:
            eval_history: History to update in place. It is reset first if it belongs to another
                metric or mode.
            step: Step of the evaluation.
            values: Values of the evaluation, keyed by name.

        Returns:
            The decision.

        Raises:
            UserError: If ``values`` does not contain a number for ``metric``.
        """
        if (eval_history.metric, eval_history.mode) != (self.metric, self.mode):
            # The history belongs to another metric or mode, so it is reset.
            eval_history.__init__(self.metric, self.mode)  # type: ignore[misc]
        if step <= eval_history.step:
            return EvalDecision(stop=self.should_end_run(eval_history))
        value = values.get(self.metric)
        if not isinstance(value, int | float):
            numbers = [name for name, number in values.items() if isinstance(number, int | float)]
            raise UserError(
                f"checkpoint.best_metric: the evaluation does not report the metric {self.metric}; use one "
                f"of {', '.join(numbers)}"
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
        """Return whether the metric has not improved in the last ``patience`` evaluations.

        False if early stopping is disabled, or if the history belongs to another metric or mode.
        """
        compares_same_metric = (eval_history.metric, eval_history.mode) == (self.metric, self.mode)
        return self.patience is not None and compares_same_metric and eval_history.waited >= self.patience
