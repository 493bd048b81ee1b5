"""The training loop, the same for every backend, strategy and world size."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from portable.errors import RunError
from portable.evaluation.standing import Standing
from portable.ranks.stop_signals import stop_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from portable.backend import Backend, Batch, Engine
    from portable.batch_plan import BatchPlan
    from portable.evaluation.standing import Verdict
    from portable.optim.schedule import Schedule


@dataclass(frozen=True)
class StepResult:
    """The global mean loss and the gradient norm of an optimizer step, as scalars on the device.

    ``numbers`` are those that ``train.loss`` logs beside it, ``[numbers]``.
    """

    loss: Tensor
    grad_norm: Tensor
    numbers: Tensor | None = None


@dataclass
class Progress:
    """The state of the run.

    Attributes:
        step: optimizer steps done.
        samples: sequences consumed, which is the position in the data.
        skipped: steps with a skipped update, as of the last read from the device.
        standing: what the evaluations came to.
        ended: whether they ended the run early.
    """

    step: int
    samples: int
    skipped: int = 0
    standing: Standing = field(default_factory=Standing)
    ended: bool = False


class Evaluation(Protocol):
    """The evaluations of a run, and what follows from them. All ranks call each method."""

    def __call__(self, progress: Progress, *, counts: bool) -> Verdict:
        """Evaluate and report. If it ``counts``, compare with earlier ones, in ``progress.standing``."""

    def lacks(self, progress: Progress, *, counts: bool) -> bool:
        """Whether the evaluation after ``progress.step`` is missing; the arguments are those of a call."""

    def ends(self, progress: Progress) -> bool:
        """Whether the run ends early, by the evaluations so far."""


@dataclass(frozen=True)
class Cadence:
    """Intervals in optimizer steps; 0 means never.

    Attributes:
        stops_early: whether ``until`` is not the end of the schedule. A run in one launch might not evaluate
            there, so that evaluation does not count.
        eval_samples: evaluate after each step that reaches a multiple of this many samples; 0 means never.
        save_samples: the same for saving.
    """

    until: int
    log_every: int
    eval_every: int
    save_every: int
    stops_early: bool = False
    eval_samples: float = 0.0
    save_samples: float = 0.0


class Events:
    """Callbacks of the loop. The defaults do nothing."""

    def on_step(self, progress: Progress) -> None:
        """Called after every step. Must not read from the device."""

    def on_log(
        self,
        progress: Progress,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        numbers: Mapping[str, float],
    ) -> None:
        """Called every ``log_every`` steps, with values read from the device.

        ``numbers`` are those of ``train.loss``.
        """

    def on_save(self, progress: Progress) -> None:
        """Write a checkpoint. Called on all ranks."""

    def on_skipped(self, progress: Progress, count: int, message: str) -> None:
        """Called when ``count`` more updates were skipped; ``message`` describes the latest streak."""

    def wants(self) -> tuple[bool, bool]:
        """Whether to end the run, and to save a checkpoint, after this step; the same on all ranks."""
        return False, False

    def on_pause(self, seconds: float) -> None:
        """Called after each step with the ``seconds`` that its save and evaluation took."""

    def last_checkpoint(self) -> str:
        """The last good checkpoint, for error messages."""
        return "none"

    def replay(self, step: int) -> str:
        """The command that repeats ``step`` and locates the first non-finite value."""
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
    measures: bool = True,
) -> StepResult:
    """Take one optimizer step over the global batch that starts at ``first_sample``, without a host sync.

    The loss is the mean over all valid tokens of the global batch, however they are spread over micro-batches
    and ranks. They are counted (or weighed, as ``train.loss`` says) while the batches are still on the host,
    and every micro-batch's summed loss is divided by the count.
    """
    engine.objective.measures = measures
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
    return StepResult(loss, grad_norm, numbers)


def train(
    backend: Backend,
    engine: Engine,
    micro_batches: Iterator[Batch],
    evaluation: Evaluation | None,
    *,
    progress: Progress,
    cadence: Cadence,
    schedule: Schedule,
    plan: BatchPlan,
    max_grad_norm: float,
    events: Events,
) -> bool:
    """Train from ``progress`` until step ``cadence.until``.

    Returns:
        whether SIGTERM or SIGINT stopped the run early. A checkpoint is saved then, too.

    Raises:
        RunError: if as many updates in a row were not finite as ``train.on_non_finite`` allows. The weights
            are those from before the first of them.
    """
    start = Progress(progress.step, progress.samples, progress.skipped)
    saved = progress.step

    def regular() -> bool:
        """Whether an evaluation is due wherever this launch ends."""
        ends = progress.step == cadence.until and not cadence.stops_early
        by_samples = _passed(progress, plan, cadence.eval_samples)
        return ends or _due(progress.step, cadence.eval_every) or by_samples

    def due_evaluation() -> Evaluation | None:
        return evaluation if regular() or progress.step == cadence.until else None

    # A signal ends a launch with a checkpoint, but without the evaluation that was due.
    if progress.step > 0 and (due := due_evaluation()) and due.lacks(progress, counts=regular()):
        due(progress, counts=regular())
    progress.ended = evaluation is not None and evaluation.ends(progress)
    with stop_signals() as stop_requested:
        while progress.step < cadence.until and not progress.ended:
            learning_rate = schedule(progress.step)
            result = train_step(
                backend,
                engine,
                micro_batches,
                plan=plan,
                first_sample=progress.samples,
                learning_rate=learning_rate,
                max_grad_norm=max_grad_norm,
                measures=_due(progress.step + 1, cadence.log_every) or progress.step + 1 == cadence.until,
            )
            progress.step += 1
            progress.samples += plan.global_batch_size
            events.on_step(progress)

            stopping = backend.any(stop_requested())
            last = stopping or progress.step == cadence.until
            log_due = last or _due(progress.step, cadence.log_every)
            save_due = last or _due(progress.step, cadence.save_every)
            save_due = save_due or _passed(progress, plan, cadence.save_samples)
            due = due_evaluation() if not stopping or progress.step == cadence.until else None
            if log_due or save_due or due:
                _check_skipped(engine, plan, start, progress, events)
            if log_due:
                extra = [] if result.numbers is None else [result.numbers]
                loss, grad_norm, *numbers = backend.read([result.loss, result.grad_norm, *extra])
                named = engine.objective.named(numbers)
                events.on_log(progress, loss, grad_norm, learning_rate, named)
            paused = time.perf_counter()
            if due:  # before the save, which holds what follows from it
                verdict = due(progress, counts=regular())
                progress.ended = verdict.stop
                save_due = save_due or verdict.save or verdict.stop
            stop, save = events.wants()
            if stop or save:
                _check_skipped(engine, plan, start, progress, events)
                progress.ended, save_due = progress.ended or stop, True
            if save_due and progress.step > saved:
                events.on_save(progress)
                saved = progress.step
            events.on_pause(time.perf_counter() - paused)
            if stopping:
                return progress.step < cadence.until and not progress.ended
    return False


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _passed(progress: Progress, plan: BatchPlan, every: float) -> bool:
    """Whether the latest step reached or passed a multiple of ``every`` samples."""
    if every <= 0:
        return False
    before = progress.samples - plan.global_batch_size
    # The tolerance makes three thirds of an epoch an epoch in spite of rounding.
    return math.floor(progress.samples / every + 1e-9) > math.floor(before / every + 1e-9)


def _check_skipped(
    engine: Engine, plan: BatchPlan, start: Progress, progress: Progress, events: Events
) -> None:
    """Update ``progress.skipped``; report new skipped updates, or raise. ``start``: of this launch."""
    health = engine.health()
    skipped = start.skipped + health.skipped_updates
    new, progress.skipped = skipped - progress.skipped, skipped
    if new == 0 or health.first_bad_update is None:
        return
    step = start.step + health.first_bad_update + 1
    sample = start.samples + health.first_bad_update * plan.global_batch_size
    what = "loss is" if health.bad_loss else "gradients are"
    found = f"step {step} (samples {sample} to {sample + plan.global_batch_size - 1}): the {what} not finite"
    remedy = f"to locate the cause: {events.replay(step)}"
    if not health.halted:
        events.on_skipped(progress, new, f"{found}; {remedy}")
        return
    if health.halted > 1:
        found += f", nor in the next {health.halted - 1} steps"
    raise RunError(
        f"{found}; the update was skipped; last good checkpoint: {events.last_checkpoint()}; {remedy}; or "
        "lower train.learning_rate or train.max_grad_norm"
    )
