"""Training loop shared by all backends, strategies and world sizes.

:func:`train` runs a launch, :func:`steps` iterates over its optimizer steps, and :func:`train_step` takes one
step. The loop accesses the device only through a :class:`portable.backend.Backend` and a
:class:`portable.backend.Engine`. SIGTERM and SIGINT stop it after the current step (see
:class:`StopSignals`). If there are several ranks, they stop after the next step, because the all-reduce at
the start of a step distributes the request.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable.errors import note_end_request
from portable.evaluation.best_tracker import EvalHistory
from portable.model.loss import add_micro_batches
from portable.terminal import at_a_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from converters.storage.path_or_url import Place
    from portable.backend import Backend, Batch, Engine
    from portable.batch_plan import BatchPlan
    from portable.run.callbacks import Run
    from portable.run.stages import Prepared


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step.

    The tensors stay on the device, so creating a result does not trigger a host-device sync.

    Attributes:
        loss: Mean loss over the valid tokens of the global batch, an fp32 scalar.
        grad_norm: Global gradient norm before clipping, an fp32 scalar.
        metrics: Values that are logged besides the loss, fp32 ``[metrics]``.
        metric_names: Names of ``metrics``, for :meth:`portable.model.loss.Objective.name_metrics`.
        learning_rate: Learning rate used for the step.
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: Tensor
    metric_names: tuple[str, ...] = ()
    learning_rate: float = 0.0


@dataclass
class Progress:
    """Progress of the run, saved in every checkpoint and restored on resume.

    Attributes:
        step: Number of optimizer steps taken so far.
        samples: Number of samples consumed so far, which is also the position in the data.
        skipped: Number of steps whose update was skipped, as of the last read from the device.
        eval_history: Best evaluation results and the early-stopping counters.
        ended: True if early stopping has ended the run.
    """

    step: int
    samples: int
    skipped: int = 0
    eval_history: EvalHistory = field(default_factory=EvalHistory)
    ended: bool = False


class Callback:
    """Base class of the hooks that the training loop calls between steps.

    A run has an ordered list of callbacks, and every hook is invoked on each of them in that order. Hooks run
    on all ranks, and an exception in any hook stops the run on all ranks.

    A custom callback, listed in ``train.callbacks`` as ``my_package.my_module:MyCallback``, can implement any
    of the ``on_*`` methods. It does not need to inherit from this class, and it must not modify the model.
    Since :meth:`on_step` runs after every step, it must not read from the device: that would block the host
    until the device has finished the step.

    Example:
        Print the loss every time it is logged::

            class PrintLoss:
                def on_log(self, run, values):
                    print(run.step, values["loss"])
    """

    def on_start(self, run: Run) -> None:
        """Handle the start of a launch, before its first step."""

    def on_step(self, run: Run) -> None:
        """Handle the end of a training step.

        Reading from the device is only allowed if this step is also logged, evaluated, or saved.
        """

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Handle the values logged for a step.

        Args:
            run: The current run.
            values: Logged values, keyed by name: the loss, the gradient norm, the learning rate, and any
                additional values logged by ``train.loss``.
        """

    def on_evaluation(self, run: Run, values: Mapping[str, Any]) -> None:
        """Handle the results of an evaluation.

        Args:
            run: The current run.
            values: Evaluation metrics, keyed by their names in ``metrics.jsonl``.
        """

    def on_save(self, run: Run) -> None:
        """Handle the start of a save, when the trainer begins to write a checkpoint."""

    def on_end(self, run: Run) -> None:
        """Handle the end of a launch, before the final model is exported."""

    # -- Internal hooks, which custom callbacks cannot implement -----------------------------------------

    def skipped(self, run: Run, count: int, message: str) -> None:
        """Handle skipped optimizer updates.

        Args:
            run: The current run.
            count: Number of updates skipped since the previous call.
            message: Description of the most recent streak of skipped updates.
        """

    def paused(self, run: Run, seconds: float) -> None:
        """Handle a pause of ``seconds`` during which training waited for an evaluation or a save."""

    def completed(self, run: Run, checkpoint: Place) -> None:
        """Handle a completed checkpoint. Only called on rank 0."""

    def close(self) -> None:
        """Release resources at the end of a launch, even if the launch failed."""


def train_step(
    backend: Backend,
    engine: Engine,
    micro_batches: Iterator[Batch],
    *,
    plan: BatchPlan,
    first_sample: int,
    learning_rate: float,
    max_grad_norm: float,
    with_token_metrics: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Take one optimizer step without a host-device sync.

    The loss is the mean over all valid tokens in the global batch, regardless of how the tokens are
    distributed across micro-batches and ranks. The valid tokens of all micro-batches are counted up front,
    while the batches are still on the host, and each micro-batch's summed loss is divided by the global
    count. A custom ``train.loss`` can use weights instead of token counts.

    Args:
        backend: Backend of this rank.
        engine: Model and optimizer of this rank.
        micro_batches: Iterator over this rank's micro-batches, in host memory. The step consumes
            ``plan.accumulation_steps`` of them.
        plan: Division of the global batch into micro-batches.
        first_sample: Index of the first sample in the global batch, which determines the dropout seeds.
        learning_rate: Learning rate for this step.
        max_grad_norm: Maximum global gradient norm for gradient clipping. 0 disables clipping.
        with_token_metrics: Whether to also compute token accuracy and entropy, which only logged steps need.
        stop: Function that returns whether this rank requests a stop. The request is sent to all ranks
            together with the number of valid tokens.

    Returns:
        The global loss and gradient norm, as device tensors.
    """
    batches = [next(micro_batches) for _ in range(plan.accumulation_steps)]
    valid = backend.total(sum(engine.objective.weight(batch) for batch in batches), stop=stop())
    shares = []
    for index, batch in enumerate(batches):
        backend.seed(plan.dropout_seed(first_sample, index))
        placed, last = backend.place(batch), index == len(batches) - 1
        shares.append(engine.accumulate(placed, valid, last=last, with_token_metrics=with_token_metrics))
    step_sums = add_micro_batches(shares)
    values = backend.sum(step_sums.values)
    # Split before the update: on XLA, a later operation would become part of the next micro-batch's graph.
    loss, metrics = values[0], values[1:]
    grad_norm = engine.update(learning_rate, max_grad_norm, loss)
    return StepResult(loss, grad_norm, metrics, step_sums.names, learning_rate)


def steps(
    prepared: Prepared,
    engine: Engine,
    micro_batches: Iterator[Batch],
    progress: Progress,
    until: int,
    logs: Callable[[int], bool] = lambda step: True,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[StepResult]:
    """Take optimizer steps until ``progress.step`` reaches ``until`` or ``progress.ended`` is set.

    All ranks take the same number of steps. No step syncs the host with the device.

    Args:
        prepared: The run's backend, batch plan, schedule, and config.
        engine: Model and optimizer of this rank.
        micro_batches: Iterator over this rank's micro-batches, in host memory.
        progress: Progress of the run, which is updated before each result is yielded.
        until: Step to stop at.
        logs: Function that returns whether a step is logged, given its number (starting at 1). Token accuracy
            and entropy are only computed for logged steps.
        stop: Function that returns whether this rank requests a stop; see :func:`train_step`.

    Yields:
        The result of each step.
    """
    while progress.step < until and not progress.ended:
        result = train_step(
            prepared.backend,
            engine,
            micro_batches,
            plan=prepared.plan,
            first_sample=progress.samples,
            learning_rate=prepared.schedule(progress.step),
            max_grad_norm=prepared.config.train.max_grad_norm or 0.0,
            with_token_metrics=logs(progress.step + 1),
            stop=stop,
        )
        progress.step += 1
        progress.samples += prepared.plan.global_batch_size
        yield result


def train(run: Run, micro_batches: Iterable[Batch], signals: StopSignals) -> bool:
    """Train until step ``run.until``, invoking the run's callbacks after each step.

    Args:
        run: The run to train. Its ``result`` and ``stopped`` attributes are updated after each step.
        micro_batches: This rank's micro-batches, in host memory.
        signals: Signals that request a stop. They are intercepted during the steps. If they stopped the run,
            the caller restores the previous handlers, because a repeated SIGTERM must not interrupt the
            checkpoint that is still being written.

    Returns:
        True if SIGTERM or SIGINT stopped the run early. The callbacks save a checkpoint in this case as well.
    """
    run.call("on_start")
    signals.install()
    batches = run.watch_batches(micro_batches)
    requested = signals.is_requested
    for result in steps(run.prepared, run.engine, batches, run.progress, run.until, run.logs, requested):
        run.result = result
        # A request of another rank arrives with the token count of the next step. Before an evaluation or a
        # save, the ranks exchange requests at once: an evaluation would use up the time that a scheduler
        # leaves between SIGTERM and SIGKILL, and the save would be followed by another one.
        share = run.backend.any if run.pauses else run.backend.stop_requested
        run.stopped = share(requested())
        run.call("on_step")
        if run.stopped:
            break
    else:
        signals.restore()
    return run.stopped and run.step < run.until and not run.progress.ended


_STOP_MESSAGE = (
    b"\nstopping after this step and saving a checkpoint; press Ctrl-C again to stop without saving\n"
)


class StopSignals:
    """Signal handlers that turn SIGTERM and SIGINT into a request to stop after the current step.

    A second Ctrl-C terminates the process immediately, because the first SIGINT restores its previous
    handler. A repeated SIGTERM has no effect: schedulers send it more than once, and the ranks still have to
    save a checkpoint. Signals that were already ignored remain ignored. Signal handlers can only be set in
    the main thread; in other threads, signals are not intercepted.

    Attributes:
        requested: Whether a signal has been received.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Set the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:
                self._previous[number] = handler
                signal.signal(number, self._request_stop)

    def is_requested(self) -> bool:
        """Return whether a signal has been received."""
        return self.requested

    def restore(self) -> None:
        """Restore the previous handlers."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _request_stop(self, number: int, _: object) -> None:
        if at_a_terminal() and not self.requested:
            os.write(2, _STOP_MESSAGE)  # os.write, because print is not safe in a signal handler
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        else:
            note_end_request()
