"""``portable-train --dry-run``: print the resolved config and a summary of the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from portable.adapters.assemble import inspect_run
from portable.batch_plan import compute_total_steps, describe_padding
from portable.checkpoint.external import open_external_for_model, read_run_state
from portable.checkpoint.resume_external import adopt_external_checkpoint
from portable.checkpoint.store import choose_resume_source, open_checkpoints
from portable.config import dump_yaml, find_changes
from portable.config.derived_defaults import classify_training_kind, compute_training_kind_defaults
from portable.config.sources import list_evaluation_source_names
from portable.converters.console import get_terminal_width, print_line
from portable.engines.transforms import describe_transforms
from portable.errors import UserError
from portable.evaluation.builtin_metrics import MetricSettings, build_metrics
from portable.formatting import format_bytes, format_count, format_table
from portable.model.flops import (
    build_shape_hints,
    count_parameters,
    count_trained_parameters,
    format_parameter_counts,
)
from portable.model.pretrained import load_pretrained_weights
from portable.optim.schedule import build_schedule, explain_long_warmup
from portable.planner.image_columns import build_largest_image_columns
from portable.planner.memory_model import StrategySetting as Strategy
from portable.planner.plan_tables import Plan, build_time_rows
from portable.planner.run_time import estimate_training_work
from portable.planner.this_machine import build_memory_table_rows, build_planner_for_backend
from portable.registry import create_backend
from portable.run.custom_callbacks import list_callback_names
from portable.run.evaluation import build_best_tracker
from portable.run.finish import EXPORTED_BYTES, build_export_cost_rows, format_rank_count
from portable.run.length import SEQ_LEN_KEY, describe_warmup, format_run_length
from portable.run.prepare import build_start_notes
from portable.run.resolve import plan_batches_of_rank_0, resolve_precision
from portable.terminal import print_status

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from portable.adapters.adapter import Adapter
    from portable.adapters.assemble import AssembledModel
    from portable.backend import Backend
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.sizes import DataSizes
    from portable.run.stages import ResolvedRun

_CLASSIFICATION_TASKS = ("sequence-classification",)


def print_dry_run(resolved: ResolvedRun) -> int:
    """Print the resolved config, the origins of its settings, and a summary of the run.

    Writes no files to ``output_dir``, and neither downloads nor tokenizes the data. The config of a
    Hub model may be downloaded.

    Args:
        resolved: The resolved run.

    Returns:
        Exit code 0.

    Raises:
        UserError: If a setting is not valid for the run.
    """
    backend = create_backend(resolved.config.backend)
    resolved = resolve_precision(resolved)
    config = resolved.config
    assembled, data = inspect_run(config)
    model = assembled.model
    # The metrics of a classifier depend on the labels in the data.
    if config.model.task not in _CLASSIFICATION_TASKS:
        user_loss = config.train.loss is not None
        setting = MetricSettings(config.model.task, tokenizer=data.tokenizer_object, user_loss=user_loss)
        build_best_tracker(
            config, list_evaluation_source_names(config.data), build_metrics(config.train.metrics, setting)
        )
    plan = plan_batches_of_rank_0(config, resolved.world)
    image_columns = build_largest_image_columns(config, data)
    planner = build_planner_for_backend(config, model, backend, resolved.world.ranks, image_columns)
    rows = _build_run_rows(resolved, model, assembled.adapter, data, plan)
    rows.append(("a checkpoint", format_bytes(planner.model.compute_checkpoint_bytes(config.train))))
    if assembled.adapter is None or config.checkpoint.export in ("merged", "like_base"):
        model_bytes = EXPORTED_BYTES * count_parameters(model)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(resolved.world.ranks)))
        rows += build_export_cost_rows(config, model_bytes, resolved.world.ranks, ranks_per_node)
    rows += build_memory_table_rows(planner)
    option = planner.build_option(Strategy.from_config(planner.config))
    rows += build_time_rows(Plan(planner, [option], option, work=estimate_training_work(config, data)))
    for line in _collect_notes(resolved, backend, assembled, data, plan):
        print_status(line)
    print_line("# The config with every setting")
    print_line(dump_yaml(config))
    print_line("# Where settings were set; all other settings are defaults or derived from these")
    print_line(format_table([*config.came_from.items(), *_build_default_rows(resolved)]) + "\n")
    print_line("# What this run will do")
    print_line(format_table(rows, get_terminal_width(sys.stdout)))
    return 0


def _build_default_rows(resolved: ResolvedRun) -> list[tuple[str, str]]:
    """Build table rows for settings that are inherited or have a default for the kind of training.

    A setting is inherited if its value comes from the existing run in the output folder. The kind
    of training, such as pretraining or fine-tuning, determines the defaults of some other settings.

    Returns:
        Pairs of a setting's dotted key and the origin of its value.
    """
    config, kind = resolved.config, classify_training_kind(resolved.config)
    rows = [(key, f"the run in {resolved.output_place}") for key in resolved.inherited_settings]
    defaults = [
        key for key, value in compute_training_kind_defaults(config).items() if config.get(key) == value
    ]
    if config.is_set_or_put(SEQ_LEN_KEY) and not config.is_set(SEQ_LEN_KEY):
        defaults.append(SEQ_LEN_KEY)
    return [
        *rows,
        *((key, f"default for {kind}") for key in defaults if key not in resolved.inherited_settings),
    ]


def _collect_notes(
    resolved: ResolvedRun,
    backend: Backend,
    assembled: AssembledModel,
    data: DataSizes,
    plan: BatchPlan,
) -> list[str]:
    """Return the notes that a run prints before its first step.

    Notes that require a download are omitted. Notes about the pretrained weights are included only
    if ``model.name_or_path`` is a local folder. They are omitted for classifiers, because the size
    of a classifier's head depends on the labels in the data.

    Args:
        resolved: The resolved run.
        backend: Backend of the run.
        assembled: Model on the meta device, with its adapter.
        data: Sizes of the data.
        plan: Batch plan of rank 0.
    """
    config, adapter = resolved.config, assembled.adapter
    weight_notes: list[str] = []
    model = assembled.model if adapter is None else adapter.blueprint.model
    name = config.model.name_or_path
    # Skip classifiers, because the size of a classifier's head depends on the labels in the data, which are
    # not counted yet.
    is_sized = config.model.task not in _CLASSIFICATION_TASKS
    if is_sized and name is not None and not config.model.from_scratch and Path(name).is_dir():
        weight_notes = load_pretrained_weights(config.model, model, assembled.grown_from).build_notes()
    is_micro_batch_searched = config.train.micro_batch_size == "auto"  # if so, the size is not known yet
    hints = build_shape_hints(
        model.config,
        micro_batch_tokens=0 if is_micro_batch_searched else plan.micro_batch_size * config.data.seq_len,
        shape_multiple=backend.get_shape_multiple(config.precision),
        precision=config.precision,
    )
    return [*build_start_notes(resolved, assembled, model.config, data), *weight_notes, *hints]


def _build_run_rows(
    resolved: ResolvedRun, model: PreTrainedModel, adapter: Adapter | None, data: DataSizes, plan: BatchPlan
) -> list[tuple[str, str]]:
    """Build the rows of the table that describes a run.

    The rows describe the model, the data, the ranks, the batch, the steps and the checkpoint.

    Args:
        resolved: The resolved run.
        model: Model on the meta device.
        adapter: Adapter of the model, or None.
        data: Sizes of the data.
        plan: Batch plan of rank 0.

    Returns:
        Pairs of a label and a value.

    Raises:
        UserError: If the warmup is longer than the run, if ``checkpoint.resume`` is not valid for
            this run, or if the run cannot resume from the checkpoint of another program.
    """
    config, world = resolved.config, resolved.world
    devices = format_rank_count(world.ranks, world.devices_per_rank)
    steps = config.train.steps
    if config.train.epochs is not None:
        steps = None if data.train_samples is None else compute_total_steps(config, data.train_samples)
    if steps is not None and (reason := explain_long_warmup(config.train, steps)) is not None:
        raise UserError(reason)
    if steps is not None:
        build_schedule(config.train, steps)  # raises an error if the schedule is invalid at this length
    source = choose_resume_source(config, open_checkpoints(resolved.output_place))
    foreign_rows = (
        [] if source is None else _build_foreign_checkpoint_rows(config, model, adapter, source, steps)
    )
    return [
        (
            "model",
            f"{type(model).__name__}, "
            + format_parameter_counts(count_parameters(model), count_trained_parameters(model)),
        ),
        ("data", str(data)),
        *([] if data.images is None else [("images", str(data.images))]),
        ("ranks", f"{devices} ({config.backend}, {config.strategy}, {config.precision})"),
        (
            "batch",
            f"{format_count(plan.global_batch_size, 'sequence')} per step = "
            f"{format_count(plan.world_size, 'rank')} x "
            + (
                f"{format_count(plan.max_sequences_per_rank, 'sequence')}, in micro-batches as large as fit"
                if config.train.micro_batch_size == "auto"
                else f"{format_count(plan.accumulation_steps, 'accumulation step')} x "
                + format_count(plan.micro_batch_size, "sequence")
                + describe_padding(plan)
            ),
        ),
        ("tokens per step", f"{plan.global_batch_size * config.data.seq_len:,}"),
        (
            "steps",
            _describe_unknown_steps(config, data)
            if steps is None
            else format_run_length(config, steps, data.train_samples),
        ),
        *([] if steps is None else [("warmup", describe_warmup(config, steps))]),
        ("start", f"resume from {source}" if source is not None else "step 0"),
        *_build_change_rows(config, source),
        ("model transforms", ", ".join(describe_transforms(model, config))),
        ("during each step", ", ".join(list_callback_names(config))),
        *foreign_rows,
    ]


def _build_change_rows(config: RunConfig, source: AnyPath | None) -> list[tuple[str, str]]:
    """Build the table row that lists the settings changed since a checkpoint was saved.

    Args:
        config: Config of the run.
        source: Checkpoint that the run resumes from, or None.

    Returns:
        A list with one row. Empty if there is no checkpoint, if it does not contain the settings of its
        run, or if nothing has changed.
    """
    state = None if source is None else read_run_state(source)
    changes = [] if state is None else find_changes(state.run, config.fingerprint())
    return [("changed", "; ".join(change.arrow_text for change in changes))] if changes else []


def _describe_unknown_steps(config: RunConfig, data: DataSizes) -> str:
    """Describe the number of steps of a run whose data is not tokenized yet.

    If the samples are packed and the size of the data in bytes is known, the text gives an upper
    bound. The bound is computed from this size, because each token has at least one byte.
    Otherwise, the text contains the formula for the number of steps.
    """
    known_later = "known once the data is tokenized"
    if data.size_bytes is None or not data.packing:
        return (
            f"{known_later}: {config.train.epochs:g} x the number of training samples / "
            f"{config.train.global_batch_size}"
        )
    max_steps = compute_total_steps(config, max(1, data.size_bytes // config.data.seq_len))
    return (
        f"at most {max_steps:,}, with one token per byte (English text has about a quarter of that); "
        f"{known_later}"
    )


def _build_foreign_checkpoint_rows(
    config: RunConfig, model: PreTrainedModel, adapter: Adapter | None, source: AnyPath, steps: int | None
) -> list[tuple[str, str]]:
    """Build table rows that describe the state to load from a checkpoint of another program.

    Args:
        config: The resolved config.
        model: Model on the meta device.
        adapter: Adapter of the model, or None.
        source: The checkpoint that the run resumes from.
        steps: Total number of steps of the run. None if it is not known yet.

    Returns:
        Pairs of a label and a value. Empty if this project wrote the checkpoint.

    Raises:
        UserError: If the run cannot resume from the checkpoint.
    """
    foreign = open_external_for_model(source, model, adapter)
    if foreign is None:
        return []
    adopted = adopt_external_checkpoint(foreign, config, model, build_schedule(config.train, steps or 1))
    if steps is not None:
        adopted.check_steps_remain(steps)
    return [*adopted.summary_rows, *(("warning", warning) for warning in adopted.warnings)]
