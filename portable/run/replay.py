"""Replay one step of a run to find the first non-finite loss or gradient (``--replay``).

The run restarts from its last checkpoint before the step. The step itself is then taken one
micro-batch at a time, while hooks check the output of every module. Nothing is logged, saved, or
written to the run's folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.checkpoint.store import open_checkpoints
from portable.converters.console import print_line
from portable.data.samples.order import EpochIndex, compute_first_sample_of_rank
from portable.data.tokens.bounded_tokenizer import decode
from portable.errors import UserError, to_one_line
from portable.formatting import format_count, format_table
from portable.loop import iter_steps
from portable.paths import parse_place_setting
from portable.ranks.collectives import check_ranks_agree
from portable.run.batches import build_train_loader
from portable.run.restore import restore_run
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from portable.backend import Backend, Engine
    from portable.batch import Batch
    from portable.converters.storage.path_or_url import AnyPath
    from portable.progress import RunProgress
    from portable.run.stages import PreparedRun

_MAX_SAMPLE_CHARACTERS = 160  # length to which the text of a sample is cut


@dataclass(frozen=True)
class ReplayedMicroBatch:
    """Result of one micro-batch in the step that ``--replay`` runs again.

    Attributes:
        rank: Rank that processed the micro-batch.
        number: Number of the micro-batch on its rank, counted from 1.
        first_sample: Index of the first sample, in the order of the run.
        samples: Number of consecutive samples.
        tokens: Number of tokens that count in the loss. If a custom loss has weights, the sum of
            the weights, rounded down. On XLA, the tokens of all ranks are counted.
        loss: Mean loss of these tokens.
        module: Name and class of the first module with a non-finite output. None if all outputs
            were finite.
        bad_sample: Index, in the order of the run, of the first sample whose row in the output of
            ``module`` is not finite. None if ``module`` is None, or if its output does not have one
            row per sample.
    """

    rank: int
    number: int
    first_sample: int
    samples: int
    tokens: int
    loss: float
    module: str | None
    bad_sample: int | None


def replay_and_print_step(run: PreparedRun, step: int) -> int:
    """Replay a step, and print which of its losses, outputs and gradients are not finite.

    The replay starts from the last checkpoint before the step. If there is none, it starts from
    ``checkpoint.resume`` or from the initial weights. All ranks must call this function.

    Args:
        run: The run.
        step: Number of the step, counted from 1.

    Returns:
        The exit code 0, regardless of the result.

    Raises:
        UserError: If the run has no such step, if ``checkpoint.resume`` is a checkpoint of this
            step or a later step, or if non-finite losses or gradients end the run before the step.
    """
    backend = run.backend
    if not 1 <= step <= run.steps:
        raise UserError(f"--replay: {step} is not a step of this run; use a step from 1 to {run.steps:,}")
    source = _find_checkpoint_before(run, step)
    check_ranks_agree(
        backend, {"the checkpoint to replay from": source.name if source is not None else "none"}
    )
    restored = restore_run(run, source)
    engine, progress = restored.engine, restored.progress
    if progress.step >= step:
        raise UserError(
            f"--replay: the run starts from {source}, after step {progress.step}; use a step after "
            f"{progress.step}"
        )
    if backend.rank == 0:
        start = "the start" if source is None else str(source)
        print_status(f"running {format_count(step - progress.step, 'step')}, from {start} to step {step}")
    batches = iter(build_train_loader(run, progress.samples))
    try:
        _take_steps_before(step, run, engine, batches, progress)
        micro_batches, loss = _run_step_with_hooks(run, engine, batches, progress)
        gradients = _gather_json_lists(backend, engine.find_nonfinite_gradients())
        (norm,) = backend.read_to_host(
            [engine.take_optimizer_step(run.schedule(step - 1), run.config.train.max_grad_norm or 0.0, loss)]
        )
    finally:
        batches.close()
    all_micro_batches = [
        ReplayedMicroBatch(**record)
        for record in _gather_json_lists(backend, [asdict(micro_batch) for micro_batch in micro_batches])
    ]
    if run.config.tensor_parallel_size > 1:
        all_micro_batches = drop_tensor_parallel_duplicates(all_micro_batches)
    backend.barrier()
    if backend.rank == 0:
        print_line(
            "\n".join(_format_replay_report(run, engine, step, all_micro_batches, set(gradients), norm))
        )
    return 0


def _find_checkpoint_before(run: PreparedRun, step: int) -> AnyPath | None:
    """Return the checkpoint to replay ``step`` from. None to start with the initial weights.

    This is the run's newest checkpoint before ``step``. If there is none, the result is the
    checkpoint that ``checkpoint.resume`` names, if it exists. The caller must check that this
    checkpoint is before ``step``.
    """
    complete = open_checkpoints(run.resolved.output_place).list_complete()
    before: list[AnyPath] = [folder for done_steps, folder in complete if done_steps < step]
    if before:
        return before[-1]
    if run.config.checkpoint.resume in ("auto", "never"):
        return None
    start_checkpoint = parse_place_setting("checkpoint.resume", run.config.checkpoint.resume)
    return start_checkpoint if start_checkpoint.exists() else None


def _take_steps_before(
    step: int, run: PreparedRun, engine: Engine, batches: Iterator[Batch], progress: RunProgress
) -> None:
    """Take all training steps before ``step``, so that ``step`` is the next one.

    Raises:
        UserError: If losses or gradients are not finite in so many consecutive steps that
            ``train.on_non_finite`` ends the run. With ``stop``, one step is sufficient. The message
            names the first of these steps and recommends replaying it.
    """
    start = progress.step
    for _ in iter_steps(run, engine, batches, progress, step - 1):
        pass
    health = engine.read_update_health()
    if health.halted:
        assert health.first_bad_update is not None
        earlier = start + health.first_bad_update + 1
        raise UserError(
            f"--replay: the loss or a gradient of an earlier step, {earlier}, is not finite; use --replay "
            f"{earlier}"
        )


class HookedStep(NamedTuple):
    """Results of the forward and backward passes of a step, before the optimizer step."""

    micro_batches: list[ReplayedMicroBatch]
    """Results of this rank's micro-batches."""
    loss: Tensor
    """Loss of the global batch, a device scalar."""


def _run_step_with_hooks(
    run: PreparedRun, engine: Engine, batches: Iterator[Batch], progress: RunProgress
) -> HookedStep:
    """Run the forward and backward passes of the next step while checking the output of each module.

    The gradients remain in the engine, so that the caller can check them and take the optimizer step.
    """
    backend, plan = run.backend, run.batch_plan
    step_batches = [next(batches) for _ in range(plan.accumulation_steps)]
    valid = backend.sum_host_numbers(sum(engine.objective.compute_weight(batch) for batch in step_batches))
    (all_tokens,) = backend.read_to_host([valid])
    first_sample, end_sample = (
        progress.samples + compute_first_sample_of_rank(plan.global_batch_size, rank, plan.world_size)
        for rank in (plan.rank, plan.rank + 1)
    )
    results, losses = [], []
    for index, batch in enumerate(step_batches):
        backend.seed_device_generator(plan.compute_dropout_seed(progress.samples, index))
        rows, tokens = batch["labels"].shape[0], engine.objective.compute_weight(batch)
        if backend.one_program:  # the loss includes the samples of all ranks
            tokens = backend.read_to_host([backend.sum_host_numbers(tokens)])[0]
        with _NonFiniteOutputRecorder(engine.model, rows) as outputs:
            last = index == plan.accumulation_steps - 1
            losses.append(
                engine.accumulate_gradients(
                    backend.copy_to_device(batch), valid, is_last_micro_batch=last
                ).values[0]
            )
        value, *firsts = backend.read_to_host([losses[-1], *outputs.first_bad_rows])
        bad_index = next((number for number, row in enumerate(firsts) if row < rows), None)
        row = None if bad_index is None else int(firsts[bad_index])
        # The last rows of a rank with fewer samples than other ranks are filler rows.
        num_samples = min(rows, end_sample - first_sample - index * rows)
        if num_samples <= 0:
            continue
        results.append(
            ReplayedMicroBatch(
                rank=backend.rank,
                number=index + 1,
                first_sample=first_sample + index * rows,
                samples=num_samples,
                tokens=int(tokens),
                loss=value * all_tokens / max(tokens, 1),
                module=None if bad_index is None else outputs.names[bad_index],
                bad_sample=None if row is None or row < 0 else first_sample + index * rows + row,
            )
        )
    return HookedStep(results, backend.sum_tensor_over_ranks(torch.stack(losses).sum()))


def drop_tensor_parallel_duplicates(micro_batches: Sequence[ReplayedMicroBatch]) -> list[ReplayedMicroBatch]:
    """Keep one result per micro-batch, because tensor-parallel ranks process the same samples.

    Prefers the result of a rank that has found a non-finite output.
    """
    by_first_sample: dict[int, ReplayedMicroBatch] = {}
    for micro_batch in micro_batches:
        if (
            by_first_sample.setdefault(micro_batch.first_sample, micro_batch).module is None
            and micro_batch.module is not None
        ):
            by_first_sample[micro_batch.first_sample] = micro_batch
    return list(by_first_sample.values())


class _NonFiniteOutputRecorder:
    """Context manager that checks the outputs of all modules for non-finite values.

    Args:
        model: Model whose modules get forward hooks.
        rows: Number of samples in the micro-batch.

    Attributes:
        names: Name and class of the module for each floating-point tensor in an output, in the
            order in which the forward passes completed. A module comes after the modules inside it.
        first_bad_rows: One scalar on the device for each entry of ``names``. The scalar is the
            index of the first row (sample) with a non-finite value, or ``rows`` if all values are
            finite. If the tensor does not have one row per sample and contains a non-finite value,
            the scalar is -1.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.names: list[str] = []
        self.first_bad_rows: list[Tensor] = []
        self._model = model
        self._rows = rows
        self._hooks: list[Any] = []

    def __enter__(self) -> _NonFiniteOutputRecorder:
        for name, module in self._model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            self._hooks.append(module.register_forward_hook(self._make_hook(label)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, label: str) -> Any:
        def record_output(_: nn.Module, __: Any, output: Any) -> None:
            with torch.no_grad():
                for tensor in _iter_floating_tensors(output):
                    self.names.append(label)
                    self.first_bad_rows.append(self._find_first_bad_row(tensor.detach()))

        return record_output

    def _find_first_bad_row(self, tensor: Tensor) -> Tensor:
        """Find the first row of an output with a non-finite value, without a host-device sync.

        Args:
            tensor: Output of a module. Usually, it has one row per sample.

        Returns:
            Scalar on the device, as described in :attr:`first_bad_rows`:

            - The number of samples if all values are finite.
            - The index of the row if a value is not finite and the output has one row per sample.
            - -1 if a value is not finite and the output does not have one row per sample.
        """
        if tensor.dim() == 0 or tensor.shape[0] != self._rows:
            return torch.where(torch.isfinite(tensor).all(), float(self._rows), -1.0)
        finite = (
            torch.isfinite(tensor).flatten(start_dim=1).all(dim=1) if tensor.dim() > 1 else tensor.isfinite()
        )
        rows = torch.arange(self._rows, device=tensor.device)
        return torch.where(finite, self._rows, rows).min()


def _iter_floating_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the non-empty floating-point tensors in the output of a module.

    The output may consist of nested dicts, lists and tuples. Other objects are ignored.
    """
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, dict):
        yield from _iter_floating_tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _iter_floating_tensors(value)


def _gather_json_lists(backend: Backend, values: Sequence[Any]) -> list[Any]:
    """Gather lists of JSON values from all ranks, concatenated in rank order. A collective call."""
    return [value for text in backend.gather_text(json.dumps(values)) for value in json.loads(text)]


def _format_replay_report(
    run: PreparedRun,
    engine: Engine,
    step: int,
    micro_batches: Sequence[ReplayedMicroBatch],
    gradients: set[str],
    norm: float,
) -> list[str]:
    """Format the report of a replayed step.

    Args:
        run: The run.
        engine: Engine of this rank, whose model determines the order of the parameters.
        step: Step, counted from 1.
        micro_batches: Results of all ranks.
        gradients: Names of the parameters whose gradient is not finite on some rank.
        norm: Global gradient norm.

    Returns:
        The lines to print.
    """
    rate = f"learning rate {run.schedule(step - 1):.3g}"
    first = min(micro_batch.first_sample for micro_batch in micro_batches)
    last = max(micro_batch.first_sample + micro_batch.samples for micro_batch in micro_batches) - 1
    lines = [f"step {step}: samples {first} to {last}, {rate}"]
    lines.append(format_table([_format_row(micro_batch) for micro_batch in micro_batches]))
    for micro_batch in micro_batches:
        if not math.isfinite(micro_batch.loss) and micro_batch.module is not None:
            location = f"rank {micro_batch.rank}, micro-batch {micro_batch.number}"
            lines.append(f"first non-finite output in {location}: {micro_batch.module}")
            if micro_batch.bad_sample is not None:
                lines.append(_format_sample(run, micro_batch.bad_sample))
        elif not math.isfinite(micro_batch.loss):
            lines.append(
                f"every output is finite in rank {micro_batch.rank}, micro-batch {micro_batch.number}; only "
                "the loss is not finite"
            )
    names = [name for name, _ in engine.model.named_parameters()]
    bad = [name for name in names if name in gradients]
    if bad:
        lines.append(
            f"{len(bad)} of {len(names)} parameters have non-finite gradients; the backward pass "
            f"reaches {bad[-1]} first"
        )
    elif all(math.isfinite(micro_batch.loss) for micro_batch in micro_batches):
        lines.append(
            "every loss and gradient is finite this time"
            + (
                f" (gradient norm {norm:.6g}); if a value was not finite in the run, the results of a device "
                "are not reproducible"
                if math.isfinite(norm)
                else ", but the gradients are so large that their norm overflows fp32"
            )
        )
    return lines


def _format_row(batch: ReplayedMicroBatch) -> tuple[str, str]:
    """Format the result of a micro-batch as a table row: a title and a value."""
    last = batch.first_sample + batch.samples - 1
    text = f"samples {batch.first_sample} to {last}: loss {batch.loss:.6g} over {batch.tokens} tokens"
    return f"rank {batch.rank}, micro-batch {batch.number}", text


def _format_sample(run: PreparedRun, position: int) -> str:
    """Describe a sample: its documents, its source, and the beginning of its text.

    Args:
        run: The run.
        position: Index of the sample, in the order of the run.
    """
    samples = run.data.train
    epoch, index = samples.locate_sample(position, run.config.seed)
    documents = samples.list_document_numbers(index)
    document_numbers = f"document {documents[0]}"
    if len(documents) > 1:
        in_a_row = isinstance(documents, range)
        document_numbers += (
            f" to {documents[-1]}" if in_a_row else "".join(f", {number}" for number in documents[1:])
        )
    tokens = samples.build_batch([EpochIndex(epoch, index)])["input_ids"][0]
    text = to_one_line(decode(run.data.tokenizer, tokens.tolist()))
    source = samples.get_source_name(index) or "the source"
    return f"sample {position}, from {document_numbers} of {source}: {text[:_MAX_SAMPLE_CHARACTERS]!r}"
