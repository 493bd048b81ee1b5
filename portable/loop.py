"""The training loop, the same for every backend, strategy and world size; and what SIGTERM does to it."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from portable.evaluation.best_tracker import EvalHistory
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
    """The global mean loss and the gradient norm of an optimizer step, as scalars on the device.

    Attributes:
        loss: the mean over the valid tokens of the global batch.
        grad_norm: before clipping.
        numbers: what ``train.loss`` logs beside the loss, in one tensor ``[numbers]``; None if nothing.
        learning_rate: of the step.
    """

    loss: Tensor
    grad_norm: Tensor
    numbers: Tensor | None = None
    learning_rate: float = 0.0


@dataclass
class Progress:
    """The state of the run.

    Attributes:
        step: optimizer steps done.
        samples: samples consumed, which is the position in the data.
        skipped: steps with a skipped update, as of the last read from the device.
        eval_history: what the evaluations came to.
        ended: whether they ended the run early.
    """

    step: int
    samples: int
    skipped: int = 0
    eval_history: EvalHistory = field(default_factory=EvalHistory)
    ended: bool = False


class Callback:
    """What happens beside the steps of a launch. A run has a list of them, whose order is the order of calls.

    One of the user's, such as ``my_package.my_module:MyCallback`` in ``train.callbacks``, has some of the
    methods that begin with ``on_``, and need not be of this class. All are called on every rank. An exception
    in one ends the run on all ranks. None may change the model. :meth:`on_step` comes after every step, so it
    must not read from the device.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step of a launch."""

    def on_step(self, run: Run) -> None:
        """After every step. Must not read from the device, unless something is logged, evaluated or saved."""

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """With the loss, the gradient norm, the learning rate and what ``train.loss`` logs."""

    def on_evaluation(self, run: Run, values: Mapping[str, Any]) -> None:
        """With the values of an evaluation, named as in metrics.jsonl."""

    def on_save(self, run: Run) -> None:
        """A checkpoint of this step is being written."""

    def on_end(self, run: Run) -> None:
        """After the last step of a launch, before the export."""

    # -- not for the user's ------------------------------------------------------------------------------

    def over(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """``batches`` of the steps or of an evaluation, looked after on their way."""
        return batches

    def skipped(self, run: Run, count: int, message: str) -> None:
        """``count`` more updates were skipped; ``message`` describes the latest streak."""

    def paused(self, run: Run, seconds: float) -> None:
        """An evaluation or a save took ``seconds``."""

    def completed(self, run: Run, checkpoint: Place) -> None:
        """A checkpoint is complete; on rank 0 alone."""

    def close(self) -> None:
        """The launch has ended, whatever has happened."""

    def call(self, method: str, run: Run, *values: Any) -> None:
        """Call one of the methods above."""
        getattr(self, method)(run, *values)


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
) -> StepResult:
    """Take one optimizer step over the global batch that starts at ``first_sample``, without a host sync.

    The loss is the mean over all valid tokens of the global batch, however they are spread over micro-batches
    and ranks. They are counted (or weighed, as ``train.loss`` says) while the batches are still on the host,
    and every micro-batch's summed loss is divided by the count.
    """
    engine.objective.with_token_metrics = with_token_metrics
    batches = [next(micro_batches) for _ in range(plan.accumulation_steps)]
    valid = backend.total(sum(engine.objective.weight(batch) for batch in batches))
    losses = []
    for index, batch in enumerate(batches):
        backend.seed(plan.dropout_seed(first_sample, index))
        last = index == plan.accumulation_steps - 1
        losses.append(engine.accumulate(backend.place(batch), valid, last=last))
    sums = backend.sum(torch.stack(losses).sum(dim=0))
    loss, numbers = (sums, None) if sums.dim() == 0 else (sums[0], sums[1:])
    grad_norm = engine.update(learning_rate, max_grad_norm, loss)
    return StepResult(loss, grad_norm, numbers, learning_rate)


def steps(
    prepared: Prepared,
    engine: Engine,
    micro_batches: Iterator[Batch],
    progress: Progress,
    until: int,
    logs: Callable[[int], bool] = lambda step: True,
) -> Iterator[StepResult]:
    """Take optimizer steps until ``progress.step`` is ``until`` or ``progress.ended``; all ranks do alike.

    Yields what came of each, once ``progress`` has moved on. Without a host sync.

    Args:
        logs: whether a step, from 1, is logged, and so measures hits and entropy beside its loss.
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
        )
        progress.step += 1
        progress.samples += prepared.plan.global_batch_size
        yield result


def train(run: Run, micro_batches: Iterable[Batch]) -> bool:
    """Train until step ``run.until``, with the callbacks of ``run`` beside the steps.

    Returns:
        whether SIGTERM or SIGINT stopped the run early. A checkpoint is saved then, too.
    """
    run.call("on_start")
    with stop_signals() as stop_requested:
        batches = iter(run.over(micro_batches))
        for result in steps(run.prepared, run.engine, batches, run.progress, run.until, run.logs):
            run.result = result
            run.stopped = run.backend.any(stop_requested())
            run.call("on_step")
            if run.stopped:
                break
    return run.stopped and run.step < run.until and not run.progress.ended


_STOPPING = b"\nstopping after this step and saving a checkpoint; again to stop now without saving\n"


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and SIGINT into a request to stop after the step. A second signal has its usual effect."""
    received = False

    def request(number: int, _: object) -> None:
        nonlocal received
        received = True
        signal.signal(number, previous[number])
        if at_a_terminal():
            os.write(2, _STOPPING)  # print is not safe in a signal handler

    found = {int(number): signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    previous = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
    try:
        for number in previous:
            signal.signal(number, request)
    except ValueError:  # only the main thread can set signal handlers
        yield lambda: False
        return
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
