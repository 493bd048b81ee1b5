"""Steps of a run, taken from the parts that ``portable-train`` is made of."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from portable.data.samples.loader import TrainLoader
from portable.loop import train_step
from portable.registry import create_backend
from portable.run.batches import train_loader
from portable.run.prepare import prepare
from portable.run.resolve import resolve
from portable.run.restore import restore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig
    from portable.loop import StepResult
    from portable.run.stages import Prepared


@dataclass(frozen=True)
class Steps:
    """Loss and gradient norm of each step, what the backend counted, and the graphs of a compiling engine."""

    losses: list[float]
    norms: list[float]
    figures: dict[str, float]
    graphs: dict[str, int]


class Opened:
    """A run that has begun, for tests that look at its parts between the steps.

    Attributes:
        run: as it was prepared.
        backend: started.
        engine: at the start of the run.
        batches: this rank's, from the first on.
        steps: taken so far.
    """

    def __init__(self, run: Prepared) -> None:
        self.run = run
        self.backend = run.backend
        self.engine: Any = restore(run, None).engine
        self.batches = iter(train_loader(run, 0))
        self.steps = 0

    def step(self, learning_rate: float | None = None) -> StepResult:
        """Take the next step, at the rate of the schedule or at another; nothing is read from the device."""
        settings, schedule = self.run.config.train, self.run.schedule
        result = train_step(
            self.backend,
            self.engine,
            self.batches,
            plan=self.run.plan,
            first_sample=self.steps * self.run.plan.global_batch_size,
            learning_rate=schedule(self.steps) if learning_rate is None else learning_rate,
            max_grad_norm=settings.max_grad_norm or 0.0,
        )
        self.steps += 1
        return result


def plain_steps(
    model: Any, optimizer: torch.optim.Optimizer, run: Prepared, steps: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step that a person's own loop takes, with the whole batch at once."""
    size = run.config.train.global_batch_size
    loader = iter(
        TrainLoader(run.data.train, seed=run.config.seed, global_batch_size=size, micro_batch_size=size)
    )
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    results = []
    for step in range(steps):
        batch = next(loader)
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = run.schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss.detach()), float(norm)))
    loader.close()
    return results


@contextmanager
def opened(config: RunConfig) -> Iterator[Opened]:
    """The run of ``config`` from its start, on the backend that it names."""
    backend = create_backend(config.backend)
    resolved = resolve(config, backend.name)
    backend.start()
    try:
        trial = Opened(prepare(resolved, backend))
        yield trial
        trial.batches.close()
    finally:
        backend.stop()


def take_steps(config: RunConfig, steps: int) -> Steps:
    """Train from the start on ``config.backend``; nothing is read from the device before the last step."""
    with opened(config) as trial:
        backend = trial.backend
        before = backend.metrics()
        results = [trial.step() for _ in range(steps)]
        figures = {name: value - before[name] for name, value in backend.metrics().items()}
        losses = backend.read([result.loss for result in results])
        norms = backend.read([result.grad_norm for result in results])
        compiled: Any = getattr(trial.engine, "graphs", None)
        return Steps(losses, norms, figures, {} if compiled is None else compiled.distinct)
