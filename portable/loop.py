"""THE training loop: the same for every backend, strategy and world size."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from portable.errors import RunError
from portable.model.loss import count_valid
from portable.terminal import at_a_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from portable.backend import Backend, Batch, Engine
    from portable.batch_plan import BatchPlan
    from portable.optim.schedule import Schedule

_STOPPING = b"\nstopping after this step, with a checkpoint; once more stops at once, without\n"


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step left on the device: the global mean loss and the gradient norm, unread."""

    loss: Tensor
    grad_norm: Tensor


@dataclass
class Progress:
    """Where the run stands.

    Attributes:
        step: optimizer steps taken.
        samples: sequences consumed, which is the position in the data.
        skipped: steps of these whose update was left out, as far as the device has been asked.
    """

    step: int
    samples: int
    skipped: int = 0


@dataclass(frozen=True)
class Cadence:
    """When to do what, in optimizer steps; 0 means never.

    Attributes:
        eval_samples: evaluate after a step that comes to another multiple of so many samples; 0 means never.
        save_samples: the same of saving.
    """

    until: int
    log_every: int
    eval_every: int
    save_every: int
    eval_samples: float = 0.0
    save_samples: float = 0.0


class Events:
    """What the loop calls when something is due. The defaults do nothing."""

    def on_step(self, progress: Progress) -> None:
        """After every step; must not read from the device."""

    def on_log(self, progress: Progress, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Every ``log_every`` steps, with values read from the device."""

    def on_eval(self, progress: Progress, loss: float) -> None:
        """After an evaluation."""

    def lacks_eval(self, progress: Progress) -> bool:
        """Whether the evaluation after ``progress.step`` is not on record; looked at on resuming."""
        return False

    def on_save(self, progress: Progress) -> None:
        """Write a checkpoint; all ranks are called."""

    def on_skipped(self, progress: Progress, count: int, told: str) -> None:
        """``count`` more updates were left out; ``told`` says of the latest which step it was, and why."""

    def on_pause(self, seconds: float) -> None:
        """After a step whose save and evaluation took ``seconds``, which are not training."""

    def last_checkpoint(self) -> str:
        """What to tell a person about the last good checkpoint."""
        return "none"

    def replay(self, step: int) -> str:
        """The command that takes ``step`` once more and looks where it stops being finite."""
        return f"portable-train --replay {step}"


def train_step(
    backend: Backend,
    engine: Engine,
    micro_batches: Iterator[Batch],
    *,
    plan: BatchPlan,
    first_sample: int,
    learning_rate: float,
    max_grad_norm: float,
    betas: tuple[float, float] | None = None,
) -> StepResult:
    """One optimizer step over the global batch, which begins at ``first_sample``.

    Nothing in here waits for the device.

    The loss is the mean over all valid tokens of the global batch, whatever their spread over micro-batches
    and ranks: their number is counted first, while the batches are still on the host, and every micro-batch's
    summed loss is divided by it.
    """
    batches = [next(micro_batches) for _ in range(plan.accumulation_steps)]
    valid = backend.total(sum(count_valid(batch["labels"]) for batch in batches))
    losses = []
    for index, batch in enumerate(batches):
        backend.seed(plan.dropout_seed(first_sample, index))
        last = index == plan.accumulation_steps - 1
        losses.append(engine.accumulate(backend.place(batch), valid, last=last))
    loss = backend.sum(torch.stack(losses).sum())
    grad_norm = engine.update(learning_rate, max_grad_norm, loss, betas=betas)
    return StepResult(loss, grad_norm)


def train(
    backend: Backend,
    engine: Engine,
    micro_batches: Iterator[Batch],
    eval_batches: Callable[[], Iterable[Batch]] | None,
    *,
    progress: Progress,
    cadence: Cadence,
    schedule: Schedule,
    plan: BatchPlan,
    max_grad_norm: float,
    events: Events,
) -> bool:
    """Run from ``progress`` until ``cadence.until``.

    Returns:
        whether the run was stopped early by SIGTERM or SIGINT, with a checkpoint saved.

    Raises:
        RunError: when a loss or gradient norm was not finite, as often as ``train.on_non_finite`` allows. The
            weights are those from before that step.
    """
    start = Progress(progress.step, progress.samples, progress.skipped)
    saved = progress.step

    def eval_is_due() -> bool:
        return eval_batches is not None and (
            progress.step == cadence.until
            or _due(progress.step, cadence.eval_every)
            or _passed(progress, plan, cadence.eval_samples)
        )

    def run_eval() -> None:
        assert eval_batches is not None
        events.on_eval(progress, evaluate(backend, engine, eval_batches()))

    if progress.step > 0 and eval_is_due() and backend.any(events.lacks_eval(progress)):
        run_eval()  # the leg before ended after the checkpoint and before the evaluation of its last step
    with stop_signals() as stop_requested:
        while progress.step < cadence.until:
            learning_rate = schedule(progress.step)
            result = train_step(
                backend,
                engine,
                micro_batches,
                plan=plan,
                first_sample=progress.samples,
                learning_rate=learning_rate,
                max_grad_norm=max_grad_norm,
                betas=schedule.betas(progress.step),
            )
            progress.step += 1
            progress.samples += plan.global_batch_size
            events.on_step(progress)

            stopping = backend.any(stop_requested())
            last = stopping or progress.step == cadence.until
            log_due = last or _due(progress.step, cadence.log_every)
            save_due = last or _due(progress.step, cadence.save_every)
            save_due = save_due or _passed(progress, plan, cadence.save_samples)
            if log_due or save_due:
                _look_for_skipped(engine, plan, start, progress, events)
            if log_due:
                loss, grad_norm = backend.read([result.loss, result.grad_norm])
                events.on_log(progress, loss, grad_norm, learning_rate)
            paused = time.perf_counter()
            if save_due and progress.step > saved:
                events.on_save(progress)
                saved = progress.step
            if eval_is_due() and (not stopping or progress.step == cadence.until):
                run_eval()
            events.on_pause(time.perf_counter() - paused)
            if stopping:
                return progress.step < cadence.until
    return False


def evaluate(backend: Backend, engine: Engine, batches: Iterable[Batch]) -> float:
    """Mean loss over all valid tokens of the evaluation batches of all ranks."""
    losses, valid = [], 0
    for batch in batches:
        valid += count_valid(batch["labels"])
        losses.append(backend.sum(engine.evaluate(backend.place(batch))))
    *sums, tokens = backend.read([*losses, backend.total(valid)])
    return math.fsum(sums) / max(tokens, 1)


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and SIGINT into a request to stop after the step; a second signal acts at once."""
    received = False

    def request(number: int, _: object) -> None:
        nonlocal received
        received = True
        signal.signal(number, previous[signal.Signals(number)])
        if at_a_terminal():
            os.write(2, _STOPPING)  # print may not be called in a signal handler

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, request) for number in ours}
    except ValueError:  # not the main thread, as in a notebook's worker: signals are not ours there
        yield lambda: False
        return
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _passed(progress: Progress, plan: BatchPlan, every: float) -> bool:
    """Whether the latest step has come to another multiple of ``every`` samples, or over it."""
    if every <= 0:
        return False
    before = progress.samples - plan.global_batch_size
    # A third of an epoch times three is an epoch, in spite of rounding.
    return math.floor(progress.samples / every + 1e-9) > math.floor(before / every + 1e-9)


def _look_for_skipped(
    engine: Engine, plan: BatchPlan, start: Progress, progress: Progress, events: Events
) -> None:
    """Bring ``progress.skipped`` up to date; tell, or raise, what is new. ``start``: of the leg."""
    health = engine.health()
    skipped = start.skipped + health.skipped_updates
    new, progress.skipped = skipped - progress.skipped, skipped
    if new == 0 or health.first_bad_update is None:
        return
    step = start.step + health.first_bad_update + 1
    sample = start.samples + health.first_bad_update * plan.global_batch_size
    what = "loss is" if health.bad_loss else "gradients are"
    told = f"step {step} (samples {sample} to {sample + plan.global_batch_size - 1}): the {what} not finite"
    see = f"to see where that begins: {events.replay(step)}"
    if not health.halted:
        events.on_skipped(progress, new, f"{told}; {see}")
        return
    if health.halted > 1:
        told += f", and no step of the {health.halted - 1} after it was"
    raise RunError(
        f"{told}, so the update was not made; last good checkpoint: {events.last_checkpoint()}; {see}; or "
        "lower train.learning_rate or train.max_grad_norm"
    )
