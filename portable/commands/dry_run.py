"""``--dry-run``: print what the run would do, and the resolved config."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from portable.adapters.assemble import inspect_run
from portable.batch_plan import describe_padding, total_steps
from portable.checkpoint.external import open_for_model, read_run_state
from portable.checkpoint.resume_external import adopt_checkpoint
from portable.checkpoint.store import choose_resume_source, open_checkpoints
from portable.config import dump_yaml, find_changes
from portable.config.derived_defaults import classify_training, find_training_defaults
from portable.config.sources import list_evaluation_names
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
from portable.planner.memory_model import StrategySetting as Strategy
from portable.planner.plan_tables import Plan, build_hours_rows
from portable.planner.run_time import estimate_work
from portable.planner.this_machine import build_local_planner, build_memory_rows
from portable.registry import create_backend
from portable.run.custom_callbacks import list_callback_names
from portable.run.evaluation import build_best_tracker
from portable.run.finish import EXPORTED_BYTES, build_export_rows, describe_ranks
from portable.run.length import SEQ_LEN, describe_length, describe_warmup
from portable.run.prepare import build_notes
from portable.run.resolve import plan_first_rank, resolve_precision
from portable.terminal import tell

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from portable.adapters.adapter import Adapter
    from portable.adapters.assemble import Assembled
    from portable.backend import Backend
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import Place
    from portable.data.sizes import DataSizes
    from portable.run.stages import Resolved

_LABELLED = ("sequence-classification",)


def print_dry_run(resolved: Resolved) -> int:
    """Print what the run would do, and the resolved config; write nothing."""
    backend = create_backend(resolved.config.backend)
    resolved = resolve_precision(resolved)
    config = resolved.config
    assembled, data = inspect_run(config)
    model = assembled.model
    if config.model.task not in _LABELLED:  # whose metrics depend on the labels
        user_loss = config.train.loss is not None
        setting = MetricSettings(config.model.task, tokenizer=data.opened, user_loss=user_loss)
        build_best_tracker(
            config, list_evaluation_names(config.data), build_metrics(config.train.metrics, setting)
        )
    plan = plan_first_rank(config, resolved.world)
    planner = build_local_planner(config, model, backend, resolved.world.ranks)
    rows = _plan_rows(resolved, model, assembled.adapter, data, plan)
    rows.append(("a checkpoint", format_bytes(planner.model.compute_checkpoint_bytes(config.train))))
    if assembled.adapter is None or config.checkpoint.export in ("merged", "like_base"):
        model_bytes = EXPORTED_BYTES * count_parameters(model)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(resolved.world.ranks)))
        rows += build_export_rows(config, model_bytes, resolved.world.ranks, ranks_per_node)
    rows += build_memory_rows(planner)
    option = planner.build_option(Strategy.from_config(planner.config))
    rows += build_hours_rows(Plan(planner, [option], option, work=estimate_work(config, data)))
    for line in _collect_notes(resolved, backend, assembled, data, plan):
        tell(line)
    print_line("# The config with every setting")
    print_line(dump_yaml(config))
    print_line("# Where each setting was set; all others are defaults or derived from these")
    print_line(format_table([*config.came_from.items(), *_list_defaults(resolved)]) + "\n")
    print_line("# What this run will do")
    print_line(format_table(rows, get_terminal_width(sys.stdout)))
    return 0


def _list_defaults(resolved: Resolved) -> list[tuple[str, str]]:
    """List the settings whose values come from the existing run or from the kind of training.

    Returns:
        Pairs of a setting and a description of the origin of its value.
    """
    config, kind = resolved.config, classify_training(resolved.config)
    rows = [(key, f"the run in {resolved.place}") for key in resolved.unset]
    defaults = [key for key, value in find_training_defaults(config).items() if config.get(key) == value]
    if config.is_set_or_put(SEQ_LEN) and not config.is_set(SEQ_LEN):
        defaults.append(SEQ_LEN)
    return [*rows, *((key, f"default for {kind}") for key in defaults if key not in resolved.unset)]


def _collect_notes(
    resolved: Resolved,
    backend: Backend,
    assembled: Assembled,
    data: DataSizes,
    plan: BatchPlan,
) -> list[str]:
    """What the run will print before its first step, as far as it is known without a download."""
    config, adapter = resolved.config, assembled.adapter
    weights: list[str] = []
    model = assembled.model if adapter is None else adapter.blueprint.model
    name = config.model.name_or_path
    # A classifier's head has as many rows as the data has labels, which are not counted yet.
    is_sized = config.model.task not in _LABELLED
    if is_sized and name is not None and not config.model.from_scratch and Path(name).is_dir():
        weights = load_pretrained_weights(config.model, model, assembled.grown_from).build_notes()
    searched = config.train.micro_batch_size == "auto"  # and not known yet
    hints = build_shape_hints(
        model.config,
        tokens=0 if searched else plan.micro_batch_size * config.data.seq_len,
        multiple=backend.get_shape_multiple(config.precision),
        precision=config.precision,
    )
    return [*build_notes(resolved, assembled, model.config, data), *weights, *hints]


def _plan_rows(
    resolved: Resolved, model: PreTrainedModel, adapter: Adapter | None, data: DataSizes, plan: BatchPlan
) -> list[tuple[str, str]]:
    config, world = resolved.config, resolved.world
    devices = describe_ranks(world.ranks, world.devices_per_rank)
    steps = config.train.steps
    if config.train.epochs is not None:
        steps = None if data.train_samples is None else total_steps(config, data.train_samples)
    if steps is not None and (reason := explain_long_warmup(config.train, steps)) is not None:
        raise UserError(reason)
    source = choose_resume_source(config, open_checkpoints(resolved.place))
    begun = [] if source is None else _build_foreign_rows(config, model, adapter, source, steps)
    return [
        (
            "model",
            f"{type(model).__name__}, "
            + format_parameter_counts(count_parameters(model), count_trained_parameters(model)),
        ),
        ("data", str(data)),
        ("ranks", f"{devices} ({config.backend}, {config.strategy}, {config.precision})"),
        (
            "batch",
            f"{format_count(plan.global_batch_size, 'sequence')} a step = "
            f"{format_count(plan.world_size, 'rank')} x "
            + (
                f"{plan.sequences_per_rank}, as many at a time as fit"
                if config.train.micro_batch_size == "auto"
                else f"{format_count(plan.accumulation_steps, 'accumulation step')} x "
                + format_count(plan.micro_batch_size, "sequence")
                + describe_padding(plan)
            ),
        ),
        ("tokens a step", f"{plan.global_batch_size * config.data.seq_len:,}"),
        (
            "steps",
            _describe_unknown_steps(config, data)
            if steps is None
            else describe_length(config, steps, data.train_samples),
        ),
        *([] if steps is None else [("warmup", describe_warmup(config, steps))]),
        ("start", f"resume from {source}" if source is not None else "step 0"),
        *_list_changes(config, source),
        ("model transforms", ", ".join(describe_transforms(model, config))),
        ("beside each step", ", ".join(list_callback_names(config))),
        *begun,
    ]


def _list_changes(config: RunConfig, source: Place | None) -> list[tuple[str, str]]:
    """List the settings that differ from those of the run that wrote a checkpoint."""
    state = None if source is None else read_run_state(source)
    changes = [] if state is None else find_changes(state.run, config.fingerprint())
    return [("changed", "; ".join(change.arrow for change in changes))] if changes else []


def _describe_unknown_steps(config: RunConfig, data: DataSizes) -> str:
    """What is known of the steps before the data is tokenized: no token is shorter than a byte."""
    late = "known once the data is tokenized"
    if data.size_bytes is None or not data.packing:
        return f"{late}; {config.train.epochs:g} x the samples to train / {config.train.global_batch_size}"
    most = total_steps(config, max(1, data.size_bytes // config.data.seq_len))
    return f"at most {most:,}, a token for each byte; English text takes a quarter of that; {late}"


def _build_foreign_rows(
    config: RunConfig, model: PreTrainedModel, adapter: Adapter | None, source: Place, steps: int | None
) -> list[tuple[str, str]]:
    """What the run would take from ``source`` if another program wrote it; refused as it would be then."""
    foreign = open_for_model(source, model, adapter)
    if foreign is None:
        return []
    taken = adopt_checkpoint(foreign, config, model, build_schedule(config.train, steps or 1))
    if steps is not None:
        taken.check_length(steps)
    return [*taken.rows, *(("warning", warning) for warning in taken.warnings)]
