"""Hooks between the steps of a run: the base class of callbacks, and the run that they get."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.data.tokens.bounded_tokenizer import decode, encode
from portable.errors import RunError
from portable.model.sharded_parameter_guard import is_part
from portable.paths import CONFIG_FILE
from portable.progress import Progress
from portable.ranks import launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from portable.backend import Engine
    from portable.checkpoint.store import Checkpoints
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import Place
    from portable.progress import StepResult
    from portable.run.stages import Prepared, Restored


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

    def log_step(self, run: Run) -> None:
        """Log the latest step."""

    def evaluate_step(self, run: Run) -> None:
        """Evaluate after the latest step."""

    def save_step(self, run: Run) -> None:
        """Save a checkpoint after the latest step."""

    def record_skipped_updates(self, run: Run, count: int, message: str) -> None:
        """Handle skipped optimizer updates.

        Args:
            run: The current run.
            count: Number of updates skipped since the previous call.
            message: Description of the most recent streak of skipped updates.
        """

    def record_pause(self, run: Run, seconds: float) -> None:
        """Handle a pause of ``seconds`` during which training waited for an evaluation or a save."""

    def handle_completed_checkpoint(self, run: Run, checkpoint: Place) -> None:
        """Handle a completed checkpoint. Only called on rank 0."""

    def close(self) -> None:
        """Release resources at the end of a launch, even if the launch failed."""


class StepRequests(NamedTuple):
    """Requests of callbacks after a step, which are the same on all ranks."""

    stop: bool
    """Whether to end the run."""
    save: bool
    """Whether to save a checkpoint."""


class Run:
    """Run in training, which every callback gets. Each rank has its own object.

    Attributes:
        config: Resolved config.
        folder: Output folder of the run, or its URL.
        rank, world_size: Rank of this process, and number of ranks.
        steps: Length of the schedule in optimizer steps.
        tokenizer: Tokenizer of the data.
        model: Model in training, sharded by the strategy. Callbacks must not change it.

    The attributes below are internal and may change:

        prepared, backend, engine, progress, checkpoints: Parts of this launch.
        until: Step at which this launch ends.
        stopped: Whether a signal ends this launch after the latest step.
        result: Result of the latest step, on the device.
        callbacks: Callbacks, in the order in which they are called.
    """

    result: StepResult

    def __init__(
        self, prepared: Prepared, restored: Restored, checkpoints: Checkpoints[Any], folder: Path
    ) -> None:
        engine = restored.engine
        self.config: RunConfig = prepared.config
        self.folder: Place = prepared.resolved.place
        self.rank: int = prepared.backend.rank
        self.world_size: int = prepared.backend.world_size
        self.steps: int = prepared.steps
        self.tokenizer: Any = prepared.data.tokenizer
        self.model: nn.Module = engine.model
        self.prepared = prepared
        self.backend = prepared.backend
        self.engine: Engine = engine
        self.progress: Progress = restored.progress
        self.checkpoints = checkpoints
        self.until: int = prepared.until
        self.first_step = restored.progress.step + 1
        self.stopped = False
        self.callbacks: Sequence[Callback] = ()
        self.health = HealthReporter(self, folder)
        self.pending: dict[str, float | Tensor] = {}
        self.stopping = self.saving = False

    @property
    def step(self) -> int:
        """Number of optimizer steps taken so far."""
        return self.progress.step

    @property
    def samples(self) -> int:
        """Number of samples consumed so far."""
        return self.progress.samples

    @property
    def checkpoint(self) -> Place | None:
        """Newest complete checkpoint."""
        newest: Place | None = self.checkpoints.find_newest_known()
        return newest

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Add values to the next logged step, for metrics.jsonl, the trackers and the report.

        Only the values of rank 0 are logged. Tensors are only read from the device when the step is logged.

        Args:
            values: Numbers or scalar tensors, keyed by name.
        """
        for name, value in values.items():
            scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and not is_part(value)
            if not isinstance(name, str) or not (scalar or isinstance(value, int | float)):
                raise TypeError(
                    f"log({{{name!r}: {value!r:.60}}}): give numbers or scalar tensors, by name; of a "
                    "DTensor, full_tensor()"
                )
        self.pending.update(values)

    def stop(self) -> None:
        """End the run after this step, with a checkpoint and the export. One rank suffices to request it."""
        self.stopping = True

    def save(self) -> None:
        """Save a checkpoint after this step. One rank suffices to request it."""
        self.saving = True

    def generate(self, prompt: str, *, max_new_tokens: int = 64, seed: int = 0) -> str:
        """Continue a text with the current weights. Must be called on all ranks with the same arguments."""
        ids: list[int] = encode(self.tokenizer, prompt)["input_ids"]
        tokens = torch.tensor([ids], dtype=torch.int64)
        generated = self.engine.generate(tokens, max_new_tokens=max_new_tokens, seed=seed)
        return decode(self.tokenizer, generated[0, tokens.shape[1] :].tolist())

    # -- internal ----------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the run, and not only this launch, is at its end."""
        return self.progress.ended or self.progress.step == self.steps

    @property
    def last(self) -> bool:
        """Whether this launch ends after the latest step, regardless of requests by callbacks."""
        return self.stopped or self.step == self.until

    def logs(self, step: int) -> bool:
        """Return whether step ``step``, counted from 1, is logged if no signal makes it the last.

        The first step of a launch is logged, because the next one to be logged may be minutes away.
        """
        return step in (self.first_step, self.until) or step % self.config.log.every_steps == 0

    def due(self, every_steps: int | None, every_epochs: float | None) -> bool:
        """Return whether the latest step is a multiple of the steps, or passed a multiple of the epochs."""
        if every_steps and self.step % every_steps == 0:
            return True
        if not every_epochs:
            return False
        every = every_epochs * self.prepared.data.train.epoch_samples
        before = self.samples - self.prepared.plan.global_batch_size
        # The tolerance makes three thirds of an epoch an epoch in spite of rounding.
        return math.floor(self.samples / every + 1e-9) > math.floor(before / every + 1e-9)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the settings request an evaluation after the latest step."""
        train = self.config.train
        return bool(self.prepared.data.evals) and self.due(train.eval_every, train.eval_every_epochs)

    @property
    def save_is_due(self) -> bool:
        """Whether the settings request a save after the latest step."""
        return self.due(self.config.checkpoint.every_steps, self.config.checkpoint.every_epochs)

    def finish_step(self) -> None:
        """Call the callbacks after a step, and have them log, evaluate and save if that is due.

        Evaluations come before saves, because a checkpoint contains the best evaluations. A signal ends a
        launch with a checkpoint, but without an evaluation.
        """
        self.call("on_step")
        if self.last or self.logs(self.step):
            self.call("log_step")
        if self.step == self.until or (self.evaluation_is_due and not self.stopped):
            self.call("evaluate_step")
        requests = self.take_requests()
        self.progress.ended = self.progress.ended or requests.stop
        if self.last or requests.stop or requests.save or self.save_is_due:
            self.call("save_step")

    def call(self, method: str, *values: Any) -> None:
        """Call a method of every callback, in order."""
        for callback in self.callbacks:
            getattr(callback, method)(self, *values)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time within this context from the throughput of the steps."""
        begun = time.perf_counter()
        yield
        self.call("record_pause", time.perf_counter() - begun)

    def take_requests(self) -> StepRequests:
        """Take the requests of all ranks' callbacks since the last call. Must be called on all ranks.

        Returns:
            Whether to end the run, and whether to save a checkpoint.
        """
        if not self.config.train.callbacks:  # an evaluation requests the same on all ranks
            save, self.saving = self.saving, False
            return StepRequests(stop=False, save=save)
        requests, self.saving = (self.stopping, self.saving), False
        if not self.backend.reduce_any(any(requests)):  # one collective in most steps
            return StepRequests(stop=False, save=False)
        self.stopping, save = (self.backend.reduce_any(request) for request in requests)
        return StepRequests(self.stopping, save)

    def take_logged(self) -> dict[str, float]:
        """Read the values logged since the last call from the device."""
        pending, self.pending = self.pending, {}
        tensors = {name: value for name, value in pending.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in pending.items() if not isinstance(value, torch.Tensor)}
        read = self.backend.read(list(tensors.values())) if tensors else []
        return {**numbers, **dict(zip(tensors, read, strict=True))}


_SHOWN_NAMES = 3


def _find_last_good(run: Run) -> str:
    """Wait for the save in progress, and find the newest complete checkpoint. Called on all ranks."""
    run.checkpoints.finish()
    run.backend.barrier()  # rank 0 has now renamed the folder
    return str(run.checkpoints.find_latest() or "none yet")


class HealthReporter:
    """Reports skipped updates. Reads their count from the device when the host waits for it anyway.

    Args:
        run: Run in training.
        folder: Folder with the config of the run, for the command in error messages.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        progress = run.progress
        self._start = Progress(progress.step, progress.samples, progress.skipped)
        self._checked = progress.step
        self._config = folder / CONFIG_FILE

    def check(self, run: Run) -> None:
        """Update ``run.progress.skipped`` and report new skipped updates. Reads the device once per step.

        Raises:
            RunError: If more consecutive updates were skipped than ``train.on_non_finite`` allows. The
                weights are those before the first skipped update.
        """
        if self._checked == run.step:
            return
        self._checked = run.step
        health, progress, batch = run.engine.read_health(), run.progress, run.prepared.plan.global_batch_size
        skipped = self._start.skipped + health.skipped_updates
        new, progress.skipped = skipped - progress.skipped, skipped
        if new == 0 or health.first_bad_update is None:
            return
        step = self._start.step + health.first_bad_update + 1
        sample = self._start.samples + health.first_bad_update * batch
        subject = "loss is" if health.bad_loss else "gradients are"
        problem = f"step {step} (samples {sample} to {sample + batch - 1}): the {subject} not finite"
        # On XLA the processes of a slice discover each other.
        ranks = 1 if run.backend.one_program else run.world_size
        remedy = f"to locate the cause: {launch.format_command(ranks, config=self._config, replay=step)}"
        if not health.halted:
            run.call("record_skipped_updates", new, f"{problem}; {remedy}")
            return
        if health.halted > 1:
            problem += f", nor in the next {health.halted - 1} steps"
        good = _find_last_good(run)
        raise RunError(
            f"{problem}; the update was skipped; last good checkpoint: "
            f"{good}; {remedy}; or lower "
            "train.learning_rate or train.max_grad_norm"
        )

    def check_state(self, run: Run) -> None:
        """Check that all weights and optimizer values are finite. Called on all ranks before a save.

        Finite gradients lead to such values if the learning rate is too large or ``train.eps`` too small.

        Raises:
            RunError: If there is such a value on any rank. No checkpoint is saved.
        """
        names = run.engine.find_nonfinite_state()[:_SHOWN_NAMES]
        if not run.backend.reduce_any(bool(names)):
            return
        first = next(text for text in run.backend.gather(", ".join(names)) if text)
        good = _find_last_good(run)
        raise RunError(
            f"step {run.step}: the weights or the optimizer state of {first} are not finite, so no "
            f"checkpoint was saved; last good checkpoint: {good}; lower "
            "train.learning_rate or raise train.eps"
        )
