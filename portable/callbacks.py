"""Callbacks that run between training steps: the base class, and the run object passed to them."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.data.tokens.bounded_tokenizer import decode, encode_text
from portable.errors import RunError
from portable.model.sharded_parameter_guard import is_shard
from portable.paths import CONFIG_FILE
from portable.progress import RunProgress
from portable.ranks import launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from portable.backend import Engine
    from portable.checkpoint.store import CheckpointStore
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath
    from portable.progress import StepResult
    from portable.run.stages import PreparedRun, RestoredRun


class Callback:
    """Base class of objects whose methods the training loop calls between steps.

    A run has an ordered list of callbacks, and each ``on_*`` method is called on all callbacks in
    this order. The ``on_*`` methods run on all ranks, and an exception in any of them stops the run
    on all ranks. The other methods are internal hooks, which custom callbacks cannot implement.

    Each start of ``portable-train`` is one launch. A run that is resumed from a checkpoint
    therefore has several launches. :meth:`on_start` and :meth:`on_end` are called once per launch,
    but :meth:`on_end` is not called if the launch fails.

    A custom callback, listed in ``train.callbacks`` as ``my_package.my_module:MyCallback``, can
    implement any of the ``on_*`` methods. It does not need to inherit from this class, and it must
    not modify the model. Since :meth:`on_step` runs after every step, it must not read from the
    device at each step, because a read blocks the host until the device has finished the step.

    Example:
        Print the loss every time it is logged::

            class PrintLoss:
                def on_log(self, run, values):
                    print(run.step, values["loss"])
    """

    def on_start(self, run: Run) -> None:
        """Handle the start of a launch, before its first step."""

    def on_step(self, run: Run) -> None:
        """Handle the end of a training step, before the step is logged, evaluated or saved.

        A read from the device blocks the host. Therefore, read from the device only at steps at
        which the run logs, evaluates or saves.
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
        """Handle the start of a save.

        When this method is called, a background thread may not have finished writing the files of
        the checkpoint.
        """

    def on_end(self, run: Run) -> None:
        """Handle the end of a launch, after its last step and before the final model is exported."""

    # -- Internal hooks, which custom callbacks cannot implement -----------------------------------------

    def log_step(self, run: Run) -> None:
        """Log the latest step. Called only after the steps that :meth:`Run.logs_step` selects."""

    def evaluate_step(self, run: Run) -> None:
        """Evaluate after the latest step. Called only if an evaluation is due, or after the last step."""

    def save_step(self, run: Run) -> None:
        """Save a checkpoint after the latest step. Called only if a save is due or was requested."""

    def record_skipped_updates(self, run: Run, count: int, message: str) -> None:
        """Record skipped optimizer updates.

        Args:
            run: The current run.
            count: Number of updates skipped since the previous call.
            message: Description of the most recent streak of skipped updates.
        """

    def record_pause(self, run: Run, seconds: float) -> None:
        """Record a pause of the training, for example to exclude it from the throughput.

        Args:
            run: The current run.
            seconds: Time that training waited for an evaluation or a save.
        """

    def handle_completed_checkpoint(self, run: Run, checkpoint: AnyPath) -> None:
        """Handle a completed checkpoint, for example by uploading it.

        Only called on rank 0, usually in a background thread.

        Args:
            run: The current run.
            checkpoint: Folder or URL of the checkpoint.
        """

    def close(self) -> None:
        """Release resources at the end of a launch, even if the launch failed."""


class StepRequests(NamedTuple):
    """Requests that callbacks made during a step, combined over all ranks."""

    stop: bool
    """Whether to end the run."""
    save: bool
    """Whether to save a checkpoint."""


class Run:
    """State of a run in training, which is passed to every callback. Each rank has its own object.

    Attributes:
        config: Resolved config.
        folder: Output folder of the run, or its URL.
        rank, world_size: Rank of this process, and number of ranks.
        steps: Total number of optimizer steps of the run.
        tokenizer: Tokenizer of the training data.
        model: Model in training, sharded by the strategy. Callbacks must not change it.

    The attributes below are internal and may change:

        prepared, backend, engine: Prepared run, backend and engine of this launch.
        progress: Numbers of steps, samples and skipped updates so far.
        checkpoints: Checkpoints of the run.
        first_step: First step of this launch, counted from 1.
        end_step: Last step of this launch, counted from 1.
        is_stopped_by_signal: Whether a signal ends this launch after the latest step.
        result: Result of the latest step, on the device. Not set before the first step of the launch.
        callbacks: Callbacks, in call order.
        health: Reporter of skipped updates and values that are not finite.
        pending_values: Values for the next logged step. See :meth:`log`.
        is_stop_requested: Whether a callback on this rank has requested that the run ends.
        is_save_requested: Whether a callback on this rank has requested a checkpoint.
    """

    result: StepResult

    def __init__(
        self, prepared: PreparedRun, restored: RestoredRun, checkpoints: CheckpointStore[Any], folder: Path
    ) -> None:
        engine = restored.engine
        self.config: RunConfig = prepared.config
        self.folder: AnyPath = prepared.resolved.output_place
        self.rank: int = prepared.backend.rank
        self.world_size: int = prepared.backend.world_size
        self.steps: int = prepared.steps
        self.tokenizer: Any = prepared.data.tokenizer
        self.model: nn.Module = engine.model
        self.prepared = prepared
        self.backend = prepared.backend
        self.engine: Engine = engine
        self.progress: RunProgress = restored.progress
        self.checkpoints = checkpoints
        self.end_step: int = prepared.end_step
        self.first_step = restored.progress.step + 1
        self.is_stopped_by_signal = False
        self.callbacks: Sequence[Callback] = ()
        self.health = NonFiniteReporter(self, folder)
        self.pending_values: dict[str, float | Tensor] = {}
        self.is_stop_requested = self.is_save_requested = False

    @property
    def step(self) -> int:
        """Number of optimizer steps taken so far."""
        return self.progress.step

    @property
    def samples(self) -> int:
        """Number of samples consumed so far."""
        return self.progress.samples

    @property
    def checkpoint(self) -> AnyPath | None:
        """Folder or URL of the newest complete checkpoint, or None if there is none."""
        newest: AnyPath | None = self.checkpoints.find_newest_known()
        return newest

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Add values to the next logged step.

        The values are logged to ``metrics.jsonl``, the trackers and the report. Only the values of
        rank 0 are logged. If a name is passed several times before a step is logged, the last value
        is logged. Do not use the names of built-in metrics, such as ``loss``, or names that
        ``train.loss`` logs: the run then ends with an error when the step is logged.

        Tensors are not copied. They are read from the device when the step is logged, so do not
        change them in place before.

        Args:
            values: Numbers or scalar tensors, keyed by name.

        Raises:
            TypeError: If a name is not a string, or if a value is not a number or a scalar tensor.
                The shard of a DTensor is not accepted either.
        """
        for name, value in values.items():
            scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and not is_shard(value)
            if not isinstance(name, str) or not (scalar or isinstance(value, int | float)):
                raise TypeError(
                    f"log({{{name!r}: {value!r:.60}}}): the name must be a string, and the value a number "
                    "or a scalar tensor; convert the value (for a DTensor, call full_tensor() first)"
                )
            self.pending_values[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def stop(self) -> None:
        """Request the end of the run after this step.

        The run then saves a checkpoint and exports the model. A request on one rank is sufficient
        to end the run on all ranks.
        """
        self.is_stop_requested = True

    def save(self) -> None:
        """Request a checkpoint after this step.

        The checkpoint is saved even if only one rank makes the request.
        """
        self.is_save_requested = True

    def generate(self, prompt: str, *, max_new_tokens: int = 64, seed: int = 0) -> str:
        """Continue a prompt with the current weights.

        Must be called on all ranks with the same arguments. On GPUs and CPUs, this method sets the
        seed of torch's default generators and does not restore it.

        Args:
            prompt: Text to continue.
            max_new_tokens: Maximum number of tokens to generate.
            seed: Random seed for sampling.

        Returns:
            The decoded continuation without the prompt.
        """
        ids: list[int] = encode_text(self.tokenizer, prompt)["input_ids"]
        tokens = torch.tensor([ids], dtype=torch.int64)
        generated = self.engine.generate(tokens, max_new_tokens=max_new_tokens, seed=seed)
        return decode(self.tokenizer, generated[0, tokens.shape[1] :].tolist())

    # -- internal ----------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether the run is complete: all its steps are done, or a callback or evaluation ended it.

        False if only this launch has ended and the next launch continues the run.
        """
        return self.progress.has_ended or self.progress.step == self.steps

    @property
    def is_last_step(self) -> bool:
        """Whether the latest step is the last step of this launch, or a signal has arrived.

        A callback or an evaluation can also end the run after the latest step. This property does
        not consider such a request.
        """
        return self.is_stopped_by_signal or self.step == self.end_step

    def logs_step(self, step: int) -> bool:
        """Return whether to log a step, according to ``log.every_steps``.

        The first and last steps of a launch are always logged.

        Args:
            step: Step number, counted from 1.
        """
        return step in (self.first_step, self.end_step) or step % self.config.log.every_steps == 0

    def is_interval_reached(self, every_steps: int | None, every_epochs: float | None) -> bool:
        """Return whether the latest step completes an interval, given in steps or in epochs.

        Args:
            every_steps: Interval in steps, or None if there is no such interval.
            every_epochs: Interval in epochs, which may be fractional, or None if there is no such interval.
        """
        if every_steps and self.step % every_steps == 0:
            return True
        if not every_epochs:
            return False
        every = every_epochs * self.prepared.data.train.epoch_samples
        before = self.samples - self.prepared.batch_plan.global_batch_size
        # The tolerance compensates for rounding, so that for example three thirds of an epoch are one epoch.
        return math.floor(self.samples / every + 1e-9) > math.floor(before / every + 1e-9)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether ``train.eval_every`` or ``train.eval_every_epochs`` requires an evaluation now.

        Always False without evaluation data.
        """
        train = self.config.train
        return bool(self.prepared.data.evals) and self.is_interval_reached(
            train.eval_every, train.eval_every_epochs
        )

    @property
    def is_save_due(self) -> bool:
        """Whether a save is due, according to ``checkpoint.every_steps`` and ``.every_epochs``."""
        return self.is_interval_reached(
            self.config.checkpoint.every_steps, self.config.checkpoint.every_epochs
        )

    def finish_step(self) -> None:
        """Run the callbacks after a step, which includes logging, evaluation and saving.

        The step is logged and evaluated if this is due, and saved if a save is due or was
        requested. The last step of a launch is always logged, evaluated and saved. If a signal ends
        the launch earlier, the latest step is logged and saved, but not evaluated. Evaluations run
        before saves, because a checkpoint records the best evaluation results. Must be called on
        all ranks.
        """
        self.call_callbacks("on_step")
        if self.is_last_step or self.logs_step(self.step):
            self.call_callbacks("log_step")
        if self.step == self.end_step or (self.is_evaluation_due and not self.is_stopped_by_signal):
            self.call_callbacks("evaluate_step")
        requests = self.exchange_requests()
        self.progress.has_ended = self.progress.has_ended or requests.stop
        if self.is_last_step or requests.stop or requests.save or self.is_save_due:
            self.call_callbacks("save_step")

    def call_callbacks(self, method_name: str, *values: Any) -> None:
        """Call a method of every callback, in order.

        Args:
            method_name: Name of the method.
            values: Arguments that follow the first argument, which is always this run.
        """
        for callback in self.callbacks:
            getattr(callback, method_name)(self, *values)

    @contextmanager
    def measure_pause(self) -> Iterator[None]:
        """Measure the time spent in this context, and report it to all callbacks as a pause.

        Callbacks use pauses to exclude this time from the throughput. Nothing is reported if the body of
        the context raises an exception. The exception ends the run, and an error in a callback would hide
        it.
        """
        begun = time.perf_counter()
        yield
        self.call_callbacks("record_pause", time.perf_counter() - begun)

    def exchange_requests(self) -> StepRequests:
        """Combine the requests from the callbacks of all ranks, and clear this rank's save request.

        Must be called on all ranks. If there are custom callbacks, the ranks exchange their
        requests in a collective. Otherwise, nothing is exchanged, because only evaluations make
        requests, and they make the same ones on all ranks. The returned ``stop`` is then always
        False.

        Returns:
            The combined requests. ``stop`` and ``save`` are True if at least one rank made the
            request.
        """
        if (
            not self.config.train.callbacks
            # No exchange is needed, because without custom callbacks only evaluations make requests, and they
            # make the same requests on all ranks.
        ):
            save, self.is_save_requested = self.is_save_requested, False
            return StepRequests(stop=False, save=save)
        requests, self.is_save_requested = (self.is_stop_requested, self.is_save_requested), False
        # Usually, no rank has a request, so that one collective is sufficient.
        if not self.backend.reduce_any(any(requests)):
            return StepRequests(stop=False, save=False)
        self.is_stop_requested, save = (self.backend.reduce_any(request) for request in requests)
        return StepRequests(self.is_stop_requested, save)

    def take_logged_values(self) -> dict[str, float]:
        """Return and clear the values passed to :meth:`log` since the last call, keyed by name.

        Triggers a host-device sync if any value is a tensor.
        """
        pending, self.pending_values = self.pending_values, {}
        tensors = {name: value for name, value in pending.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in pending.items() if not isinstance(value, torch.Tensor)}
        tensor_values = self.backend.read_to_host(list(tensors.values())) if tensors else []
        return {**numbers, **dict(zip(tensors, tensor_values, strict=True))}


_MAX_NAMES_SHOWN = 3


def _wait_for_last_good_checkpoint(run: Run) -> str:
    """Wait for the save in progress, and return the path of the newest complete checkpoint.

    Must be called on all ranks.

    Returns:
        The path or URL, or ``none yet`` if no checkpoint is complete.
    """
    run.checkpoints.finish_save()
    run.backend.barrier()  # because only rank 0 renames the folder of the complete checkpoint
    return str(run.checkpoints.find_latest() or "none yet")


class NonFiniteReporter:
    """Reporter for skipped updates and for weights or optimizer values that are not finite.

    To avoid additional host-device syncs, call its methods only when the host waits for the device
    anyway.

    Args:
        run: Current run.
        folder: Folder with the config of the run. Error messages suggest a command that uses this
            config.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        progress = run.progress
        self._start_progress = RunProgress(progress.step, progress.samples, progress.skipped_updates)
        self._last_checked_step = progress.step
        self._config_path = folder / CONFIG_FILE

    def report_skipped_updates(self, run: Run) -> None:
        """Update ``run.progress.skipped_updates``, and report new skips to the callbacks.

        Must be called on all ranks. Triggers a host-device sync. Repeated calls in the same step do
        nothing.

        Raises:
            RunError: If the number of consecutive skipped updates has reached the limit of
                ``train.on_non_finite``, which is 1 for ``stop``. The weights are unchanged since
                the first of these updates.
        """
        if self._last_checked_step == run.step:
            return
        self._last_checked_step = run.step
        health, progress, batch = (
            run.engine.read_update_health(),
            run.progress,
            run.prepared.batch_plan.global_batch_size,
        )
        skipped = self._start_progress.skipped_updates + health.skipped_updates
        newly_skipped, progress.skipped_updates = skipped - progress.skipped_updates, skipped
        if newly_skipped == 0 or health.first_bad_update is None:
            return
        step = self._start_progress.step + health.first_bad_update + 1
        sample = self._start_progress.samples + health.first_bad_update * batch
        subject = "loss is" if health.bad_loss else "gradients are"
        problem = f"step {step} (samples {sample} to {sample + batch - 1}): the {subject} not finite"
        # On XLA, the command does not start several ranks, because the processes of a slice find each other
        # without a launcher.
        ranks = 1 if run.backend.one_program else run.world_size
        remedy = (
            "to locate the cause, run: "
            f"{launch.format_train_command(ranks, config=self._config_path, replay=step)}"
        )
        if not health.halted:
            run.call_callbacks("record_skipped_updates", newly_skipped, f"{problem}; {remedy}")
            return
        skipped_text = "the update was skipped"
        if health.halted > 1:
            later = "step" if health.halted == 2 else f"{health.halted - 1} steps"
            skipped_text = f"the updates of this step and the next {later} were skipped"
        last_good = _wait_for_last_good_checkpoint(run)
        raise RunError(
            f"{problem}; {skipped_text}; last good checkpoint: {last_good}; lower train.learning_rate or "
            f"train.max_grad_norm; {remedy}"
        )

    def check_state_is_finite(self, run: Run) -> None:
        """Check that all trained weights and optimizer values are finite.

        Must be called on all ranks before a save. Even with finite gradients, values can overflow
        if the learning rate is too large or ``train.eps`` is too small.

        Raises:
            RunError: If a value is not finite on any rank. No checkpoint is saved.
        """
        names = run.engine.find_nonfinite_state()[:_MAX_NAMES_SHOWN]
        if not run.backend.reduce_any(bool(names)):
            return
        first = next(text for text in run.backend.gather_text(", ".join(names)) if text)
        last_good = _wait_for_last_good_checkpoint(run)
        raise RunError(
            f"step {run.step}: the optimizer state or the weights of {first} contain NaN or infinity, so no "
            f"checkpoint was saved; last good checkpoint: {last_good}; lower train.learning_rate or raise "
            "train.eps"
        )
