"""Callbacks of the user's, called beside what a run itself does after steps, logs, evaluations and saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from portable import plugins
from portable.errors import UserError
from portable.loop import Events
from portable.model.whole_values import WholeValues, is_part
from portable.private import of_torch
from portable.run.batches import LONG_WAIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from portable.backend import Engine
    from portable.checkpoint.store import Checkpoints
    from portable.config import RunConfig
    from portable.loop import Progress
    from portable.paths import Place
    from portable.reporting.reporter import Reporter
    from portable.run.batches import Awaited
    from portable.run.prepare import Prepared

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
    """

    def __init__(
        self, prepared: Prepared, engine: Engine, progress: Progress, checkpoints: Checkpoints[Any]
    ) -> None:
        self.config: RunConfig = prepared.config
        self.folder: Place = prepared.settled.place
        self.rank: int = prepared.backend.rank
        self.world_size: int = prepared.backend.world_size
        self.steps: int = prepared.steps
        self.tokenizer: Any = prepared.data.tokenizer
        self.model: nn.Module = engine.model
        self._engine = engine
        self._progress = progress
        self._checkpoints = checkpoints
        self.pending: dict[str, float | Tensor] = {}
        self.stopping = self.saving = False

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._progress.step

    @property
    def samples(self) -> int:
        """Sequences consumed."""
        return self._progress.samples

    @property
    def checkpoint(self) -> Place | None:
        """The newest complete checkpoint."""
        newest: Place | None = self._checkpoints.newest_known()
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
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        tokens = torch.tensor([ids], dtype=torch.int64)
        found = self._engine.generate(tokens, max_new_tokens=max_new_tokens, seed=seed)
        text: str = self.tokenizer.decode(found[0, tokens.shape[1] :])
        return text


class Callback(Protocol):
    """Called while a run trains, on every rank, such as ``my_package.my_module:MyCallback``.

    Every method may be left out. An exception in one ends the run on all ranks. None may change the model,
    and only those after :meth:`on_step` may read from the device.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step of a launch."""

    def on_step(self, run: Run) -> None:
        """After every step. Must not read from the device."""

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """With the loss, the gradient norm, the learning rate and what ``train.loss`` logs."""

    def on_evaluation(self, run: Run, values: Mapping[str, Any]) -> None:
        """With the values of an evaluation, named as in metrics.jsonl."""

    def on_save(self, run: Run) -> None:
        """A checkpoint of this step is being written."""

    def on_end(self, run: Run) -> None:
        """After the last step of a launch, before the export."""


def check(names: Sequence[str]) -> list[tuple[str, Any]]:
    """The callbacks that ``train.callbacks`` names, with what to call them in messages.

    Raises:
        UserError: for a name without a callback.
    """
    found = []
    for name in names:
        one = plugins.load("train.callbacks", name)
        if not any(hasattr(one, hook) for hook in HOOKS):
            raise UserError(f"train.callbacks: {name}: has none of the methods {', '.join(HOOKS)}")
        wrong = [hook for hook in dir(one) if hook.startswith("on_") and hook not in HOOKS]
        if wrong:
            raise UserError(f"train.callbacks: {name}: there is no {wrong[0]}; there are {', '.join(HOOKS)}")
        found.append((f"train.callbacks: {name}", one))
    return found


def call(callbacks: Sequence[tuple[str, Any]], hook: str, run: Run, *values: Any) -> None:
    """Call a method of each of ``callbacks``, as :func:`check` returns them, that has it.

    Raises:
        UserError: with its name and line, if one fails.
    """
    for name, callback in callbacks:
        method = getattr(callback, hook, None)
        if method is None:
            continue
        before = _versions(run.model)
        with plugins.told_as(f"{name}: {hook}"), WholeValues(f"{name}: {hook}", differentiated=False):
            method(run, *values)
        if any(before.get(one, version) != version for one, version in _versions(run.model).items()):
            raise UserError(
                f"{name}: {hook}: changes parameters of the model, which ranks and the optimizer do not "
                "know of; use model.function, train.loss or train.optimizer"
            )


def _versions(model: nn.Module) -> dict[int, int]:
    """Of each parameter, what rises with each change in place. Host numbers: no sync.

    A pass through the model may leave others in their place, such as gathered ones.
    """
    return {id(parameter): of_torch.changes(parameter) for parameter in model.parameters()}


class Callbacks(Events):
    """What the reporter does, and after it the user's callbacks.

    Args:
        reporter: of the run.
        run: what callbacks see.
        prepared: the run.
        batches: that it trains on.
    """

    def __init__(self, reporter: Reporter, run: Run, prepared: Prepared, batches: Awaited) -> None:
        self._reporter = reporter
        self._run = run
        self._backend = prepared.backend
        self._of_data = prepared.data.train.progress
        self._callbacks = check(prepared.config.train.callbacks)
        self.stopped = False
        self._batches = batches
        self._has_logged = self._has_warned = False

    def call(self, hook: str, *values: Any) -> None:
        """Call a method of every callback; see :func:`call`."""
        call(self._callbacks, hook, self._run, *values)

    def on_step(self, progress: Progress) -> None:
        self._reporter.on_step(progress)
        self.call("on_step")

    def on_log(
        self,
        progress: Progress,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        numbers: Mapping[str, float],
    ) -> None:
        common = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        self.call("on_log", {**common, **numbers})
        more = {**numbers, **self._waits(), **self._of_data(progress.samples), **self._logged()}
        self._reporter.on_log(progress, loss, grad_norm, learning_rate, more)

    def _waits(self) -> dict[str, float]:
        """The share of the time that steps waited for data; a warning where it is long, once."""
        share = self._batches.share()
        # Before the first log the queue had to be filled.
        if share > LONG_WAIT and self._has_logged and not self._has_warned:
            self._has_warned = True
            self._reporter.say(
                f"warning: steps wait for data {share:.0%} of the time (data_wait); raise data.num_workers; "
                "a stream needs more cores"
            )
        self._has_logged = True
        return {"data_wait": share}

    def _logged(self) -> dict[str, float]:
        pending, self._run.pending = self._run.pending, {}
        tensors = {name: value for name, value in pending.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in pending.items() if not isinstance(value, torch.Tensor)}
        read = self._backend.read(list(tensors.values())) if tensors else []
        return {**numbers, **dict(zip(tensors, read, strict=True))}

    def on_eval(self, progress: Progress, values: Mapping[str, Any]) -> None:
        """See :meth:`Reporter.on_eval`."""
        self._reporter.on_eval(progress, values)
        self.call("on_evaluation", values)

    def lacks_eval(self, progress: Progress) -> bool:
        """See :meth:`Reporter.lacks_eval`."""
        return self._reporter.lacks_eval(progress)

    def on_save(self, progress: Progress) -> None:
        self._reporter.on_save(progress)
        self.call("on_save")

    def wants(self) -> tuple[bool, bool]:
        if not self._callbacks:
            return False, False
        self.stopped = self._backend.any(self._run.stopping)
        save = self._backend.any(self._run.saving)
        self._run.saving = False
        return self.stopped, save

    def on_skipped(self, progress: Progress, count: int, message: str) -> None:
        self._reporter.on_skipped(progress, count, message)

    def on_pause(self, seconds: float) -> None:
        self._batches.pause(seconds)
        self._reporter.on_pause(seconds)

    def last_checkpoint(self) -> str:
        return self._reporter.last_checkpoint()

    def replay(self, step: int) -> str:
        return self._reporter.replay(step)
