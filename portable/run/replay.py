"""One step of a run taken once more, to see where a loss or gradient stops being finite.

The run goes on from its last checkpoint before that step, without a log or a save, and takes the step itself
micro-batch by micro-batch, with a look at what every module gives. Nothing is written into its folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.checkpoint.store import open_checkpoints
from portable.converters.console import print_line
from portable.data.samples.order import EpochIndex
from portable.data.tokens.bounded_tokenizer import decode
from portable.errors import UserError, to_one_line
from portable.formatting import format_table
from portable.loop import iter_steps
from portable.paths import place_of
from portable.ranks.collectives import agree
from portable.run.batches import build_train_loader
from portable.run.restore import restore
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from portable.backend import Backend, Engine
    from portable.batch import Batch
    from portable.converters.storage.path_or_url import Place
    from portable.progress import Progress
    from portable.run.stages import Prepared

_SHOWN = 160  # characters of a sample's text


@dataclass(frozen=True)
class MicroBatch:
    """Result of one micro-batch of the repeated step.

    Attributes:
        rank: Rank that processed the micro-batch.
        number: Number within the rank's part of the step, counted from 1.
        first_sample: Index of the first sample, in the order of the run.
        samples: Number of consecutive samples.
        tokens: Number of tokens that count in the loss.
        loss: Mean loss of these tokens.
        module: Name and class of the first module whose output was not finite, or None if all outputs were
            finite.
        bad_sample: Index of the first sample with such an output, or None if the output has no row for each
            sample.
    """

    rank: int
    number: int
    first_sample: int
    samples: int
    tokens: int
    loss: float
    module: str | None
    bad_sample: int | None


def replay_step(run: Prepared, step: int) -> int:
    """Repeat a step, and print its losses, outputs and gradients that are not finite. A collective call.

    Starts from the last checkpoint before the step.

    Args:
        run: The run.
        step: Number of the step, counted from 1.

    Returns:
        The exit code 0, regardless of the result.

    Raises:
        UserError: If the run has no such step, or an earlier step is not finite.
    """
    backend = run.backend
    if not 1 <= step <= run.steps:
        raise UserError(f"--replay: {step} is no step of this run, which has {run.steps:,}")
    source = _find_checkpoint_before(run, step)
    agree(backend, {"the checkpoint to replay from": source.name if source is not None else "none"})
    restored = restore(run, source)
    engine, progress = restored.engine, restored.progress
    if progress.step >= step:
        raise UserError(f"--replay: the run begins at {source}, after step {progress.step}; give a later one")
    if backend.rank == 0:
        start = "the start" if source is None else str(source)
        tell(f"going from {start} to step {step}, which is number {step - progress.step}")
    batches = iter(build_train_loader(run, progress.samples))
    try:
        _take_steps_before(step, run, engine, batches, progress)
        micro_batches, loss = _run_with_hooks(run, engine, batches, progress)
        gradients = _gather_lists(backend, engine.find_nonfinite_gradients())
        (norm,) = backend.read(
            [engine.update(run.schedule(step - 1), run.config.train.max_grad_norm or 0.0, loss)]
        )
    finally:
        batches.close()
    everything = [
        MicroBatch(**record)
        for record in _gather_lists(backend, [asdict(micro_batch) for micro_batch in micro_batches])
    ]
    if run.config.tensor_parallel_size > 1:
        everything = drop_duplicates(everything)
    backend.barrier()
    if backend.rank == 0:
        print_line("\n".join(_report(run, engine, step, everything, set(gradients), norm)))
    return 0


def _find_checkpoint_before(run: Prepared, step: int) -> Place | None:
    """Return the newest checkpoint before ``step``, or None to start at the beginning."""
    complete = open_checkpoints(run.resolved.place).list_complete()
    before: list[Place] = [folder for done, folder in complete if done < step]
    if before:
        return before[-1]
    if run.config.checkpoint.resume in ("auto", "never"):
        return None
    begun = place_of("checkpoint.resume", run.config.checkpoint.resume)
    return begun if begun.exists() else None


def _take_steps_before(
    step: int, run: Prepared, engine: Engine, batches: Iterator[Batch], progress: Progress
) -> None:
    """Train until the step before ``step``."""
    start = progress.step
    for _ in iter_steps(run, engine, batches, progress, step - 1):
        pass
    health = engine.read_health()
    if health.halted:
        assert health.first_bad_update is not None
        earlier = start + health.first_bad_update + 1
        raise UserError(f"--replay: step {earlier} before it is not finite; use --replay {earlier}")


class HookedStep(NamedTuple):
    """Forward and backward passes of a step, without its update."""

    micro_batches: list[MicroBatch]
    """Results of this rank's micro-batches."""
    loss: Tensor
    """Loss of the global batch, a device scalar."""


def _run_with_hooks(
    run: Prepared, engine: Engine, batches: Iterator[Batch], progress: Progress
) -> HookedStep:
    """Run the forward and backward passes of the next step while checking the output of each module."""
    backend, plan = run.backend, run.plan
    step_batches = [next(batches) for _ in range(plan.accumulation_steps)]
    valid = backend.total(sum(engine.objective.compute_weight(batch) for batch in step_batches))
    (all_tokens,) = backend.read([valid])
    # Index of the first sample in this rank's share of the global batch.
    share = plan.global_batch_size // plan.world_size
    first = progress.samples + plan.rank * share
    results, losses = [], []
    for index, batch in enumerate(step_batches):
        backend.seed(plan.compute_dropout_seed(progress.samples, index))
        rows, tokens = batch["labels"].shape[0], engine.objective.compute_weight(batch)
        if backend.one_program:  # the loss includes the samples of all ranks
            tokens = backend.read([backend.total(tokens)])[0]
        with _Outputs(engine.model, rows) as outputs:
            last = index == plan.accumulation_steps - 1
            losses.append(engine.accumulate(backend.place(batch), valid, last=last).values[0])
        value, *firsts = backend.read([losses[-1], *outputs.flags])
        bad_index = next((number for number, row in enumerate(firsts) if row < rows), None)
        row = None if bad_index is None else int(firsts[bad_index])
        results.append(
            MicroBatch(
                rank=backend.rank,
                number=index + 1,
                first_sample=first + index * rows,
                samples=rows,
                tokens=int(tokens),
                loss=value * all_tokens / max(tokens, 1),
                module=None if bad_index is None else outputs.names[bad_index],
                bad_sample=None if row is None or row < 0 else first + index * rows + row,
            )
        )
    return HookedStep(results, backend.sum(torch.stack(losses).sum()))


def drop_duplicates(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Keep one result for each micro-batch, because tensor-parallel ranks process the same samples.

    Prefers the result of a rank that has found an output that is not finite.
    """
    taken: dict[int, MicroBatch] = {}
    for micro_batch in micro_batches:
        if (
            taken.setdefault(micro_batch.first_sample, micro_batch).module is None
            and micro_batch.module is not None
        ):
            taken[micro_batch.first_sample] = micro_batch
    return list(taken.values())


class _Outputs:
    """Checks the output of each module for values that are not finite, within a context.

    Attributes:
        names: Names and classes of the modules, in the order in which their forward passes end.
        flags: For each output, a scalar on the device: the first row (sample) that is not finite, -1 if an
            output without a row for each sample is not finite, or ``rows`` if the output is finite.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.names: list[str] = []
        self.flags: list[Tensor] = []
        self._model = model
        self._rows = rows
        self._hooks: list[Any] = []

    def __enter__(self) -> _Outputs:
        for name, module in self._model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            self._hooks.append(module.register_forward_hook(self._make_hook(label)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, label: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            with torch.no_grad():
                for tensor in _iter_floating_tensors(output):
                    self.names.append(label)
                    self.flags.append(self._find_first_bad_row(tensor.detach()))

        return look

    def _find_first_bad_row(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != self._rows:
            return torch.where(torch.isfinite(tensor).all(), float(self._rows), -1.0)
        finite = (
            torch.isfinite(tensor).flatten(start_dim=1).all(dim=1) if tensor.dim() > 1 else tensor.isfinite()
        )
        rows = torch.arange(self._rows, device=tensor.device)
        return torch.where(finite, self._rows, rows).min()


def _iter_floating_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, dict):
        yield from _iter_floating_tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _iter_floating_tensors(value)


def _gather_lists(backend: Backend, values: Sequence[Any]) -> list[Any]:
    return [value for text in backend.gather(json.dumps(values)) for value in json.loads(text)]


def _report(
    run: Prepared,
    engine: Engine,
    step: int,
    micro_batches: Sequence[MicroBatch],
    gradients: set[str],
    norm: float,
) -> list[str]:
    rate = f"learning rate {run.schedule(step - 1):.3g}"
    first = min(micro_batch.first_sample for micro_batch in micro_batches)
    last = max(micro_batch.first_sample + micro_batch.samples for micro_batch in micro_batches) - 1
    lines = [f"step {step}: samples {first} to {last}, {rate}"]
    lines.append(format_table([_format_row(micro_batch) for micro_batch in micro_batches]))
    for micro_batch in micro_batches:
        if not math.isfinite(micro_batch.loss) and micro_batch.module is not None:
            location = f"rank {micro_batch.rank}, micro-batch {micro_batch.number}"
            lines.append(f"first output that is not finite in {location}: of {micro_batch.module}")
            if micro_batch.bad_sample is not None:
                lines.append(_format_sample(run, micro_batch.bad_sample))
        elif not math.isfinite(micro_batch.loss):
            lines.append(
                f"every output is finite in rank {micro_batch.rank}, micro-batch {micro_batch.number}: it is "
                "the loss"
            )
    names = [name for name, _ in engine.model.named_parameters()]
    bad = [name for name in names if name in gradients]
    if bad:
        lines.append(
            f"gradients that are not finite: of {len(bad)} of {len(names)} parameters; the last in the "
            f"model, which the backward pass comes to first: {bad[-1]}"
        )
    elif all(math.isfinite(micro_batch.loss) for micro_batch in micro_batches):
        lines.append(
            "every loss and gradient is finite this time"
            + (
                f" (gradient norm {norm:.6g}); if they were not in the run, a device computes differently "
                "from one time to the next"
                if math.isfinite(norm)
                else ", but the gradients are so large that their norm is beyond fp32"
            )
        )
    return lines


def _format_row(batch: MicroBatch) -> tuple[str, str]:
    last = batch.first_sample + batch.samples - 1
    text = f"samples {batch.first_sample} to {last}: loss {batch.loss:.6g} over {batch.tokens} tokens"
    return f"rank {batch.rank}, micro-batch {batch.number}", text


def _format_sample(run: Prepared, position: int) -> str:
    """Format a sample with its document, source and the beginning of its text.

    Args:
        run: The run.
        position: Index of the sample, in the order of the run.
    """
    samples = run.data.train
    epoch, index = samples.locate(position, run.config.seed)
    documents = samples.list_documents(index)
    which = f"document {documents[0]}"
    if len(documents) > 1:
        in_a_row = isinstance(documents, range)
        which += f" to {documents[-1]}" if in_a_row else "".join(f", {number}" for number in documents[1:])
    tokens = samples.build_batch([EpochIndex(epoch, index)])["input_ids"][0]
    text = to_one_line(decode(run.data.tokenizer, tokens.tolist()))
    source = samples.get_source_name(index) or "the source"
    return f"sample {position}, of {which} of {source}: {text[:_SHOWN]!r}"
