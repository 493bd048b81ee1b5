"""Training loop shared by all backends, strategies and world sizes.

:func:`train` runs a launch, :func:`iter_steps` iterates over its optimizer steps, and :func:`train_step`
takes one step. The loop accesses the device only through a :class:`portable.backend.Backend` and a
:class:`portable.backend.Engine`. SIGTERM and SIGINT stop it after the current step (see
:class:`StopSignals`). If there are several ranks, they stop after the next step, because the all-reduce at
the start of a step distributes the request.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from portable.errors import note_end_request
from portable.model.loss import add_micro_batches
from portable.progress import StepResult
from portable.terminal import shows_run_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portable.backend import Backend, Engine
    from portable.batch import Batch
    from portable.batch_plan import BatchPlan
    from portable.callbacks import Run
    from portable.progress import Progress
    from portable.run.stages import Prepared


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
    valid = backend.total(sum(engine.objective.compute_weight(batch) for batch in batches), stop=stop())
    shares = []
    for index, batch in enumerate(batches):
        backend.seed(plan.compute_dropout_seed(first_sample, index))
        placed, last = backend.place(batch), index == len(batches) - 1
        shares.append(engine.accumulate(placed, valid, last=last, with_token_metrics=with_token_metrics))
    step_sums = add_micro_batches(shares)
    values = backend.sum(step_sums.values)
    # Split before the update: on XLA, a later operation would become part of the next micro-batch's graph.
    loss, metrics = values[0], values[1:]
    grad_norm = engine.update(learning_rate, max_grad_norm, loss)
    return StepResult(loss, grad_norm, metrics, step_sums.names, learning_rate)


def iter_steps(
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
    """Train until step ``run.until``, calling the run's callbacks after each step.

    Args:
        run: The run to train. Its ``result`` and ``stopped`` attributes are updated after each step.
        micro_batches: This rank's micro-batches, in host memory.
        signals: Signals that request a stop. They are intercepted during the steps. If they stopped the run,
            the caller restores the previous handlers, because a repeated SIGTERM must not interrupt the
            checkpoint that is still being written.

    Returns:
        True if SIGTERM or SIGINT stopped the run early. The callbacks save a checkpoint in this case as well.
    """
    signals.install()
    batches, requested = iter(micro_batches), signals.is_requested
    for result in iter_steps(run.prepared, run.engine, batches, run.progress, run.until, run.logs, requested):
        run.result = result
        # A request of another rank arrives with the token count of the next step. Before an evaluation or a
        # save, the ranks exchange requests at once: an evaluation would use up the time that a scheduler
        # leaves between SIGTERM and SIGKILL, and the save would be followed by another one.
        pauses = run.evaluation_is_due or run.save_is_due
        share = run.backend.reduce_any if pauses else run.backend.stop_requested
        run.stopped = share(signals.requested)
        run.finish_step()
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
        if shows_run_bars() and not self.requested:
            os.write(2, _STOP_MESSAGE)  # os.write, because print is not safe in a signal handler
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        else:
            note_end_request()
