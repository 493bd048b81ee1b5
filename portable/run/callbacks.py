"""A run that trains as its callbacks see it, the user's callbacks, and the order of all."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from portable import plugins
from portable.data.tokens.bounded_tokenizer import decode, encode
from portable.errors import RunError, UserError
from portable.loop import Callback, Progress
from portable.model.whole_values import WholeValues, is_part
from portable.paths import CONFIG_FILE
from portable.private import of_torch
from portable.ranks import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from converters.storage.path_or_url import Place
    from portable.backend import Batch, Engine
    from portable.checkpoint.store import Checkpoints
    from portable.config import RunConfig
    from portable.loop import StepResult
    from portable.run.stages import Prepared, Restored

HOOKS = ("on_start", "on_step", "on_log", "on_evaluation", "on_save", "on_end")


class Run:
    """A run that trains, as its callbacks see it; each rank has its own.

    Attributes:
        config: resolved.
        folder: of the run, or its URL.
        rank, world_size: of this process, and how many there are.
        steps: length of the schedule.
        tokenizer: of the data.
        model: in training, sharded as the strategy has it. Do not change it.

    The run's own callbacks see more of it:

        prepared, backend, engine, progress, checkpoints: of the launch.
        until: the step at which this launch ends. stopped: whether a signal ends it after this step.
        result: of the latest step, on the device.
        callbacks: in the order in which they are called.
        watch_batches: wraps the batches of the training or of an evaluation in :class:`WatchedBatches`.
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
        self.watch_batches: Callable[[Iterable[Batch]], Iterator[Batch]] = iter
        self.health = Health(self, folder)
        self.pending: dict[str, float | Tensor] = {}
        self.stopping = self.saving = False

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    @property
    def samples(self) -> int:
        """Samples consumed."""
        return self.progress.samples

    @property
    def checkpoint(self) -> Place | None:
        """The newest complete checkpoint."""
        newest: Place | None = self.checkpoints.newest_known()
        return newest

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Add numbers to the next logged step: metrics.jsonl, the trackers and the report. Rank 0's count.

        Tensors (scalars) are read from the device only then.
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
        """End the run after this step, with a checkpoint and the export. It is enough that one rank asks."""
        self.stopping = True

    def save(self) -> None:
        """Save a checkpoint after this step. It is enough that one rank asks."""
        self.saving = True

    def generate(self, prompt: str, *, max_new_tokens: int = 64, seed: int = 0) -> str:
        """Continue a text with the model as it is now. All ranks call it, with the same arguments."""
        ids: list[int] = encode(self.tokenizer, prompt)["input_ids"]
        tokens = torch.tensor([ids], dtype=torch.int64)
        found = self.engine.generate(tokens, max_new_tokens=max_new_tokens, seed=seed)
        return decode(self.tokenizer, found[0, tokens.shape[1] :].tolist())

    # -- of the run's own alone --------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the run, not this launch alone, is at its end."""
        return self.progress.ended or self.progress.step == self.steps

    @property
    def last(self) -> bool:
        """Whether the launch ends after this step, whatever callbacks ask for."""
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
    def pauses(self) -> bool:
        """Whether training waits for an evaluation or a save after the latest step."""
        train, checkpoint = self.config.train, self.config.checkpoint
        evaluates = self.due(train.eval_every, train.eval_every_epochs) and self.prepared.data.evals
        return bool(evaluates) or self.due(checkpoint.every_steps, checkpoint.every_epochs)

    def call(self, method: str, *values: Any) -> None:
        """Call a method of every callback, in their order."""
        for callback in self.callbacks:
            getattr(callback, method)(self, *values)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within this context no time of a step passes."""
        begun = time.perf_counter()
        yield
        self.call("paused", time.perf_counter() - begun)

    def take_wishes(self) -> tuple[bool, bool]:
        """Whether a callback on any rank wants to end the run, and to save; all ranks call it."""
        if not self.config.train.callbacks:  # the wishes of an evaluation are those of all ranks
            save, self.saving = self.saving, False
            return False, save
        wishes, self.saving = (self.stopping, self.saving), False
        if not self.backend.any(any(wishes)):  # most steps: one collective
            return False, False
        self.stopping, save = (self.backend.any(wish) for wish in wishes)
        return self.stopping, save

    def take_logged(self) -> dict[str, float]:
        """What was logged since the last call, read from the device."""
        pending, self.pending = self.pending, {}
        tensors = {name: value for name, value in pending.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in pending.items() if not isinstance(value, torch.Tensor)}
        read = self.backend.read(list(tensors.values())) if tensors else []
        return {**numbers, **dict(zip(tensors, read, strict=True))}


def callback_order(config: RunConfig, *, profile: bool = False) -> list[str]:
    """What happens beside the steps, in the order in which it does: ours by name, the user's by setting.

    The user's come before what logs, so that the row of a step has what they log; an evaluation comes before
    the save, which holds what follows from it.
    """
    user = [_name(name) for name in config.train.callbacks]
    profiling, uploading = ["profile"] * profile, ["upload"] * (config.hub.push is not None)
    return [*user, *profiling, "report", "evaluate", "save", *uploading]


def _name(name: str) -> str:
    return f"train.callbacks: {name}"


class UserCallback(Callback):
    """One of the user's, whose mistakes end the run in a line.

    Args:
        name: in messages.
        given: the object; need not have all methods.
    """

    def __init__(self, name: str, given: Any) -> None:
        self._name = name
        for hook in HOOKS:
            if (function := getattr(given, hook, None)) is not None:
                setattr(self, hook, partial(self._call, hook, function))

    def _call(self, method: str, function: Callable[..., None], run: Run, *values: Any) -> None:
        """Call a method of the object.

        Raises:
            UserError: with its name and line, if it fails.
        """
        name, before = f"{self._name}: {method}", _versions(run.model)
        with plugins.user_code_errors(name), WholeValues(name, differentiated=False):
            function(run, *values)
        if any(before.get(one, version) != version for one, version in _versions(run.model).items()):
            raise UserError(
                f"{name}: changes parameters of the model, which ranks and the optimizer do not know of; use "
                "model.function, train.loss or train.optimizer"
            )


def load_callbacks(names: Sequence[str]) -> dict[str, UserCallback]:
    """The callbacks that ``train.callbacks`` names, by what they are called in messages.

    Raises:
        UserError: for a name without a callback.
    """
    found = {}
    for name in names:
        one = plugins.load("train.callbacks", name)
        if not any(hasattr(one, hook) for hook in HOOKS):
            raise UserError(f"train.callbacks: {name}: has none of the methods {', '.join(HOOKS)}")
        wrong = [hook for hook in dir(one) if hook.startswith("on_") and hook not in HOOKS]
        if wrong:
            raise UserError(f"train.callbacks: {name}: there is no {wrong[0]}; there are {', '.join(HOOKS)}")
        found[_name(name)] = UserCallback(_name(name), one)
    return found


def _versions(model: nn.Module) -> dict[int, int]:
    """Of each parameter, what rises with each change in place. Host numbers: no sync.

    A pass through the model may leave others in their place, such as gathered ones.
    """
    return {id(parameter): of_torch.changes(parameter) for parameter in model.parameters()}


_SHOWN_NAMES = 3


def _find_last_good(run: Run) -> str:
    """Wait for the save in progress, and return the newest complete checkpoint. All ranks call it."""
    run.checkpoints.finish()
    run.backend.barrier()  # rank 0 has now renamed the folder
    return str(run.checkpoints.latest() or "none yet")


class Health:
    """Reads the device's count of skipped updates, wherever the host waits for the device anyway."""

    def __init__(self, run: Run, folder: Path) -> None:
        """``folder``: where the run's config is, which the command in a message names."""
        at = run.progress
        self._start = Progress(at.step, at.samples, at.skipped)
        self._checked = at.step
        self._config = folder / CONFIG_FILE

    def check(self, run: Run) -> None:
        """Update ``run.progress.skipped``, once a step; report new skipped updates, or raise.

        Raises:
            RunError: if as many updates in a row were not finite as ``train.on_non_finite`` allows. The
                weights are those from before the first of them.
        """
        if self._checked == run.step:
            return
        self._checked = run.step
        health, progress, batch = run.engine.health(), run.progress, run.prepared.plan.global_batch_size
        skipped = self._start.skipped + health.skipped_updates
        new, progress.skipped = skipped - progress.skipped, skipped
        if new == 0 or health.first_bad_update is None:
            return
        step = self._start.step + health.first_bad_update + 1
        sample = self._start.samples + health.first_bad_update * batch
        what = "loss is" if health.bad_loss else "gradients are"
        found = f"step {step} (samples {sample} to {sample + batch - 1}): the {what} not finite"
        # On XLA the processes of a slice discover each other.
        ranks = 1 if run.backend.one_program else run.world_size
        remedy = f"to locate the cause: {launch.command(ranks, config=self._config, replay=step)}"
        if not health.halted:
            run.call("skipped", new, f"{found}; {remedy}")
            return
        if health.halted > 1:
            found += f", nor in the next {health.halted - 1} steps"
        good = _find_last_good(run)
        raise RunError(
            f"{found}; the update was skipped; last good checkpoint: "
            f"{good}; {remedy}; or lower "
            "train.learning_rate or train.max_grad_norm"
        )

    def check_state(self, run: Run) -> None:
        """Check that no weight or optimizer value is infinite or NaN. All ranks call it before a save.

        Finite gradients lead to such values if the learning rate is too large or ``train.eps`` too small.

        Raises:
            RunError: If there is such a value on any rank. No checkpoint is saved.
        """
        names = run.engine.find_nonfinite_state()[:_SHOWN_NAMES]
        if not run.backend.any(bool(names)):
            return
        first = next(text for text in run.backend.gather(", ".join(names)) if text)
        good = _find_last_good(run)
        raise RunError(
            f"step {run.step}: the weights or the optimizer state of {first} are not finite, so no "
            f"checkpoint was saved; last good checkpoint: {good}; lower "
            "train.learning_rate or raise train.eps"
        )
