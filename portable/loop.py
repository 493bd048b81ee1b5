"""Training loop shared by all backends, strategies and world sizes.

:func:`run_training_loop` trains until the end step of a run, :func:`iter_steps` iterates over the
optimizer steps, and :func:`train_step` takes one step. The loop accesses the device only through a
:class:`portable.backend.Backend` and a :class:`portable.backend.Engine`. SIGTERM and SIGINT stop
the loop after the current step (see :class:`StopSignals`). With several ranks, the loop may take
one more step, because a stop request reaches the other ranks in the all-reduce at the start of the
next step.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from portable.errors import record_end_request
from portable.model.loss import sum_micro_batches
from portable.progress import StepResult
from portable.terminal import shows_run_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portable.backend import Backend, Engine
    from portable.batch import Batch
    from portable.batch_plan import BatchPlan
    from portable.callbacks import Run
    from portable.progress import RunProgress
    from portable.run.stages import PreparedRun


def train_step(
    backend: Backend,
    engine: Engine,
    micro_batches: Iterator[Batch],
    *,
    batch_plan: BatchPlan,
    first_sample: int,
    learning_rate: float,
    max_grad_norm: float,
    with_token_metrics: bool = True,
    is_stop_requested: Callable[[], bool] = lambda: False,
) -> StepResult:
    """Take one optimizer step without a host-device sync.

    The loss is the mean over all valid tokens in the global batch, regardless of the distribution of
    the tokens across micro-batches and ranks. The valid tokens of all micro-batches are counted first,
    while the batches are still on the host. Each micro-batch's summed loss is then divided by the
    global count. A custom ``train.loss`` can use weights instead of token counts.

    Args:
        backend: Backend of this rank.
        engine: Model and optimizer of this rank.
        micro_batches: Iterator over this rank's micro-batches, in host memory. The step consumes
            ``batch_plan.accumulation_steps`` of them.
        batch_plan: Division of the global batch into micro-batches.
        first_sample: Index of the first sample in the global batch, which determines the dropout seeds.
        learning_rate: Learning rate for this step.
        max_grad_norm: Maximum global gradient norm for gradient clipping. 0 disables clipping.
        with_token_metrics: Whether to also compute token accuracy and entropy, which only logged steps
            need.
        is_stop_requested: Function that returns whether this rank requests a stop. The request is sent
            to all ranks together with the number of valid tokens.

    Returns:
        The global loss, the gradient norm and the values to log, as device tensors.
    """
    batches = [next(micro_batches) for _ in range(batch_plan.accumulation_steps)]
    valid = backend.sum_host_numbers(
        sum(engine.objective.compute_weight(batch) for batch in batches), stop=is_stop_requested()
    )
    shares = []
    engine.begin_step(learning_rate)
    for index, batch in enumerate(batches):
        backend.seed_device_generator(batch_plan.compute_dropout_seed(first_sample, index))
        device_batch, last = backend.copy_to_device(batch), index == len(batches) - 1
        shares.append(
            engine.accumulate_gradients(
                device_batch, valid, is_last_micro_batch=last, with_token_metrics=with_token_metrics
            )
        )
    step_sums = sum_micro_batches(shares)
    values = backend.sum_tensor_over_ranks(step_sums.values)
    # Split before the update: on XLA, a later operation would become part of the next micro-batch's graph.
    loss, metrics = values[0], values[1:]
    grad_norm = engine.take_optimizer_step(learning_rate, max_grad_norm, loss)
    return StepResult(loss, grad_norm, metrics, step_sums.names, learning_rate)


def iter_steps(
    prepared: PreparedRun,
    engine: Engine,
    micro_batches: Iterator[Batch],
    progress: RunProgress,
    end_step: int,
    logs_step: Callable[[int], bool] = lambda step: True,
    is_stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[StepResult]:
    """Take optimizer steps until ``progress.step`` reaches ``end_step`` or ``progress.has_ended`` is set.

    All ranks take the same number of steps. No step syncs the host with the device.

    Args:
        prepared: The run's backend, batch plan, schedule, and config.
        engine: Model and optimizer of this rank.
        micro_batches: Iterator over this rank's micro-batches, in host memory.
        progress: Progress of the run, which is updated before each result is yielded.
        end_step: Step to stop at.
        logs_step: Function that returns whether a step is logged, given its number (starting at 1). Token
            accuracy and entropy are only computed for logged steps.
        is_stop_requested: Function that returns whether this rank requests a stop. See :func:`train_step`.

    Yields:
        The result of each step.
    """
    while progress.step < end_step and not progress.has_ended:
        result = train_step(
            prepared.backend,
            engine,
            micro_batches,
            batch_plan=prepared.batch_plan,
            first_sample=progress.samples,
            learning_rate=prepared.schedule(progress.step),
            max_grad_norm=prepared.config.train.max_grad_norm or 0.0,
            with_token_metrics=logs_step(progress.step + 1),
            is_stop_requested=is_stop_requested,
        )
        progress.step += 1
        progress.samples += prepared.batch_plan.global_batch_size
        yield result


def run_training_loop(run: Run, micro_batches: Iterable[Batch], signals: StopSignals) -> bool:
    """Train until step ``run.end_step``, calling the run's callbacks after each step.

    The loop also ends if a callback, an evaluation or a signal stops the run.

    Args:
        run: The run to train. Its ``result`` and ``is_stopped_by_signal`` attributes are updated
            after each step.
        micro_batches: This rank's micro-batches, in host memory.
        signals: Signal handlers to install while the loop runs. If a signal stopped the run, they
            stay installed, so that another SIGTERM does not interrupt the checkpoint that is still
            being written. They also stay installed if an exception is raised. In both cases, the
            caller restores the previous handlers.

    Returns:
        Whether SIGTERM or SIGINT stopped the run early. In this case, the callbacks have begun to
        save a checkpoint. False if the run reached ``run.end_step``, or if a callback or an
        evaluation ended it, even if a signal arrived during the last step.
    """
    signals.install_handlers()
    batches, requested = iter(micro_batches), signals.is_requested
    for result in iter_steps(
        run.prepared, run.engine, batches, run.progress, run.end_step, run.logs_step, requested
    ):
        run.result = result
        # Usually, a request of another rank arrives with the token count of the next step. Before an
        # evaluation or a save, the ranks exchange requests at once, because an evaluation would use up the
        # time that a scheduler leaves between SIGTERM and SIGKILL, and a save would be followed by a second
        # save.
        evaluates_or_saves = run.is_evaluation_due or run.is_save_due
        exchange_stop_request = (
            run.backend.reduce_any if evaluates_or_saves else run.backend.is_stop_requested
        )
        run.is_stopped_by_signal = exchange_stop_request(signals.requested)
        run.finish_step()
        if run.is_stopped_by_signal:
            break
    else:
        signals.restore_handlers()
    return run.is_stopped_by_signal and run.step < run.end_step and not run.progress.has_ended


_STOP_MESSAGE = (
    b"\nstopping after this step and saving a checkpoint; press Ctrl-C again to stop without saving\n"
)


class StopSignals:
    """Handlers that turn SIGTERM and SIGINT into a request to stop after the current step.

    The constructor does not install the handlers. Call :meth:`install_handlers`, and later
    :meth:`restore_handlers`.

    A second Ctrl-C terminates the process immediately, because the first SIGINT restores the
    previous handler. A second SIGTERM has no effect, because schedulers may send several signals,
    and the ranks still have to save a checkpoint. Signals that were ignored before stay ignored.
    Python can set signal handlers only in the main thread, so signals are not intercepted if
    training runs in another thread.

    Attributes:
        requested: Whether a signal has been received.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def install_handlers(self) -> None:
        """Install the handlers for SIGTERM and SIGINT, and remember the previous handlers.

        Signals that were ignored before stay ignored. The method does nothing outside of the main
        thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:
                self._previous[number] = handler
                signal.signal(number, self._request_stop)

    def is_requested(self) -> bool:
        """Return whether a signal has been received. This method is passed to :func:`iter_steps`."""
        return self.requested

    def restore_handlers(self) -> None:
        """Restore the handlers that :meth:`install_handlers` replaced."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _request_stop(self, number: int, _: object) -> None:
        """Handle a signal by requesting a stop.

        On the first signal, a message is printed if this process draws the progress bars of the
        run. SIGINT also restores the previous handler of SIGINT. SIGTERM is also recorded with
        :func:`record_end_request`, so that this process does not wait for error reports of other
        ranks.

        Args:
            number: Signal number.
        """
        if shows_run_progress_bars() and not self.requested:
            os.write(2, _STOP_MESSAGE)  # os.write, because print is not safe in a signal handler
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._previous.pop(number))
        else:
            record_end_request()
