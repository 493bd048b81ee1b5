"""Evaluate the model during a run, select the best checkpoint, and decide whether to stop early."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from portable.callbacks import Callback
from portable.errors import UserError
from portable.evaluation.best_tracker import BestTracker, EvalDecision
from portable.evaluation.metrics import evaluate
from portable.reporting.metrics import EVALUATION_PREFIX
from portable.run.batches import build_eval_loader, show_evaluation_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from portable.backend import Engine
    from portable.callbacks import Run
    from portable.config import RunConfig
    from portable.data.dataset import RunData
    from portable.data.samples.loader import BatchIterator
    from portable.evaluation.metrics import MetricSet
    from portable.progress import RunProgress
    from portable.ranks.watchdog import Watchdog
    from portable.run.stages import PreparedRun


def evaluate_all_sources(
    prepared: PreparedRun,
    engine: Engine,
    watch_batches: Callable[[BatchIterator], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Compute all metrics on all evaluation sources. Must be called on all ranks.

    If ``train.eval_ema`` is set, the averaged weights are evaluated.

    Args:
        prepared: The run.
        engine: Engine of this rank.
        watch_batches: Function that is called with the batches of each evaluation, and returns a
            context in which the evaluation runs.

    Returns:
        The values, keyed by their names in ``metrics.jsonl``, such as ``eval_loss``.
    """
    results: dict[str, Any] = {}
    averaged = prepared.config.train.eval_ema
    if averaged:
        engine.swap_ema_weights()
    for source, samples in prepared.data.evals.items():
        loader = build_eval_loader(prepared, samples)
        batches = iter(loader)
        with watch_batches(batches):
            batches_with_bar = show_evaluation_progress(
                batches, len(loader), is_shown=prepared.backend.rank == 0
            )
            values = evaluate(prepared.backend, engine, batches_with_bar, prepared.metrics)
        results |= {_format_metric_key(value, source): number for value, number in values.items()}
    if averaged:
        engine.swap_ema_weights()
    return results


def _format_metric_key(metric: str, source: str) -> str:
    """Format the key of a metric in ``metrics.jsonl``, such as ``eval_loss/books``.

    If ``source`` is empty, the key has no suffix, as in ``eval_loss``.
    """
    return f"{EVALUATION_PREFIX}{metric}/{source}" if source else f"{EVALUATION_PREFIX}{metric}"


def build_best_tracker(config: RunConfig, sources: Collection[str], metrics: MetricSet) -> BestTracker | None:
    """Build the tracker for best checkpoints and early stopping.

    If ``checkpoint.best_metric`` is not set, the tracker compares the loss on the first source. If
    a custom metric does not declare the names of its values, this function accepts any name of a
    value, and the tracker checks the name after an evaluation.

    Args:
        config: Config of the run.
        sources: Names of the evaluation sources.
        metrics: Metrics of the evaluations.

    Returns:
        The tracker. None if neither ``checkpoint.keep_best`` nor early stopping is set.

    Raises:
        UserError: If a tracker is needed, but there are no evaluation sources or the evaluations do
            not compute ``checkpoint.best_metric``. Also if it is unknown whether higher values are
            better.
    """
    checkpoint, patience = config.checkpoint, config.train.early_stopping_patience
    if checkpoint.keep_best is None and patience is None:
        return None
    if not sources:
        raise UserError(
            "data.eval_fraction: the data is too small to hold out samples; set data.eval to separate "
            "evaluation data"
        )
    metric = checkpoint.best_metric or _format_metric_key("loss", next(iter(sources)))
    metric_name, _, source = metric.removeprefix(EVALUATION_PREFIX).partition("/")
    names = metrics.value_names
    available = [_format_metric_key(name, evaluated) for evaluated in sources for name in names or ("loss",)]
    is_custom = names is None and metric.startswith(EVALUATION_PREFIX) and source in sources
    if metric not in available and not is_custom:
        custom_hint = "" if names is not None else ", or a value of a custom metric"
        raise UserError(
            f"checkpoint.best_metric: the evaluations of this run do not report {metric}; use one of "
            f"{', '.join(available)}{custom_hint}"
        )
    mode = (
        metrics.get_better_direction(metric_name) if checkpoint.best_mode == "auto" else checkpoint.best_mode
    )
    if mode is None:
        raise UserError(
            f"checkpoint.best_mode: auto cannot be used with {metric}, because it is unknown whether higher "
            "values are better; set checkpoint.best_mode to min or max"
        )
    threshold = config.train.early_stopping_threshold
    return BestTracker(metric, mode, checkpoint.keep_best or 0, patience, threshold)


class EvaluationCallback(Callback):
    """Callback that evaluates the model. Depending on the results, it requests a save or ends the run.

    Args:
        run: The run that owns this callback.
        is_recorded: Function that takes a step, and returns whether ``metrics.jsonl`` already
            contains the evaluation of this step. On ranks other than 0, which do not write this
            file, it always returns True.
        watchdog: Watchdog that also monitors the batches of evaluations.
    """

    def __init__(self, run: Run, is_recorded: Callable[[int], bool], watchdog: Watchdog) -> None:
        self._run = run
        self._prepared = run.prepared
        self._is_recorded = is_recorded
        self._watchdog = watchdog
        self._reduce_any = run.backend.reduce_any

    def on_start(self, run: Run) -> None:
        """Run the evaluation that the last launch missed, if any, and set ``run.progress.has_ended``.

        Does nothing without evaluation data. An evaluation is missed, for example, if a signal
        ends a launch between a step and its evaluation. See :meth:`is_evaluation_missing`.
        ``has_ended`` is set to True if early stopping has already ended the run, and otherwise to
        False.
        """
        progress, counts = run.progress, self._counts_for_best(run)
        if not self._prepared.data.evals:
            return
        due = counts or run.step == run.end_step
        if progress.step > 0 and due and self.is_evaluation_missing(progress, counts=counts):
            self(progress, counts=counts)
        best_tracker = self._prepared.best_tracker
        progress.has_ended = best_tracker is not None and self._reduce_any(
            best_tracker.should_end_run(progress.eval_history)
        )

    def evaluate_step(self, run: Run) -> None:
        """Evaluate after the latest step. Must be called on all ranks.

        Does nothing without evaluation data. Sets ``run.progress.has_ended`` and
        ``run.is_save_requested`` if the result ends the run or requires a save.

        Raises:
            RunError: If too many updates were skipped.
        """
        if not self._prepared.data.evals:
            return
        run.health.report_skipped_updates(run)
        decision = self(run.progress, counts=self._counts_for_best(run))
        run.progress.has_ended = decision.stop
        run.is_save_requested = run.is_save_requested or decision.save or decision.stop

    def _counts_for_best(self, run: Run) -> bool:
        """Return whether an evaluation now counts toward the best checkpoint and early stopping.

        The evaluation counts if the settings schedule it after the latest step, or if the run has
        reached its last step. An evaluation that only happens because a launch ends does not count.
        Otherwise, the result would depend on how the run is divided into launches.
        """
        train = run.config.train
        at_end = run.step == run.end_step == run.steps
        return at_end or run.is_interval_reached(train.eval_every, train.eval_every_epochs)

    def __call__(self, progress: RunProgress, *, counts: bool) -> EvalDecision:
        """Evaluate all sources, and report the results. Must be called on all ranks.

        Args:
            progress: Progress of the run. Its evaluation history is updated if the evaluation counts.
            counts: Whether the evaluation counts for best checkpoints and early stopping.

        Returns:
            Whether to save a checkpoint, and whether to end the run. Both are equal on all ranks.
        """
        with self._run.measure_pause():
            values = evaluate_all_sources(
                self._prepared, self._run.engine, self._watchdog.watch_batches_temporarily
            )
            self._run.call_callbacks("on_evaluation", values)
        best_tracker = self._prepared.best_tracker
        if best_tracker is None or not counts:
            return EvalDecision()
        decision = best_tracker(progress.eval_history, progress.step, values)
        # All ranks have the same values. They decide together anyway, because different decisions would cause
        # a deadlock.
        return EvalDecision(self._reduce_any(decision.save), self._reduce_any(decision.stop))

    def is_evaluation_missing(self, progress: RunProgress, *, counts: bool) -> bool:
        """Return whether the evaluation after the latest step is missing on at least one rank.

        An evaluation is missing if ``metrics.jsonl`` does not contain it. If ``counts`` is True and
        the run has a best tracker, it is also missing if ``progress.eval_history`` does not contain
        it, because best checkpoints and early stopping depend on this history. This method is a
        collective call.

        Args:
            progress: Progress of the run, including its evaluation history.
            counts: Whether the evaluation counts for best checkpoints and early stopping.
        """
        judged = self._prepared.best_tracker is None or progress.eval_history.step >= progress.step
        return self._reduce_any((counts and not judged) or not self._is_recorded(progress.step))


def describe_early_end(run: Run) -> str:
    """Describe why a run ended before its last step: a callback or early stopping."""
    if run.is_stop_requested:
        return f"ended at step {run.step}, as requested by a callback"
    eval_history = run.progress.eval_history
    mark = "" if eval_history.mark is None else f" beyond {eval_history.mark:.4f}"
    return (
        f"ended early at step {run.step}: {eval_history.metric} has not improved{mark} for "
        f"{eval_history.waited} evaluations (train.early_stopping_patience)"
    )


def check_evaluation_data(data: RunData) -> None:
    """Raise UserError if the run has no evaluation data, which ``--eval-only`` requires."""
    if not data.evals:
        raise UserError(
            "--eval-only: there is no evaluation data, because data.eval_fraction is 0 or the data is too "
            "small to hold out samples; set data.eval to separate evaluation data"
        )
