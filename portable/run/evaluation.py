"""Evaluations of a run on each source of ``data.evals``, and the decisions that follow from them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from portable.callbacks import Callback
from portable.errors import UserError
from portable.evaluation.best_tracker import BestTracker, Decision
from portable.evaluation.metrics import evaluate
from portable.reporting.metrics import EVALUATION
from portable.run.batches import build_eval_loader, show_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from portable.backend import Engine
    from portable.callbacks import Run
    from portable.config import RunConfig
    from portable.data.dataset import Data
    from portable.data.samples.loader import BatchIterator
    from portable.evaluation.metrics import MetricSet
    from portable.progress import Progress
    from portable.ranks.watchdog import Watchdog
    from portable.run.stages import Prepared


def evaluate_all(
    prepared: Prepared,
    engine: Engine,
    watch: Callable[[BatchIterator], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Evaluate all metrics on all sources. Must be called on all ranks.

    Args:
        prepared: The run.
        engine: Engine of this rank.
        watch: Function that returns a context around an evaluation, given its batches.

    Returns:
        The values, keyed by their names in ``metrics.jsonl``.
    """
    results: dict[str, Any] = {}
    averaged = prepared.config.train.eval_ema
    if averaged:
        engine.swap_ema_weights()
    for source, samples in prepared.data.evals.items():
        loader = build_eval_loader(prepared, samples)
        batches = iter(loader)
        with watch(batches):
            shown = show_progress(batches, len(loader), shown=prepared.backend.rank == 0)
            values = evaluate(prepared.backend, engine, shown, prepared.metrics)
        results |= {_name(value, source): number for value, number in values.items()}
    if averaged:
        engine.swap_ema_weights()
    return results


def _name(value: str, source: str) -> str:
    return f"{EVALUATION}{value}/{source}" if source else f"{EVALUATION}{value}"


def build_best_tracker(config: RunConfig, sources: Collection[str], metrics: MetricSet) -> BestTracker | None:
    """Build the tracker for best checkpoints and early stopping.

    Args:
        config: Config of the run.
        sources: Names of the evaluation sources.
        metrics: Metrics of the evaluations.

    Returns:
        The tracker. None if neither ``checkpoint.keep_best`` nor early stopping is set.

    Raises:
        UserError: If no evaluation has ``checkpoint.best_metric``, or if it is unknown whether higher is
            better.
    """
    checkpoint, patience = config.checkpoint, config.train.early_stopping_patience
    if checkpoint.keep_best is None and patience is None:
        return None
    if not sources:
        raise UserError("data.eval_fraction: the data is too small to hold any out; set data.eval")
    metric = checkpoint.best_metric or _name("loss", next(iter(sources)))
    value, _, source = metric.removeprefix(EVALUATION).partition("/")
    names = metrics.names
    available = [_name(name, evaluated) for evaluated in sources for name in names or ("loss",)]
    is_custom = names is None and metric.startswith(EVALUATION) and source in sources
    if metric not in available and not is_custom:
        more = "" if names is not None else ", and those of your own metrics"
        raise UserError(
            f"checkpoint.best_metric: no evaluation of this run has {metric}; it has "
            f"{', '.join(available)}{more}"
        )
    mode = metrics.get_mode(value) if checkpoint.best_mode == "auto" else checkpoint.best_mode
    if mode is None:
        raise UserError(
            f"checkpoint.best_mode: nothing tells whether a higher {metric} is better; set min or max"
        )
    threshold = config.train.early_stopping_threshold
    return BestTracker(metric, mode, checkpoint.keep_best or 0, patience, threshold)


class Evaluations(Callback):
    """Callback that evaluates, and requests saves and the end of the run depending on the results.

    Args:
        run: The run that owns this callback.
        recorded: Function that returns whether the evaluation of a step is recorded.
        watchdog: Watchdog, which also observes the batches of evaluations.
    """

    def __init__(self, run: Run, recorded: Callable[[int], bool], watchdog: Watchdog) -> None:
        self._run = run
        self._prepared = run.prepared
        self._recorded = recorded
        self._watchdog = watchdog
        self._any = run.backend.reduce_any

    def on_start(self, run: Run) -> None:
        """Run an evaluation that the last launch missed, and end the run if early stopping has ended it."""
        progress, counts = run.progress, self._is_counted(run)
        if not self._prepared.data.evals:
            return
        due = counts or run.step == run.until
        if progress.step > 0 and due and self.is_missing(progress, counts=counts):
            self(progress, counts=counts)
        best_tracker = self._prepared.best_tracker
        progress.ended = best_tracker is not None and self._any(
            best_tracker.should_stop(progress.eval_history)
        )

    def evaluate_step(self, run: Run) -> None:
        """Evaluate after the latest step. Must be called on all ranks."""
        if not self._prepared.data.evals:
            return
        run.health.check(run)
        decision = self(run.progress, counts=self._is_counted(run))
        run.progress.ended = decision.stop
        run.saving = run.saving or decision.save or decision.stop

    def _is_counted(self, run: Run) -> bool:
        """Return whether the settings request an evaluation after the latest step.

        Only such evaluations count for the best checkpoints and for early stopping. An evaluation at the end
        of a launch may be additional.
        """
        train = run.config.train
        at_end = run.step == run.until == run.steps
        return at_end or run.due(train.eval_every, train.eval_every_epochs)

    def __call__(self, progress: Progress, *, counts: bool) -> Decision:
        """Evaluate and report. Must be called on all ranks.

        Args:
            progress: Position of the run. Its evaluation history is updated if the evaluation counts.
            counts: Whether the evaluation counts for the best checkpoints and for early stopping.

        Returns:
            Whether to save a checkpoint, and whether to end the run.
        """
        with self._run.pause():
            values = evaluate_all(self._prepared, self._run.engine, self._watchdog.watch_temporarily)
            self._run.call("on_evaluation", values)
        best_tracker = self._prepared.best_tracker
        if best_tracker is None or not counts:
            return Decision()
        decision = best_tracker(progress.eval_history, progress.step, values)
        # All ranks have the same values. Decide together anyway, because ranks that disagree would deadlock.
        return Decision(self._any(decision.save), self._any(decision.stop))

    def is_missing(self, progress: Progress, *, counts: bool) -> bool:
        """Return whether the evaluation after the latest step is missing on any rank. A collective call.

        Args:
            progress: Position of the run.
            counts: Whether the evaluation counts for the best checkpoints and for early stopping.
        """
        judged = self._prepared.best_tracker is None or progress.eval_history.step >= progress.step
        return self._any((counts and not judged) or not self._recorded(progress.step))


def describe_end(run: Run) -> str:
    """Describe why a run has ended before its last step."""
    if run.stopping:
        return f"ended at step {run.step}, as a callback asked"
    eval_history = run.progress.eval_history
    mark = "" if eval_history.mark is None else f" beyond {eval_history.mark:.4f}"
    return (
        f"ended early at step {run.step}: {eval_history.metric} has not improved{mark} for "
        f"{eval_history.waited} evaluations (train.early_stopping_patience)"
    )


def check_evaluation_data(data: Data) -> None:
    """Raise UserError if there is nothing to evaluate on."""
    if not data.evals:
        raise UserError(
            "--eval-only: data.eval_fraction is 0, so that there is nothing to evaluate on; set data.eval"
        )
