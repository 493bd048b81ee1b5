"""The last stage: export the model, write the report, upload, and print a summary.

Also the summary at the start.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.batch import IGNORED
from portable.batch_plan import describe_padding
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState, parse_step
from portable.converters.console import get_terminal_width
from portable.data.samples.base import select_sequence
from portable.data.tokens.bounded_tokenizer import decode, encode
from portable.errors import NOT_EXPORTED, NotExportedError, ReportedElsewhereError, UserError, to_one_line
from portable.formatting import format_bytes, format_count, format_table, format_time
from portable.model.build import get_max_positions
from portable.model.flops import build_shape_hints, format_parameter_counts
from portable.model.published_names import collapse_numbers
from portable.output.export import export
from portable.paths import FINAL, REPORT_FILE
from portable.ranks.collectives import gather_text
from portable.ranks.node_writers import form_node_writers
from portable.reporting.metrics import METRICS_FILE, read_metrics
from portable.reporting.model_card import CARD, build_model_card, list_commands
from portable.reporting.run_log import LOG_FILE
from portable.run.length import describe_length
from portable.temporary_folder import create_scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

    from portable.backend import Engine
    from portable.callbacks import Run
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import Place
    from portable.output.output_dir import Output
    from portable.ranks.node_writers import NodeWriters
    from portable.reporting.profiling import Profiler
    from portable.reporting.reporter import Reporter
    from portable.run.stages import Prepared, Restored
    from portable.run.uploads import Uploads

PROMPT_TOKENS = 32
EXPORTED_BYTES = 4
"""Bytes of a parameter in the final model, which is in fp32 unless the base model's layout is written."""


LARGE_EXPORT = 50e9
"""Size of a final model from which the start of the run states what its export costs, in bytes."""
_EXPORT_RATE = 1e9
"""Assumed rate at which a node reads a checkpoint and writes the final model, in bytes per second."""


def build_export_rows(
    config: RunConfig, model_bytes: int, ranks: int, ranks_per_node: int
) -> list[tuple[str, str]]:
    """Describe the cost of exporting a large final model.

    Args:
        config: The run's config.
        model_bytes: Size of the final model in bytes.
        ranks: Number of ranks.
        ranks_per_node: Number of ranks per node.

    Returns:
        At most one row of a table. Empty if the export is off or takes less than a minute.
    """
    if not config.checkpoint.export or model_bytes < LARGE_EXPORT:
        return []
    nodes = -(-ranks // ranks_per_node)
    seconds = model_bytes / nodes / _EXPORT_RATE
    written = format_count(nodes, "node")
    return [
        (
            "export",
            f"{format_bytes(model_bytes)} of {FINAL}/ are written by {written} when training ends, in "
            f"{format_time(seconds)} at 1 GB/s a node ({ranks * seconds / 3600:.1f} idle device hours); "
            "checkpoint.export: false leaves it to portable-convert RUN OUT",
        )
    ]


def format_headline(prepared: Prepared, restored: Restored) -> str:
    """Format the table that is printed at the start of a launch: model, data, ranks, batch, and steps.

    Args:
        prepared: The run.
        restored: The engine, and the position at which the run starts.
    """
    backend, config, plan = prepared.backend, prepared.config, prepared.plan
    progress, source = restored.progress, restored.source
    start = f"resuming at step {progress.step} from {source}" if source else "starting"
    if progress.step >= prepared.steps:
        start += ", which was the last: there is nothing left to train"
    auto = " (auto)" if prepared.resolved.config.train.micro_batch_size == "auto" else ""
    rows = [
        (
            "model",
            f"{prepared.architecture}, {format_parameter_counts(prepared.parameters, prepared.trained)}",
        ),
        *([("frozen", prepared.frozen)] if prepared.frozen else []),
        ("data", prepared.data.description),
        (
            "ranks",
            f"{describe_ranks(backend.world_size, backend.devices_per_rank)} on {backend.device.type}, "
            f"{config.strategy}, {config.precision}",
        ),
        (
            "batch",
            f"{plan.global_batch_size} sequences of {config.data.seq_len} tokens a step; on each rank "
            f"{format_count(plan.accumulation_steps, 'accumulation step')} x "
            f"{format_count(plan.micro_batch_size, 'sequence')}{auto}{describe_padding(plan)}",
        ),
    ]
    rows.append(("steps", describe_length(config, prepared.steps, _count_samples(prepared))))
    if _has_partial_export(prepared):
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rows += build_export_rows(
            config, EXPORTED_BYTES * prepared.parameters, backend.world_size, ranks_per_node
        )
    if (moved := _describe_move(prepared, restored)) is not None:
        rows.append(("moved", moved))
    rows.append(("report", f"{prepared.resolved.place / REPORT_FILE}, updated at evaluations and saves"))
    if restored.changes:
        rows.append(("changed", "; ".join(change.arrow for change in restored.changes)))
    hints = build_shape_hints(
        prepared.model_config,
        tokens=plan.micro_batch_size * config.data.seq_len,
        multiple=backend.get_shape_multiple(config.precision),
        precision=config.precision,
    )
    external = restored.external
    begun = [] if external is None else ["begun at another program's checkpoint", format_table(external.rows)]
    return "\n".join([start, format_table(rows, get_terminal_width(sys.stderr)), *begun, *hints])


def _count_samples(prepared: Prepared) -> int | None:
    """Return the samples of one epoch. None for streams, whose length is not known."""
    return None if prepared.data.streams else prepared.data.train.epoch_samples


def _describe_move(prepared: Prepared, restored: Restored) -> str | None:
    """Describe the change of backend, strategy and ranks since the checkpoint.

    Returns:
        The text of a table cell. None if nothing has changed, and on all ranks except rank 0.
    """
    backend, source = prepared.backend, restored.source
    if source is None or restored.external is not None or backend.rank != 0:
        return None
    state = TrainerState.read(source)
    before = f"{state.backend} {state.strategy} x {state.world_size}"
    now = f"{backend.name} {prepared.config.strategy} x {backend.world_size}"
    return None if before == now else f"{before} → {now}, at step {state.step}"


def describe_ranks(ranks: int, devices_per_rank: int) -> str:
    """Format the number of ranks, with the devices of each if a rank drives several."""
    return str(ranks) if devices_per_rank == 1 else f"{ranks} x {devices_per_rank} devices"


def sample(prepared: Prepared, engine: Engine, reporter: Reporter) -> None:
    """Print how the trained model continues a prompt. Must be called on all ranks.

    Prints only a warning if the model or the chat template fails, because the run is complete without a
    sample.
    """
    config = prepared.config
    try:
        prompt = build_sample_prompt(prepared)
    except Exception as error:  # the template is foreign code; the run is complete without a sample
        reporter.say(f"warning: log.sample_prompt: the chat template cannot ask it: {to_one_line(error)}")
        return
    bound = get_max_positions(prepared.model_config)
    wanted = config.log.sample_tokens
    tokens = wanted if bound is None else min(wanted, bound - prompt.shape[1])
    model: Any = engine.model
    if tokens <= 0 or config.model.task != "causal-lm" or not model.can_generate():  # a custom model
        return
    try:
        text = engine.generate(prompt, max_new_tokens=tokens, seed=config.seed)
    except Exception as error:  # of a custom model; the run is complete without a sample
        reporter.say(f"warning: log.sample_tokens: the model cannot generate a text: {to_one_line(error)}")
        return
    start, rest = text[0, : prompt.shape[1]], text[0, prompt.shape[1] :]
    show = partial(decode, prepared.data.tokenizer)
    reporter.say(f"\n--- prompt\n{show(start.tolist())}\n--- the model goes on\n{show(rest.tolist())}\n---\n")


def build_sample_prompt(prepared: Prepared) -> torch.Tensor:
    """Build the prompt for the sample at the end of a run.

    The prompt is ``log.sample_prompt`` if it is set, and otherwise the beginning of an evaluation or training
    sample. A chat model gets the prompt as a user message, and a conversation is cut before the first answer.

    Args:
        prepared: The run.

    Returns:
        Token ids, an int64 tensor of shape ``[1, length]``.
    """
    data, prompt = prepared.data, prepared.config.log.sample_prompt
    if prompt is not None:
        if data.end_of_turn is not None and data.tokenizer.chat_template:
            from portable.data.tokens import limited_calls
            from portable.data.tokens.rendering import TemplateRenderer

            variables = {**data.tokenizer.special_tokens_map, **prepared.config.data.chat_template_kwargs}
            rendering = TemplateRenderer(data.tokenizer.chat_template, variables)
            text: str = limited_calls.call(rendering.render_question, prompt, "log.sample_prompt")
            chat: list[int] = encode(data.tokenizer, text, add_special_tokens=False)["input_ids"]
            return torch.tensor([chat], dtype=torch.int64)
        ids: list[int] = encode(data.tokenizer, prompt)["input_ids"]
        return torch.tensor([ids], dtype=torch.int64)
    samples = data.eval if data.eval is not None else data.train
    batch = samples.build_batch([samples.find_example()])
    if samples.sequences > 1:
        batch = select_sequence(batch, 0)
    if data.end_of_turn is not None:
        trained = (batch["labels"][0] != IGNORED).int()
        return batch["input_ids"][:, : int(trained.argmax()) + 1]
    valid = int((batch["labels"] != IGNORED).sum())
    return batch["input_ids"][:, : max(1, min(PROMPT_TOKENS, valid))]


def _choose_export_checkpoint(run: Run, reporter: Reporter) -> Place | None:
    """Return the newest checkpoint, or the best one if ``checkpoint.export_best`` is set.

    None if there is none.
    """
    complete = dict(run.checkpoints.list_complete())
    latest: Place | None = run.checkpoints.find_latest()
    if not run.config.checkpoint.export_best:
        return latest
    best: Place | None = next(
        (complete[step] for step, _ in run.progress.eval_history.best if step in complete), None
    )
    if best is None:
        reporter.say("warning: checkpoint.export_best: no best checkpoint is left; final is from the newest")
    return best or latest


def finish(
    run: Run,
    output: Output,
    reporter: Reporter,
    profiler: Profiler | None,
    uploads: Uploads | None,
    *,
    warnings: int,
) -> None:
    """Export the model, write the report, upload both, and print a summary.

    Must be called on all ranks. The first rank of each node writes a part of the model. Rank 0 does
    everything else.

    Args:
        run: The run.
        output: Output of the run.
        reporter: Reporter, which prints the summary.
        profiler: Profiler, or None if this launch is not profiled.
        uploads: Uploads to the hub, or None if ``hub.push`` is not set.
        warnings: Number of warnings of libraries in the run's log.

    Raises:
        NotExportedError: If the run is complete but the model cannot be exported. The next launch exports it.
        ReportedElsewhereError: On ranks other than rank 0, if the export fails.
    """
    prepared, folder, place = run.prepared, output.work, output.place
    exported = _choose_export_checkpoint(run, reporter) if run.rank == 0 else None
    writers: NodeWriters | None = None
    if run.complete and _has_partial_export(prepared):
        exported, writers = _form_writers(run, exported)  # a collective
    if run.rank != 0:
        if exported is not None and writers is not None:
            _export_part(run, output, exported, writers)
        return
    checkpoint = run.checkpoints.find_latest()
    places = [("metrics", str(place / METRICS_FILE))]
    if checkpoint is not None:
        places.append(("checkpoint", str(checkpoint)))
    final: Place | None = None
    if run.complete and prepared.config.checkpoint.export and exported is not None:
        final = place / FINAL
        try:
            export_with_card(prepared, folder, exported, final, writers)
        except UserError as error:
            raise NotExportedError(
                f"{to_one_line(error)}; the run is complete: run the same command again to export the model"
            ) from error
        for note in _build_untrained_notes(*_list_untrained(prepared)):
            reporter.say(note)
        if prepared.adapter is None and (skipped := prepared.names.skipped_files):
            files = ", ".join(f"{name} ({reason})" for name, reason in skipped.items())
            reporter.say(f"note: these files of the base model were not copied: {files}")
        origin = "" if exported == checkpoint else f", from {exported.name}, the best"
        places.append(("model", f"{final}{origin}"))
    if (folder / REPORT_FILE).exists():
        places.append(("report", str(place / REPORT_FILE)))
    if profiler is not None:
        trace = str(place / profiler.path.relative_to(folder).as_posix())
        places.append(("profile", trace if profiler.written else "too few steps for one"))
    missing: list[str] = []
    if uploads is not None:
        url, missing = uploads.finish(final, exported)
        places += [] if url is None else [("uploaded to", url)]
    aside = f", with {format_count(warnings, 'warning')} of libraries" if warnings else ""
    places.append(("log", f"{place / LOG_FILE}{aside}"))
    reporter.say(reporter.format_summary(places))
    if final is not None:
        uses = list_commands(
            prepared.config,
            str(final),
            prepared.model_config.model_type,
            prepared.architecture,
            adapter=prepared.adapter,
            chat=_is_chat_model(prepared),
        )
        reporter.say("\n" + format_table(uses))
    for line in missing:
        reporter.say(f"warning: {line}")
    if not run.complete:
        reporter.say(f"stopped at step {run.step} of {prepared.steps}, as train.stop_after says")
    if uploads is not None:  # old checkpoints were kept until their upload ended
        run.checkpoints.prune({step for step, _ in run.progress.eval_history.best})


def _has_partial_export(prepared: Prepared) -> bool:
    """Return whether the export may have several files. An adapter always has one."""
    export = prepared.config.checkpoint.export
    return bool(export) and (prepared.adapter is None or export in ("merged", "like_base"))


class ExportWork(NamedTuple):
    """Part of this rank in the export of the final model."""

    checkpoint: Place | None
    """Checkpoint to export. None if the run has none."""
    writers: NodeWriters | None
    """Group of the ranks that write the model together. None if this rank does not write."""


def _form_writers(run: Run, exported: Place | None) -> ExportWork:
    """Send the choice of rank 0 to all ranks, and choose the ranks that write the model. A collective call.

    Args:
        run: The run.
        exported: Checkpoint to export on rank 0. Ignored on the other ranks.

    Returns:
        The checkpoint and the writers. Both are None if rank 0 has no checkpoint.
    """
    name = gather_text("" if exported is None else exported.name)[0]
    if not name:
        return ExportWork(None, None)
    checkpoint: Place = run.checkpoints.path / name
    return ExportWork(checkpoint, form_node_writers(lambda: (checkpoint / STATE_FILE).is_file()))


def _export_part(run: Run, output: Output, checkpoint: Place, writers: NodeWriters) -> None:
    """Write this node's part of the final model. Called on the writers except rank 0."""
    try:
        export_with_card(run.prepared, output.work, checkpoint, output.place / FINAL, writers)
    except UserError as error:
        if writers.broken:
            raise NotExportedError(to_one_line(error)) from error
        raise ReportedElsewhereError(to_one_line(error), NOT_EXPORTED) from error


def _is_chat_model(prepared: Prepared) -> bool:
    """Return whether the model was trained on conversations in its tokenizer's chat template."""
    return prepared.data.end_of_turn is not None and bool(prepared.data.tokenizer.chat_template)


class UntrainedTensors(NamedTuple):
    """Names of the base model's tensors that transformers does not load. Numbers are replaced with ``*``."""

    copied: list[str]
    """Tensors that the export copies from the base model."""
    missing: list[str]
    """Tensors that the export lacks."""


def _list_untrained(prepared: Prepared) -> UntrainedTensors:
    """List the tensors of the base model that transformers does not load.

    Empty if the run trains an adapter.
    """
    if prepared.adapter is not None:
        return UntrainedTensors([], [])
    return UntrainedTensors(collapse_numbers(prepared.names.not_loaded), prepared.names.missing)


def _build_untrained_notes(copied: list[str], missing: list[str]) -> list[str]:
    """Build the notes about the tensors from :func:`_list_untrained`."""
    notes = []
    if copied:
        notes.append(
            "note: these tensors were copied from the base model without training, because transformers "
            f"does not load them: {', '.join(copied)}"
        )
    if missing:
        notes.append(
            f"warning: checkpoint.export: the base model is not available, so {FINAL} lacks tensors that "
            f"transformers does not load: {', '.join(missing)}"
        )
    return notes


def _build_card(prepared: Prepared, folder: Path, checkpoint: Place) -> str:
    """Build the text of the model card of an export; see :func:`export_with_card`."""
    last = parse_step(checkpoint.name)
    copied, missing = _list_untrained(prepared)
    dropped = [] if prepared.adapter is not None else collapse_numbers(prepared.names.dropped)
    rows = [row for row in read_metrics(folder) if last is None or row["step"] <= last]
    return build_model_card(
        prepared.config,
        adapter=prepared.adapter,
        architecture=prepared.architecture,
        model_type=prepared.model_config.model_type,
        data=prepared.data.description,
        metrics=rows,
        copied=copied,
        missing=[*missing, *dropped],
        chat=_is_chat_model(prepared),
    )


def export_with_card(
    prepared: Prepared, folder: Path, checkpoint: Place, out: Place, writers: NodeWriters | None = None
) -> None:
    """Write the model of a checkpoint, or its adapter, with a model card.

    Args:
        prepared: The run.
        folder: Folder with ``metrics.jsonl``.
        checkpoint: Checkpoint of the run.
        out: Folder or URL to write to.
        writers: Group of the ranks that write the export together. None if this rank writes everything.

    Raises:
        UserError: If the checkpoint cannot be exported.
    """
    adapter, config = prepared.adapter, prepared.config
    # Only rank 0 writes the small files, and in a bucket only rank 0 has the metrics.
    text = _build_card(prepared, folder, checkpoint) if writers is None or writers.number == 0 else ""
    with create_scratch_folder("portable-card") as temporary:
        card = temporary / CARD
        card.write_text(text, "utf-8")
        beside = {CARD: card}
        merges = config.checkpoint.export in ("merged", "like_base")
        base = adapter.base if adapter is not None and merges else None
        like = None
        if config.checkpoint.export == "like_base":
            from portable.model.pretrained import open_export_layout

            like = open_export_layout(config.model)
        if base is not None:  # the base model's config lacks this run's labels and special tokens
            prepared.model_config.save_pretrained(temporary)
            beside["config.json"] = temporary / "config.json"
        export(
            checkpoint,
            out,
            adapter=adapter is not None,
            base=base,
            like=like,
            beside=beside,
            average=config.checkpoint.export_ema,
            publish=prepared.names.publish if adapter is None else None,
            group=writers,
        )
