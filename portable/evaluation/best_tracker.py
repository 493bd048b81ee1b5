"""Which checkpoints are the best so far, and whether training still gets better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LOGGED_CLASSES = 100
"""Of a confusion matrix in the log."""


@dataclass
class EvalHistory:
    """What earlier evaluations came to. Checkpoints hold it, so that a resumed run decides as it would have.

    Attributes:
        metric, mode: by which it was judged.
        step: of the last evaluation that counted.
        best: step and value of the best evaluations, the best first.
        mark: the best value.
        waited: evaluations since the last that improved it by enough, as transformers counts them.
    """

    metric: str = ""
    mode: str = ""
    step: int = 0
    best: list[tuple[int, float]] = field(default_factory=list)
    mark: float | None = None
    waited: int = 0

    @classmethod
    def from_json(cls, stored: Any) -> EvalHistory:
        """What a checkpoint has stored; a new one if that is nothing of the kind."""
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
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class EvalDecision:
    """What follows from an evaluation: whether to save this step's checkpoint, and to end the run."""

    save: bool = False
    stop: bool = False


@dataclass(frozen=True)
class BestTracker:
    """Compares evaluations.

    Attributes:
        metric: the value to compare, as in ``metrics.jsonl``.
        mode: min or max, the better way.
        keep_best: how many of the best checkpoints are kept.
        patience: evaluations without an improvement after which the run ends; None: never.
        threshold: an improvement is larger than this.
    """

    metric: str
    mode: str
    keep_best: int = 0
    patience: int | None = None
    threshold: float = 0.0

    def __call__(self, eval_history: EvalHistory, step: int, values: Mapping[str, Any]) -> EvalDecision:
        """Count an evaluation in ``eval_history``, once.

        Raises:
            UserError: if the evaluation has no such value.
        """
        if (eval_history.metric, eval_history.mode) != (self.metric, self.mode):
            eval_history.__init__(self.metric, self.mode)  # type: ignore[misc]  # judged by another metric before
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
        """Whether the run ends."""
        compares_same_metric = (eval_history.metric, eval_history.mode) == (self.metric, self.mode)
        return self.patience is not None and compares_same_metric and eval_history.waited >= self.patience
