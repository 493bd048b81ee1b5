"""Steps of a run, with the parts of ``portable-train``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from portable.batch import Batch
from portable.config import RunConfig
from portable.data.samples.loader import TrainLoader
from portable.loop import train_step
from portable.model.loss import compute_summed_cross_entropy
from portable.private.transformers_internals import skip_mask_value_checks
from portable.progress import StepResult
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.run.batches import build_train_loader
from portable.run.prepare import prepare_run
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from portable.run.stages import PreparedRun
from tests.engines import Engines
from tests.runs import configured


@dataclass(frozen=True)
class Steps:
    """Loss and gradient norm of each step, counts of the backend, and graphs of a compiling engine."""

    losses: list[float]
    norms: list[float]
    figures: dict[str, float]
    graphs: dict[str, int]


class Opened:
    """A run that has begun, for tests that read its parts between the steps.

    Attributes:
        run: The prepared run.
        backend: The started backend.
        engine: The engine at the start of the run.
        batches: Batches of this rank, from the first one.
        steps: Number of steps so far.
    """

    def __init__(self, run: PreparedRun) -> None:
        self.run = run
        self.backend = run.backend
        self.engine: Any = restore_run(run, None).engine
        self.batches = iter(build_train_loader(run, 0))
        self.steps = 0

    def step(self, learning_rate: float | None = None) -> StepResult:
        """Take the next step, at the rate of the schedule or at another, without reads from the device."""
        settings, schedule = self.run.config.train, self.run.schedule
        result = train_step(
            self.backend,
            self.engine,
            self.batches,
            batch_plan=self.run.batch_plan,
            first_sample=self.steps * self.run.batch_plan.global_batch_size,
            learning_rate=schedule(self.steps) if learning_rate is None else learning_rate,
            max_grad_norm=settings.max_grad_norm or 0.0,
        )
        self.steps += 1
        return result

    def read_metrics(self, result: StepResult) -> dict[str, float]:
        """Read the values that a step logs in addition to its loss."""
        values = zip(result.metric_names, self.backend.read_to_host([result.metrics]), strict=True)
        metrics: dict[str, float] = self.engine.objective.compute_logged_values(dict(values))
        return metrics


def one_document_each(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split a batch of packed documents into batches of one document without padding; keep other batches."""
    if "document_lengths" not in batch:
        return [batch]
    found = []
    for row, lengths in enumerate(batch["document_lengths"].tolist()):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            one = {name: batch[name][row : row + 1, start:end] for name in ("input_ids", "labels")}
            if (one["labels"] != -100).any():
                found.append(one)
    return found


def cross_entropy(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, float]:
    labels = batch["labels"].flatten()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return loss, int((labels != -100).sum())


def plain_steps(
    model: Any,
    optimizer: Any,
    run: PreparedRun,
    steps: int,
    criterion: Callable[[torch.Tensor, Batch], tuple[torch.Tensor, float]] = cross_entropy,
) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of a plain loop, with the full batch at once.

    ``criterion`` returns a sum and its divisor. ``factor`` of a group scales its rate.
    """
    size = run.config.train.global_batch_size
    loader = iter(
        TrainLoader(run.data.train, seed=run.config.seed, global_batch_size=size, micro_batch_size=size)
    )
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    results = []
    for step in range(steps):
        sums, valid = [], 0.0
        for batch in one_document_each(next(loader)):
            inputs = {
                name: batch[name]
                for name in ("input_ids", "attention_mask", "decoder_input_ids")
                if name in batch
            }
            loss, weight = criterion(model(**inputs, use_cache=False).logits, batch)
            sums.append(loss)
            valid += weight
        loss = torch.stack(sums).sum() / valid
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = run.schedule(step) * group.get("factor", 1)
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss.detach()), float(norm)))
    loader.close()
    return results


@contextmanager
def opened(config: RunConfig) -> Iterator[Opened]:
    """Start the run of ``config`` on its backend."""
    backend = create_backend(config.backend)
    resolved = resolve_run(config, backend.name)
    backend.start()
    try:
        trial = Opened(prepare_run(resolved, backend))
        yield trial
        trial.batches.close()
    finally:
        backend.stop()


def take_steps(config: RunConfig, steps: int) -> Steps:
    """Train from the start on ``config.backend``, without reads from the device before the last step."""
    with opened(config) as trial:
        backend = trial.backend
        before = backend.get_metrics()
        results = [trial.step() for _ in range(steps)]
        figures = {name: value - before[name] for name, value in backend.get_metrics().items()}
        losses = backend.read_to_host([result.loss for result in results])
        norms = backend.read_to_host([result.grad_norm for result in results])
        compiled: Any = getattr(trial.engine, "graphs", None)
        return Steps(losses, norms, figures, {} if compiled is None else compiled.graph_counts)


def launched(config: RunConfig) -> int:
    """Run completely on one rank."""
    return run_rank(config.backend, config)


def numbers_of(engines: Engines, size: int, config: RunConfig) -> list[float]:
    """Return the losses, norms and evaluations that a run on ``size`` ranks logs."""
    assert engines.run(config.strategy, size, launched, config) == 0
    rows = read_metrics(Path(config.output_dir))
    return [row[name] for row in rows for name in ("loss", "eval_loss", "grad_norm") if name in row]


class Beside:
    """Short runs on several context- or tensor-parallel ranks, and the same runs on one rank.

    Args:
        engines: Runner of the engines.
        source: Data of the runs.
        folder: Function that creates a new folder.
    """

    def __init__(self, engines: Engines, source: Path, folder: Callable[[str], Path]) -> None:
        self._engines, self._source, self._folder = engines, source, folder
        self._alone: dict[str, list[float]] = {}

    def ranks(self, size: int, settings: dict[str, Any], folder: Path | None = None) -> list[float]:
        """Return the numbers of two steps of four sequences, in two micro-batches if there are enough."""
        sharing = settings.get("tensor_parallel_size", 1) * settings.get("context_parallel_size", 1)
        given = {
            "data__seq_len": 64,
            "train__steps": 2,
            "train__global_batch_size": 4,
            "train__micro_batch_size": 4 // (size // sharing) // 2 or 1,
            "train__dropout": False,
            "precision": "fp32",
        }
        config = configured(folder or self._folder("ranks"), self._source, **{**given, **settings})
        return numbers_of(self._engines, size, config)

    def one(self, settings: dict[str, Any]) -> list[float]:
        """Return the numbers of one rank, computed once."""
        if str(settings) not in self._alone:
            self._alone[str(settings)] = self.ranks(1, {"strategy": "no_shard", **settings})
        return self._alone[str(settings)]


def loss_and_gradients(
    model: Any, batch: dict[str, torch.Tensor], summed: Callable[[], Any] = lambda: None
) -> list[torch.Tensor]:
    """Return the loss and the full gradients, after a call of ``summed``."""
    model.zero_grad()
    with skip_mask_value_checks():
        loss = compute_summed_cross_entropy(model, batch)
    loss.backward()
    summed()
    found = [loss.detach().clone()]
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return found


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Describe the difference of two results of :func:`loss_and_gradients` if it is larger than rounding."""
    largest = max(float(value.abs().max()) for value in expected[1:])
    apart = [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
    if apart[0] > 1e-6 * float(expected[0]) or max(apart[1:]) > 2e-6 * largest:
        return f"the loss is {apart[0]:.1e} off, gradients {max(apart[1:]) / largest:.1e}"
    return ""
