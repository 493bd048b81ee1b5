"""Finish a run: export the model, upload it, and print a summary.

This module also formats the table that is printed at the start of a launch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.batch import IGNORED_LABEL
from portable.batch_plan import describe_padding
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState, parse_checkpoint_step
from portable.converters.console import get_terminal_width
from portable.data.preview import format_image
from portable.data.samples.base import select_sequence_of_samples
from portable.data.tokens.bounded_tokenizer import decode, encode_text
from portable.errors import (
    NOT_EXPORTED,
    NotExportedError,
    ReportedElsewhereError,
    RunError,
    UserError,
    to_one_line,
)
from portable.formatting import format_bytes, format_count, format_table, format_time
from portable.model.build import get_max_positions
from portable.model.flops import build_shape_hints, format_parameter_counts
from portable.model.published_names import collapse_layer_numbers
from portable.output.export import export_model
from portable.paths import FINAL_FOLDER, REPORT_FILE
from portable.ranks.collectives import gather_text
from portable.ranks.node_writers import choose_node_writers
from portable.reporting.metrics import METRICS_FILE, read_metrics
from portable.reporting.model_card import MODEL_CARD_FILE, build_model_card, list_usage_commands
from portable.reporting.run_log import LOG_FILE
from portable.run.length import format_run_length
from portable.temporary_folder import create_scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

    from portable.backend import Engine
    from portable.batch import Batch
    from portable.callbacks import Run
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.samples.base import Samples
    from portable.data.tokens.cache import CachedImage
    from portable.output.output_dir import RunOutput
    from portable.ranks.node_writers import NodeWriters
    from portable.reporting.profiling import Profiler
    from portable.reporting.reporter import RunReporter
    from portable.run.stages import PreparedRun, RestoredRun
    from portable.run.uploads import HubUploadCallback

PROMPT_TOKENS = 32
EXPORTED_BYTES = 4
"""Bytes per parameter of the final model.

The final model is in fp32, unless it is written in the base model's layout.
"""


LARGE_EXPORT_BYTES = 50e9
"""Minimum size of a final model, in bytes, for which the table at the start shows the cost of its export."""
_EXPORT_BYTES_PER_SECOND = 1e9
"""Assumed throughput, in bytes per second, of a node that reads a checkpoint and writes the final model."""


def build_export_cost_rows(
    config: RunConfig, model_bytes: int, ranks: int, ranks_per_node: int
) -> list[tuple[str, str]]:
    """Build a table row that estimates the cost of exporting a large final model.

    The estimate assumes that each node writes 1 GB per second.

    Args:
        config: Config of the run.
        model_bytes: Size of the final model in bytes.
        ranks: Number of ranks.
        ranks_per_node: Number of ranks on each node.

    Returns:
        At most one row, with its title and text. Empty if nothing is exported, or if the model is
        smaller than :data:`LARGE_EXPORT_BYTES`.
    """
    if not config.checkpoint.export or model_bytes < LARGE_EXPORT_BYTES:
        return []
    nodes = -(-ranks // ranks_per_node)
    seconds = model_bytes / nodes / _EXPORT_BYTES_PER_SECOND
    writers, verb = format_count(nodes, "node"), "writes" if nodes == 1 else "write"
    return [
        (
            "export",
            f"{writers} {verb} {format_bytes(model_bytes)} to {FINAL_FOLDER}/ when training ends, in "
            f"{format_time(seconds)} at 1 GB/s per node ({ranks * seconds / 3600:.1f} idle device hours); "
            "to export later with portable-convert RUN OUT, set checkpoint.export: false",
        )
    ]


def format_start_summary(prepared: PreparedRun, restored: RestoredRun) -> str:
    """Format the text that is printed at the start of a launch, including a table of the run.

    The first line describes where the run starts. The table contains the model, the data, the
    ranks, the batch and the steps. Lines about a checkpoint of another program and hints about
    inefficient sizes follow if there are any. Only rank 0 includes the changes since the
    checkpoint.

    Args:
        prepared: The run.
        restored: The engine, and the position of the run at the start.
    """
    backend, config, plan = prepared.backend, prepared.config, prepared.batch_plan
    progress, source = restored.progress, restored.source
    start = f"resuming at step {progress.step} from {source}" if source else "starting"
    if progress.step >= prepared.steps:
        start += "; all steps are done, so there is nothing left to train"
    auto = " (auto)" if prepared.resolved.config.train.micro_batch_size == "auto" else ""
    rows = [
        (
            "model",
            f"{prepared.architecture}, "
            f"{format_parameter_counts(prepared.num_parameters, prepared.num_trained_parameters)}",
        ),
        *([("frozen", prepared.frozen_description)] if prepared.frozen_description else []),
        ("data", prepared.data.description),
        *([] if (images := prepared.data.sizes.images) is None else [("images", str(images))]),
        (
            "ranks",
            f"{format_rank_count(backend.world_size, backend.devices_per_rank)} on {backend.device.type}, "
            f"{config.strategy}, {config.precision}",
        ),
        (
            "batch",
            f"{plan.global_batch_size} sequences of {config.data.seq_len} tokens per step; on each rank "
            f"{format_count(plan.accumulation_steps, 'accumulation step')} x "
            f"{format_count(plan.micro_batch_size, 'sequence')}{auto}{describe_padding(plan)}",
        ),
    ]
    rows.append(("steps", format_run_length(config, prepared.steps, _count_epoch_samples(prepared))))
    if _may_have_several_export_files(prepared):
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rows += build_export_cost_rows(
            config, EXPORTED_BYTES * prepared.num_parameters, backend.world_size, ranks_per_node
        )
    if (move := _describe_rank_change(prepared, restored)) is not None:
        rows.append(("moved", move))
    rows.append(
        ("report", f"{prepared.resolved.output_place / REPORT_FILE}, updated at evaluations and saves")
    )
    if restored.setting_changes:
        rows.append(("changed", "; ".join(change.arrow_text for change in restored.setting_changes)))
    hints = build_shape_hints(
        prepared.model_config,
        micro_batch_tokens=plan.micro_batch_size * config.data.seq_len,
        shape_multiple=backend.get_shape_multiple(config.precision),
        precision=config.precision,
    )
    external = restored.adopted
    external_lines = (
        []
        if external is None
        else ["started from a checkpoint of another program", format_table(external.summary_rows)]
    )
    return "\n".join([start, format_table(rows, get_terminal_width(sys.stderr)), *external_lines, *hints])


def _count_epoch_samples(prepared: PreparedRun) -> int | None:
    """Return the number of samples in an epoch. None for a stream, because its length is unknown."""
    return None if prepared.data.stream_names else prepared.data.train.epoch_samples


def _describe_rank_change(prepared: PreparedRun, restored: RestoredRun) -> str | None:
    """Describe how the backend, strategy and number of ranks have changed since the checkpoint.

    Returns:
        Text for a cell of the table that describes the run. It contains the old and the new values,
        and the step of the checkpoint. None if nothing has changed, if the run does not resume from
        a checkpoint that this trainer wrote, or if this is not rank 0.
    """
    backend, source = prepared.backend, restored.source
    if source is None or restored.adopted is not None or backend.rank != 0:
        return None
    state = TrainerState.read(source)
    before = f"{state.backend} {state.strategy} x {state.world_size}"
    now = f"{backend.name} {prepared.config.strategy} x {backend.world_size}"
    return None if before == now else f"{before} → {now}, at step {state.step}"


def format_rank_count(ranks: int, devices_per_rank: int) -> str:
    """Format the number of ranks, such as ``8``, or ``2 x 4 devices`` if a rank drives several devices."""
    return str(ranks) if devices_per_rank == 1 else f"{ranks} x {devices_per_rank} devices"


def print_sample_text(prepared: PreparedRun, engine: Engine, reporter: RunReporter) -> None:
    """Print how the trained model continues a prompt. Must be called on all ranks.

    Prints nothing if ``model.task`` is not ``causal-lm``, if the model cannot generate text, if
    ``log.sample_tokens`` is 0, or if the prompt fills all positions of the model. If the model or
    the chat template fails, only prints a warning, because the run is complete without a sample.

    Args:
        prepared: The run.
        engine: Engine with the trained weights.
        reporter: Reporter. It prints only on rank 0.
    """
    config = prepared.config
    requested_tokens = config.log.sample_tokens
    model: Any = engine.model
    # A custom model may be unable to generate text.
    if requested_tokens <= 0 or config.model.task != "causal-lm" or not model.can_generate():
        return
    try:
        prompt = build_sample_prompt(prepared)
    except Exception as error:  # templates are not part of this program, and may raise anything
        reporter.print_on_rank0(
            f"warning: log.sample_prompt: the chat template cannot render the prompt ({to_one_line(error)}); "
            "change log.sample_prompt"
        )
        return
    max_positions = get_max_positions(prepared.model_config)
    length = prompt.tokens.shape[1]
    tokens = requested_tokens if max_positions is None else min(requested_tokens, max_positions - length)
    if tokens <= 0:
        return
    try:
        images = {"image_columns": prompt.image_columns} if prompt.image_columns else {}
        text = engine.generate(prompt.tokens, max_new_tokens=tokens, seed=config.seed, **images)
    except Exception as error:  # a custom model may raise anything
        reporter.print_on_rank0(
            f"warning: log.sample_tokens: the model cannot generate a sample ({to_one_line(error)}); to skip "
            "the sample, set log.sample_tokens: 0"
        )
        return
    continuation = decode(prepared.data.tokenizer, text[0, length:].tolist())
    reporter.print_on_rank0(
        f"\n--- prompt\n{_format_prompt(prompt, prepared.data.tokenizer)}\n--- the model "
        f"continues\n{continuation}\n---\n"
    )


class SamplePrompt(NamedTuple):
    """Prompt from which the model generates a sample text at the end of a run.

    Attributes:
        tokens: Token ids, int64 ``[1, length]``.
        images: Images whose tokens are in the prompt.
        image_columns: Additional model inputs for the images, keyed by name.
    """

    tokens: torch.Tensor
    images: tuple[CachedImage, ...] = ()
    image_columns: Batch = {}  # noqa: RUF012 (never modified)


def _format_prompt(prompt: SamplePrompt, tokenizer: Any) -> str:
    """Decode a prompt, and replace the tokens of each image with a short description."""
    ids: list[int] = prompt.tokens[0].tolist()
    text, start = "", 0
    for image in prompt.images:
        text += decode(tokenizer, ids[start : image.first_token]) + format_image(image)
        start = image.first_token + image.num_tokens
    return text + decode(tokenizer, ids[start:])


def build_sample_prompt(prepared: PreparedRun) -> SamplePrompt:
    """Build the prompt for the text that the trained model generates at the end of a run.

    The prompt is ``log.sample_prompt``. For a chat model, it is rendered as a user message. If the
    setting is None, the prompt is the beginning of an evaluation sample, or of a training sample if
    there is no evaluation data. A conversation is cut before its first answer, and its images are
    included. Other samples are cut after at most :data:`PROMPT_TOKENS` tokens.

    Args:
        prepared: The run.
    """
    data, prompt = prepared.data, prepared.config.log.sample_prompt
    if prompt is not None:
        if data.end_of_turn_token is not None and data.tokenizer.chat_template:
            from portable.data.tokens import limited_calls
            from portable.data.tokens.rendering import TemplateRenderer

            variables = {**data.tokenizer.special_tokens_map, **prepared.config.data.chat_template_kwargs}
            rendering = TemplateRenderer(data.tokenizer.chat_template, variables)
            text: str = limited_calls.call_within_limits(
                rendering.render_question, prompt, "log.sample_prompt"
            )
            chat: list[int] = encode_text(data.tokenizer, text, add_special_tokens=False)["input_ids"]
            return SamplePrompt(torch.tensor([chat], dtype=torch.int64))
        ids: list[int] = encode_text(data.tokenizer, prompt)["input_ids"]
        return SamplePrompt(torch.tensor([ids], dtype=torch.int64))
    samples = data.first_eval if data.first_eval is not None else data.train
    sample = samples.find_early_sample()
    batch = samples.build_batch([sample])
    if samples.sequences_per_sample > 1:
        batch = select_sequence_of_samples(batch, 0)
    if data.end_of_turn_token is not None:
        trained = (batch["labels"][0] != IGNORED_LABEL).int()
        tokens = batch["input_ids"][:, : int(trained.argmax()) + 1]
        return _add_images(tokens, samples, sample.sample_index)
    valid = int((batch["labels"] != IGNORED_LABEL).sum())
    return SamplePrompt(batch["input_ids"][:, : max(1, min(PROMPT_TOKENS, valid))])


def _add_images(tokens: torch.Tensor, samples: Samples, index: int) -> SamplePrompt:
    """Build a prompt from the first tokens of a sample, together with the images in these tokens.

    Args:
        tokens: First tokens of a sample, int64 ``[1, length]``.
        samples: Dataset with the sample.
        index: Index of the sample.
    """
    images = samples.read_prompt_images(index, tokens.shape[1])
    if not images or samples.image_processor is None:
        return SamplePrompt(tokens)
    columns = samples.image_processor.build_columns([file for _, file in images], tokens.numpy())
    return SamplePrompt(
        tokens,
        tuple(image for image, _ in images),
        {name: torch.from_numpy(values) for name, values in columns.items()},
    )


def _choose_export_checkpoint(run: Run, reporter: RunReporter) -> AnyPath | None:
    """Return the checkpoint to export, or None if there are no checkpoints.

    This is the best checkpoint if ``checkpoint.export_best`` is set and a best checkpoint still
    exists. Otherwise, it is the newest one. If ``checkpoint.export_best`` is set but no best
    checkpoint exists, a warning is printed.
    """
    complete = dict(run.checkpoints.list_complete())
    latest: AnyPath | None = run.checkpoints.find_latest()
    if not run.config.checkpoint.export_best:
        return latest
    best: AnyPath | None = next(
        (complete[step] for step, _ in run.progress.eval_history.best if step in complete), None
    )
    if best is None:
        reporter.print_on_rank0(
            "warning: checkpoint.export_best: no best checkpoint is left, so final/ contains the newest "
            "checkpoint"
        )
    return best or latest


def finish_run(
    run: Run,
    output: RunOutput,
    reporter: RunReporter,
    profiler: Profiler | None,
    uploads: HubUploadCallback | None,
    *,
    num_library_warnings: int,
) -> None:
    """Export the model if the run is complete, finish the uploads, and print a summary.

    The model is exported only if ``checkpoint.export`` is set. The summary refers to the report if
    it exists, but this function does not write the report. Must be called on all ranks. If the
    export contains more than an adapter, the first rank of each node that can read the checkpoint
    writes a part of it. Rank 0 does everything else. If ``uploads`` is given, rank 0 finally
    deletes the old checkpoints that were kept for their upload.

    Args:
        run: The run.
        output: Output of the run.
        reporter: Reporter, which prints the summary.
        profiler: Profiler, or None if this launch is not profiled.
        uploads: Uploads to the hub, or None if ``hub.push`` is not set.
        num_library_warnings: Number of warnings that libraries wrote to the run's log.

    Raises:
        NotExportedError: If the run is complete but the model cannot be exported. Raised on
            rank 0, and on the other writing ranks if a process of their group was lost. The
            next launch exports the model.
        RunError: If the object store is unavailable during the export.
        ReportedElsewhereError: On writing ranks other than rank 0, if the export fails for
            another reason.
    """
    prepared, folder, place = run.prepared, output.work_folder, output.place
    checkpoint_to_export = _choose_export_checkpoint(run, reporter) if run.rank == 0 else None
    writers: NodeWriters | None = None
    if run.is_complete and _may_have_several_export_files(prepared):
        checkpoint_to_export, writers = _agree_on_export_work(run, checkpoint_to_export)  # a collective
    if run.rank != 0:
        if checkpoint_to_export is not None and writers is not None:
            _write_export_part(run, output, checkpoint_to_export, writers)
        return
    checkpoint = run.checkpoints.find_latest()
    summary_rows = [("metrics", str(place / METRICS_FILE))]
    if checkpoint is not None:
        summary_rows.append(("checkpoint", str(checkpoint)))
    final: AnyPath | None = None
    if run.is_complete and prepared.config.checkpoint.export and checkpoint_to_export is not None:
        final = place / FINAL_FOLDER
        try:
            export_with_card(prepared, folder, checkpoint_to_export, final, writers)
        except (UserError, RunError) as error:
            raise NotExportedError(
                f"{to_one_line(error)}; training is complete, and only the export failed; fix the problem, "
                "then run the same command again to export the model"
            ) from error
        for note in _build_untrained_notes(*_list_untrained_tensors(prepared)):
            reporter.print_on_rank0(note)
        if prepared.adapter is None and (skipped := prepared.published_names.skipped_base_files):
            files = ", ".join(f"{name} ({reason})" for name, reason in skipped.items())
            reporter.print_on_rank0(f"note: these files of the base model were not copied: {files}")
        is_best = checkpoint_to_export != checkpoint
        origin = f", from the best checkpoint, {checkpoint_to_export.name}" if is_best else ""
        summary_rows.append(("model", f"{final}{origin}"))
    if (folder / REPORT_FILE).exists():
        summary_rows.append(("report", str(place / REPORT_FILE)))
    if profiler is not None:
        trace = str(place / profiler.trace_path.relative_to(folder).as_posix())
        summary_rows.append(
            ("profile", trace if profiler.has_written_trace else "not written: too few steps")
        )
    upload_problems: list[str] = []
    if uploads is not None:
        url, upload_problems = uploads.finish_uploads(final, checkpoint_to_export)
        summary_rows += [] if url is None else [("uploaded to", url)]
    warnings_text = (
        f", with {format_count(num_library_warnings, 'library warning')}" if num_library_warnings else ""
    )
    summary_rows.append(("log", f"{place / LOG_FILE}{warnings_text}"))
    reporter.print_on_rank0(reporter.format_launch_summary(summary_rows))
    if final is not None:
        command_rows = list_usage_commands(
            prepared.config,
            str(final),
            prepared.model_config.model_type,
            prepared.architecture,
            adapter=prepared.adapter,
            is_chat_model=_is_chat_model(prepared),
        )
        reporter.print_on_rank0("\n" + format_table(command_rows))
    for line in upload_problems:
        reporter.print_on_rank0(f"warning: {line}")
    if not run.is_complete:
        reporter.print_on_rank0(
            f"stopped at step {run.step} of {prepared.steps}, as train.stop_after requires"
        )
    if uploads is not None:  # old checkpoints were kept until their upload ended
        run.checkpoints.delete_old_checkpoints({step for step, _ in run.progress.eval_history.best})


def _may_have_several_export_files(prepared: PreparedRun) -> bool:
    """Return whether the export may have several files, which several nodes can write together.

    False if nothing is exported, or only an adapter, which is a single file.
    """
    export = prepared.config.checkpoint.export
    return bool(export) and (prepared.adapter is None or export in ("merged", "like_base"))


class ExportWork(NamedTuple):
    """Checkpoint to export as the final model, and the ranks that write the exported files."""

    checkpoint: AnyPath | None
    """Checkpoint to export. None if the run has none."""
    writers: NodeWriters | None
    """Group of the ranks that write the model together. None if this rank does not write."""


def _agree_on_export_work(run: Run, checkpoint_to_export: AnyPath | None) -> ExportWork:
    """Agree on the checkpoint to export, and on the ranks that write the exported model.

    Rank 0 broadcasts the checkpoint. This function is a collective call.

    Args:
        run: The run.
        checkpoint_to_export: Checkpoint to export. None if there is none. Only the value on rank 0
            is used.

    Returns:
        The checkpoint that rank 0 has chosen, and the group of writers. The group is None if this
        rank does not write. Both are None if rank 0 has chosen no checkpoint.
    """
    name = gather_text("" if checkpoint_to_export is None else checkpoint_to_export.name)[0]
    if not name:
        return ExportWork(None, None)
    checkpoint: AnyPath = run.checkpoints.path / name
    return ExportWork(checkpoint, choose_node_writers(lambda: (checkpoint / STATE_FILE).is_file()))


def _write_export_part(run: Run, output: RunOutput, checkpoint: AnyPath, writers: NodeWriters) -> None:
    """Write this node's part of the final model.

    One rank writes on each node that can read the checkpoint, and these ranks form the group
    ``writers``. This function is called on all of them except rank 0.

    Raises:
        NotExportedError: If the export fails because a process of the group was lost.
        ReportedElsewhereError: If the export fails for another reason, which rank 0 reports.
    """
    try:
        export_with_card(run.prepared, output.work_folder, checkpoint, output.place / FINAL_FOLDER, writers)
    except (UserError, RunError) as error:
        if writers.has_lost_a_process:
            raise NotExportedError(to_one_line(error)) from error
        raise ReportedElsewhereError(to_one_line(error), NOT_EXPORTED) from error


def _is_chat_model(prepared: PreparedRun) -> bool:
    """Return whether the model was trained on conversations with a chat template."""
    return prepared.data.end_of_turn_token is not None and bool(prepared.data.tokenizer.chat_template)


class UntrainedTensors(NamedTuple):
    """Names of the base model's tensors that transformers does not load.

    The export copies the tensors in ``copied`` from the base model. It omits the tensors in
    ``missing``, because the base model is not available. In ``copied``, names that differ only in
    their layer numbers are listed once. For example, ``layers.*.weight (12)`` is the entry for 12
    tensors.
    """

    copied: list[str]
    """Tensors that the export copies from the base model."""
    missing: list[str]
    """Tensors that the export lacks."""


def _list_untrained_tensors(prepared: PreparedRun) -> UntrainedTensors:
    """List the base model's tensors that transformers does not load.

    Empty if the run trains an adapter.
    """
    if prepared.adapter is not None:
        return UntrainedTensors([], [])
    return UntrainedTensors(
        collapse_layer_numbers(prepared.published_names.unloaded_base_names),
        prepared.published_names.unavailable_base_names,
    )


def _build_untrained_notes(copied: list[str], missing: list[str]) -> list[str]:
    """Build notes for the user about the base model's tensors that transformers does not load.

    Args:
        copied: Tensors that the export copies unchanged from the base model.
        missing: Tensors that the export lacks, because the base model is not available.

    Returns:
        One note for each list that is not empty, so at most two notes.
    """
    notes = []
    if copied:
        notes.append(
            "note: these tensors were copied from the base model without training, because transformers "
            f"does not load them: {', '.join(copied)}"
        )
    if missing:
        notes.append(
            f"warning: checkpoint.export: the base model is not available, so {FINAL_FOLDER}/ lacks these "
            f"tensors, which transformers does not load: {', '.join(missing)}"
        )
    return notes


def _build_export_card(prepared: PreparedRun, metrics_folder: Path, checkpoint: AnyPath) -> str:
    """Build the text of an export's model card. See :func:`export_with_card` for the arguments.

    The card shows the metrics up to the step of the checkpoint.
    """
    last = parse_checkpoint_step(checkpoint.name)
    copied, missing = _list_untrained_tensors(prepared)
    dropped = (
        []
        if prepared.adapter is not None
        else collapse_layer_numbers(prepared.published_names.dropped_base_names)
    )
    rows = [row for row in read_metrics(metrics_folder) if last is None or row["step"] <= last]
    return build_model_card(
        prepared.config,
        adapter=prepared.adapter,
        architecture=prepared.architecture,
        model_type=prepared.model_config.model_type,
        data_description=prepared.data.description,
        metrics=rows,
        copied_names=copied,
        missing_names=[*missing, *dropped],
        is_chat_model=_is_chat_model(prepared),
    )


def export_with_card(
    prepared: PreparedRun,
    metrics_folder: Path,
    checkpoint: AnyPath,
    out: AnyPath,
    writers: NodeWriters | None = None,
) -> None:
    """Export the model or the adapter of a checkpoint, together with a model card.

    If ``checkpoint.export`` is ``merged`` or ``like_base``, an adapter is merged into the base
    model. If ``writers`` is given, all ranks of this group must call the function.

    Args:
        prepared: The run.
        metrics_folder: Folder with ``metrics.jsonl``.
        checkpoint: Checkpoint of the run.
        out: Folder or URL to write to.
        writers: Group of the ranks that write the export together. None if this rank writes
            everything.

    Raises:
        UserError: If the checkpoint cannot be exported.
        RunError: If the object store is unavailable.
    """
    adapter, config = prepared.adapter, prepared.config
    # Only rank 0 writes the small files, and in a bucket only rank 0 has the metrics.
    text = (
        _build_export_card(prepared, metrics_folder, checkpoint)
        if writers is None or writers.number == 0
        else ""
    )
    with create_scratch_folder("portable-card") as temporary:
        card = temporary / MODEL_CARD_FILE
        card.write_text(text, "utf-8")
        extra_files = {MODEL_CARD_FILE: card}
        merges = config.checkpoint.export in ("merged", "like_base")
        base = adapter.base_checkpoint if adapter is not None and merges else None
        like = None
        if config.checkpoint.export == "like_base":
            from portable.model.pretrained import open_quantized_base

            like = open_quantized_base(config.model)
        if base is not None:  # the base model's config lacks this run's labels and special tokens
            prepared.model_config.save_pretrained(temporary)
            extra_files["config.json"] = temporary / "config.json"
        export_model(
            checkpoint,
            out,
            is_adapter=adapter is not None,
            base=base,
            quantized_like=like,
            extra_files=extra_files,
            uses_average=config.checkpoint.export_ema,
            rename_to_published=prepared.published_names.convert_to_published if adapter is None else None,
            group=writers,
        )
