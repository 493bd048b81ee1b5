"""The evaluations of a run: on each source of ``data.evals``, reported and judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.errors import UserError
from portable.evaluation.evaluate import evaluate
from portable.evaluation.standing import Judge, Verdict
from portable.reporting.metrics import EVALUATION
from portable.run.batches import eval_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from portable.backend import Batch, Engine
    from portable.config import RunConfig
    from portable.data import Data
    from portable.evaluation.metrics import Measures
    from portable.loop import Progress
    from portable.run.callbacks import Callbacks
    from portable.run.prepare import Prepared


def evaluate_all(
    prepared: Prepared, engine: Engine, over: Callable[[Iterable[Batch]], Iterable[Batch]] = iter
) -> dict[str, Any]:
    """The values of every metric on every source, named as in ``metrics.jsonl``; all ranks call it.

    Args:
        prepared: the run.
        engine: its model.
        over: wraps the batches of each evaluation.
    """
    found: dict[str, Any] = {}
    averaged = prepared.config.train.eval_ema
    if averaged:
        engine.exchange_average()
    for source, samples in prepared.data.evals.items():
        batches = over(eval_batches(prepared, samples))
        values = evaluate(prepared.backend, engine, batches, prepared.measures)
        found |= {_name(value, source): number for value, number in values.items()}
    if averaged:
        engine.exchange_average()
    return found


def _name(value: str, source: str) -> str:
    return f"{EVALUATION}{value}/{source}" if source else f"{EVALUATION}{value}"


def judge_of(config: RunConfig, sources: Collection[str], measures: Measures) -> Judge | None:
    """What compares evaluations; None if nothing follows from them.

    Args:
        config: of the run. sources: the names of what it evaluates on. measures: its metrics.

    Raises:
        UserError: if no evaluation has ``checkpoint.best_metric``, or nothing tells which way it is better.
    """
    checkpoint, patience = config.checkpoint, config.train.early_stopping_patience
    if checkpoint.keep_best is None and patience is None:
        return None
    if not sources:
        raise UserError("data.eval_fraction: the data is too small to hold any out; set data.eval")
    metric = checkpoint.best_metric or _name("loss", next(iter(sources)))
    value, _, source = metric.removeprefix(EVALUATION).partition("/")
    names = measures.names
    known = [_name(name, one) for one in sources for name in names or ("loss",)]
    own = names is None and metric.startswith(EVALUATION) and source in sources
    if metric not in known and not own:
        more = "" if names is not None else ", and those of your own metrics"
        raise UserError(
            f"checkpoint.best_metric: no evaluation of this run has {metric}; it has {', '.join(known)}{more}"
        )
    mode = measures.mode(value) if checkpoint.best_mode == "auto" else checkpoint.best_mode
    if mode is None:
        raise UserError(
            f"checkpoint.best_mode: nothing tells whether a higher {metric} is better; set min or max"
        )
    threshold = config.train.early_stopping_threshold
    return Judge(metric, mode, checkpoint.keep_best or 0, patience, threshold)


class Evaluations:
    """Implements :class:`portable.loop.Evaluation`."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine,
        reporter: Callbacks,
        over: Callable[[Iterable[Batch]], Iterable[Batch]],
    ) -> None:
        self._prepared = prepared
        self._engine = engine
        self._reporter = reporter
        self._over = over
        self._any = prepared.backend.any

    def __call__(self, progress: Progress, *, counts: bool) -> Verdict:
        values = evaluate_all(self._prepared, self._engine, self._over)
        self._reporter.on_eval(progress, values)
        judge = self._prepared.judge
        if judge is None or not counts:
            return Verdict()
        verdict = judge(progress.standing, progress.step, values)
        # The values are the same on all ranks; the ranks must do the same whatever happens.
        return Verdict(self._any(verdict.save), self._any(verdict.stop))

    def lacks(self, progress: Progress, *, counts: bool) -> bool:
        judged = self._prepared.judge is None or progress.standing.step >= progress.step
        return self._any((counts and not judged) or self._reporter.lacks_eval(progress))

    def ends(self, progress: Progress) -> bool:
        judge = self._prepared.judge
        return judge is not None and self._any(judge.stops(progress.standing))


def why_ended(progress: Progress) -> str:
    """Why a run ended early, for the user."""
    standing = progress.standing
    mark = "" if standing.mark is None else f" beyond {standing.mark:.4f}"
    return (
        f"ended early at step {progress.step}: {standing.metric} has not improved{mark} for "
        f"{standing.waited} evaluations (train.early_stopping_patience)"
    )


def needs_evaluation_data(data: Data) -> None:
    """Raise UserError if there is nothing to evaluate on."""
    if not data.evals:
        raise UserError(
            "--eval-only: data.eval_fraction is 0, so that there is nothing to evaluate on; set data.eval"
        )
