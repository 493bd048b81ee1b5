"""``--dry-run``: print what the run would do, and the resolved config."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from portable.adapters.assemble import looked_at
from portable.batch_plan import describe_padding, total_steps
from portable.checkpoint.external import open_for_model, state_of_run
from portable.checkpoint.resume_external import adopt_checkpoint
from portable.checkpoint.store import checkpoints_of, resume_source
from portable.config import dump_yaml, find_changes
from portable.config.derived import classify_training, find_training_defaults
from portable.config.sources import evaluation_names
from portable.converters.console import get_terminal_width, print_line
from portable.engines.transforms import describe_transforms
from portable.errors import UserError
from portable.evaluation.builtin import Setting, build_metrics
from portable.formatting import human_bytes, human_count, table
from portable.model.flops import parameter_count, parameters_in_words, shape_hints, trained_count
from portable.model.pretrained import pretrained_weights
from portable.optim.schedule import build_schedule, too_long_a_warmup
from portable.planner.hours import work_of
from portable.planner.memory_model import Setting as Strategy
from portable.planner.tables import Plan, hours_rows
from portable.planner.this_machine import memory_rows, planner_here
from portable.registry import create_backend
from portable.run.evaluation import judge_of
from portable.run.finish import EXPORTED_BYTES, build_export_rows, ranks_in_words
from portable.run.length import SEQ_LEN, describe_length, describe_warmup
from portable.run.prepare import notes_on
from portable.run.resolve import first_plan, on_device
from portable.run.user_callbacks import callback_order
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


def dry_run(resolved: Resolved) -> int:
    """Print what the run would do, and the resolved config; write nothing."""
    backend = create_backend(resolved.config.backend)
    resolved = on_device(resolved)
    config = resolved.config
    assembled, data = looked_at(config)
    model = assembled.model
    if config.model.task not in _LABELLED:  # whose metrics depend on the labels
        user_loss = config.train.loss is not None
        setting = Setting(config.model.task, tokenizer=data.opened, user_loss=user_loss)
        judge_of(config, evaluation_names(config.data), build_metrics(config.train.metrics, setting))
    plan = first_plan(config, resolved.world)
    planner = planner_here(config, model, backend, resolved.world.ranks)
    rows = _plan_rows(resolved, model, assembled.adapter, data, plan)
    rows.append(("a checkpoint", human_bytes(planner.model.checkpoint_bytes(config.train))))
    if assembled.adapter is None or config.checkpoint.export in ("merged", "like_base"):
        model_bytes = EXPORTED_BYTES * parameter_count(model)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(resolved.world.ranks)))
        rows += build_export_rows(config, model_bytes, resolved.world.ranks, ranks_per_node)
    rows += memory_rows(planner)
    own = planner.option(Strategy.of(planner.config))
    rows += hours_rows(Plan(planner, [own], own, work=work_of(config, data)))
    for line in _notes(resolved, backend, assembled, data, plan):
        tell(line)
    print_line("# The config with every setting")
    print_line(dump_yaml(config))
    print_line("# Where each setting was set; all others are defaults or derived from these")
    print_line(table([*config.came_from.items(), *_list_defaults(resolved)]) + "\n")
    print_line("# What this run will do")
    print_line(table(rows, get_terminal_width(sys.stdout)))
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


def _notes(
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
    known = config.model.task not in _LABELLED
    if known and name is not None and not config.model.from_scratch and Path(name).is_dir():
        weights = pretrained_weights(config.model, model, assembled.grown_from).notes()
    searched = config.train.micro_batch_size == "auto"  # and not known yet
    hints = shape_hints(
        model.config,
        tokens=0 if searched else plan.micro_batch_size * config.data.seq_len,
        multiple=backend.shape_multiple(config.precision),
        precision=config.precision,
    )
    return [*notes_on(resolved, assembled, model.config, data), *weights, *hints]


def _plan_rows(
    resolved: Resolved, model: PreTrainedModel, adapter: Adapter | None, data: DataSizes, plan: BatchPlan
) -> list[tuple[str, str]]:
    config, world = resolved.config, resolved.world
    devices = ranks_in_words(world.ranks, world.devices_per_rank)
    steps = config.train.steps
    if config.train.epochs is not None:
        steps = None if data.train_samples is None else total_steps(config, data.train_samples)
    if steps is not None and (reason := too_long_a_warmup(config.train, steps)) is not None:
        raise UserError(reason)
    source = resume_source(config, checkpoints_of(resolved.place))
    begun = [] if source is None else _foreign_rows(config, model, adapter, source, steps)
    return [
        (
            "model",
            f"{type(model).__name__}, " + parameters_in_words(parameter_count(model), trained_count(model)),
        ),
        ("data", str(data)),
        ("ranks", f"{devices} ({config.backend}, {config.strategy}, {config.precision})"),
        (
            "batch",
            f"{human_count(plan.global_batch_size, 'sequence')} a step = "
            f"{human_count(plan.world_size, 'rank')} x "
            + (
                f"{plan.sequences_per_rank}, as many at a time as fit"
                if config.train.micro_batch_size == "auto"
                else f"{human_count(plan.accumulation_steps, 'accumulation step')} x "
                + human_count(plan.micro_batch_size, "sequence")
                + describe_padding(plan)
            ),
        ),
        ("tokens a step", f"{plan.global_batch_size * config.data.seq_len:,}"),
        (
            "steps",
            _unknown_steps(config, data)
            if steps is None
            else describe_length(config, steps, data.train_samples),
        ),
        *([] if steps is None else [("warmup", describe_warmup(config, steps))]),
        ("start", f"resume from {source}" if source is not None else "step 0"),
        *_list_changes(config, source),
        ("model transforms", ", ".join(describe_transforms(model, config))),
        ("beside each step", ", ".join(callback_order(config))),
        *begun,
    ]


def _list_changes(config: RunConfig, source: Place | None) -> list[tuple[str, str]]:
    """List the settings that differ from those of the run that wrote a checkpoint."""
    state = None if source is None else state_of_run(source)
    changes = [] if state is None else find_changes(state.run, config.fingerprint())
    return [("changed", "; ".join(change.arrow for change in changes))] if changes else []


def _unknown_steps(config: RunConfig, data: DataSizes) -> str:
    """What is known of the steps before the data is tokenized: no token is shorter than a byte."""
    late = "known once the data is tokenized"
    if data.size_bytes is None or not data.packing:
        return f"{late}; {config.train.epochs:g} x the samples to train / {config.train.global_batch_size}"
    most = total_steps(config, max(1, data.size_bytes // config.data.seq_len))
    return f"at most {most:,}, a token for each byte; English text takes a quarter of that; {late}"


def _foreign_rows(
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
