"""Steps of a run, taken from the parts that ``portable-train`` is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.backend import backend_room
from portable.loop import train_step
from portable.run import Prepared, resolve

if TYPE_CHECKING:
    from portable.config import RunConfig


@dataclass(frozen=True)
class Steps:
    """Loss and gradient norm of each step, what the backend counted, and the graphs of a compiling engine."""

    losses: list[float]
    norms: list[float]
    figures: dict[str, float]
    graphs: dict[str, int]


def take_steps(config: RunConfig, steps: int) -> Steps:
    """Train from the start on ``config.backend``; nothing is read from the device before the last step."""
    backend = backend_room(config.backend).create(config.backend)
    config = resolve(config, backend)
    backend.start()
    try:
        run = Prepared(config, backend)
        engine, progress = run.engine(None)
        batches = iter(run.train_loader(0))
        before = backend.figures()
        results = []
        for step in range(steps):
            results.append(
                train_step(
                    backend,
                    engine,
                    batches,
                    plan=run.plan,
                    first_sample=progress.samples + step * run.plan.global_batch_size,
                    learning_rate=run.schedule(step),
                    max_grad_norm=config.train.max_grad_norm or 0.0,
                )
            )
        batches.close()
        figures = {name: value - before[name] for name, value in backend.figures().items()}
        losses = backend.read([result.loss for result in results])
        norms = backend.read([result.grad_norm for result in results])
        compiled: Any = getattr(engine, "graphs", None)
        return Steps(losses, norms, figures, {} if compiled is None else compiled.distinct)
    finally:
        backend.stop()
