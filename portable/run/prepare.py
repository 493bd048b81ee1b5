"""The second stage: tokenizer, data, model on the meta device, batch plan, and schedule."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from portable.adapters.assemble import assemble, build_tokenizer_hints
from portable.batch_plan import build_batch_plan, total_steps
from portable.config.origins import format_short_value
from portable.converters.writers.parallel_jobs import count_cores
from portable.data.dataset import build_data
from portable.data.samples.classes import SINGLE
from portable.data.sources.documents import format_names
from portable.errors import UserError
from portable.evaluation.builtin_metrics import MetricSettings, build_metrics
from portable.formatting import format_count, format_short_count
from portable.model import build as models
from portable.model.auxiliary_losses import adds_router_loss
from portable.model.document_attention import list_packing_notes
from portable.model.flops import compute_flops_per_token, count_parameters, count_trained_parameters
from portable.model.freezing import build_tie_notes
from portable.model.labels import adopt_labels, build_label_hints, find_known_classes, get_problem_type
from portable.model.padding import explain_padding
from portable.model.published_names import PublishedNames
from portable.model.special_tokens import SpecialTokens
from portable.model.unused_parameters import get_unreached_names, summarize_parameters
from portable.optim.schedule import build_schedule, explain_long_warmup
from portable.registry import load_backend_package
from portable.run.evaluation import build_best_tracker
from portable.run.length import explain_seq_len, warn_of_few_steps, warn_of_rare_checkpoints
from portable.run.resolve import resolve_precision
from portable.run.stages import Prepared
from portable.terminal import shows_bars

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.adapters.assemble import Assembled
    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.data.dataset import Data
    from portable.data.samples.classes import Classes
    from portable.data.sizes import DataSizes
    from portable.run.stages import Resolved


def prepare(resolved: Resolved, backend: Backend) -> Prepared:
    """Build the tokenizer, the data, the model on the meta device, the batch plan, and the schedule.

    Must be called before :meth:`portable.backend.Backend.start`, because the search for a micro-batch size
    starts process groups of its own.

    Args:
        resolved: Result of the first stage.
        backend: Backend of this rank, which is not started yet.

    Returns:
        The prepared run.

    Raises:
        UserError: If the model or the data cannot be used.
    """
    resolved = resolve_precision(resolved)
    config = resolved.config
    model_config = models.load_model_config(config.model)
    models.check_length(model_config, config)
    special_tokens = SpecialTokens(model_config, config.model)
    if config.checkpoint.export == "like_base":
        from portable.model.pretrained import open_export_layout

        open_export_layout(config.model)  # otherwise the run would fail after the last step
    data = open_data(config, model_config, special_tokens)
    of_task = config.model.task if data.classes is None else data.classes.problem
    label_notes = [] if data.classes is None else _adopt_classes(data.classes, model_config, config, data)
    setting = MetricSettings(
        of_task, data.label_names, data.tokenizer, user_loss=config.train.loss is not None
    )
    metrics = build_metrics(config.train.metrics, setting)
    if metrics.texts is not None and backend.one_program and backend.world_size > 1:
        names = " and ".join(metrics.texts.names)
        raise UserError(f"train.metrics: on several hosts, XLA generates no texts; remove {names}")
    best_tracker = build_best_tracker(config, data.evals, metrics)
    assembled = assemble(config, model_config, special_tokens, data.tokenizer, data)
    model, adapter = assembled.model, assembled.adapter
    if adapter is not None and config.checkpoint.export in ("merged", "like_base"):
        from portable.adapters.merge_check import check_merge

        check_merge(adapter)  # otherwise the run would fail after the last step
    reference = None
    if config.train.loss is not None:
        from portable.run.precompute import add_computed, compute_reference_digest

        reference = compute_reference_digest(config)
        add_computed(config, backend, data, reference)
    config = _with_micro_batch(resolved, backend, model_config, data)
    length = total_steps(config, data.train.epoch_samples)
    if (reason := explain_long_warmup(config.train, length)) is not None:
        raise UserError(reason)
    published = PublishedNames(config.model, model)
    if adapter is None and config.checkpoint.export == "like_base":
        published.check_like_base()  # otherwise the run would fail after the last step
    notes = [*build_notes(resolved, assembled, model_config, data.sizes), *label_notes]
    return Prepared(
        resolved=resolved,
        config=config,
        backend=backend,
        model_config=model_config,
        data=data,
        model=model,
        adapter=adapter,
        names=published,
        grown_from=assembled.grown_from,
        architecture=type(model).__name__,
        parameters=count_parameters(model),
        trained=count_trained_parameters(model),
        frozen="" if adapter is not None else describe_frozen(model),
        flops_per_token=compute_flops_per_token(
            model, model_config, data.train.context or config.data.seq_len
        ),
        plan=build_batch_plan(config, backend),
        steps=length,
        until=min(length, config.train.stop_after or length),
        schedule=build_schedule(config.train, length),
        metrics=metrics,
        best_tracker=best_tracker,
        reference=reference,
        notes=tuple(notes),
    )


_PARTS_SHOWN = 4


def describe_frozen(model: PreTrainedModel) -> str:
    """Describe the parameters that are frozen because the loss does not depend on them.

    Args:
        model: The model on the meta device, where parameters have their full sizes.

    Returns:
        The text of the run's summary. Empty if there are no such parameters.
    """
    unreached = get_unreached_names(model)
    frozen = {name: p for name, p in model.named_parameters() if name in unreached and not p.requires_grad}
    if not frozen:
        return ""
    parts = summarize_parameters(model, frozen)
    more = f" and {len(parts) - _PARTS_SHOWN} more" if len(parts) > _PARTS_SHOWN else ""
    count = format_short_count(sum(p.numel() for p in frozen.values()))
    share = f"{count} of {format_short_count(count_parameters(model))} parameters are not reached by text"
    return f"{', '.join(parts[:_PARTS_SHOWN])}{more} ({share})"


def open_data(config: RunConfig, model_config: PretrainedConfig, special_tokens: SpecialTokens) -> Data:
    """Open the data of a run, and tokenize it if it is not cached."""
    classifies = config.model.task == "sequence-classification"
    return build_data(
        config.data,
        task=config.model.task,
        seed=config.seed,
        decoder_start_token_id=special_tokens.find_decoder_start,
        label_shift=special_tokens.build_label_shift,
        global_batch_size=config.train.global_batch_size,
        progress=shows_bars(),  # only the rank that builds the cache shows it
        **(build_label_hints(model_config, config.model) if classifies else {}),
        **build_tokenizer_hints(config, model_config),
    )


def with_agreed_micro_batch(prepared: Prepared) -> Prepared:
    """Use the smallest micro-batch size of all ranks if ``train.micro_batch_size`` is ``auto``.

    A collective call.
    """
    if prepared.resolved.config.train.micro_batch_size != "auto":
        return prepared
    from portable.run import micro_batch

    backend, config = prepared.backend, prepared.config
    size = prepared.plan.micro_batch_size
    config = micro_batch.with_micro_batch(
        config, micro_batch.find_smallest_over_ranks(size, config, prepared.resolved.world, backend)
    )
    return replace(prepared, config=config, plan=build_batch_plan(config, backend))


def _with_micro_batch(
    resolved: Resolved, backend: Backend, model_config: PretrainedConfig, data: Data
) -> RunConfig:
    """Replace ``train.micro_batch_size: auto`` by the largest size that fits this rank's device."""
    config = resolved.config
    if config.train.micro_batch_size != "auto":
        return config
    from portable.run import micro_batch

    size = micro_batch.get_previous_size(config, resolved.existing, resolved.place, resolved.world)
    if size is None:
        search = micro_batch.Search(backend, config, model_config, data.train, resolved.world)
        size = micro_batch.find_largest_micro_batch(search)
    return micro_batch.with_micro_batch(config, size)


def _adopt_classes(
    classes: Classes, model_config: PretrainedConfig, config: RunConfig, data: Data
) -> list[str]:
    """Add the classes of the labels to the model's config.

    Returns:
        Notes about what the labels determine because the settings do not.
    """
    notes = []
    problem, model_classes = (
        get_problem_type(model_config, config.model),
        find_known_classes(model_config, config.model),
    )
    if problem is None and classes.problem != SINGLE:
        notes.append(f"note: problem_type is {classes.problem}, as the labels and num_labels have it")
    if model_classes is not None and model_classes.is_renaming(data.label_names):
        notes.append(
            f"note: {model_classes.key} does not name its classes; they are taken for "
            f"{format_names(data.label_names)}, in this order"
        )
    adopt_labels(model_config, classes)
    return notes


def build_notes(
    resolved: Resolved, assembled: Assembled, model_config: PretrainedConfig, data: DataSizes
) -> list[str]:
    """Build the notes and warnings that are printed before the first step, one line each.

    Args:
        resolved: The resolved run.
        assembled: Model of the run, and its adapter.
        model_config: Config of the model.
        data: Number of samples, tokens and sources of the data.
    """
    lines = [
        f"note: {note}" for note in load_backend_package(resolved.config.backend).build_notes(resolved.config)
    ]
    if resolved.unset:
        values = ", ".join(f"{key}: {format_short_value(value)}" for key, value in resolved.unset.items())
        lines.append(f"note: the run in {resolved.place} keeps its settings that are not set here: {values}")
    if (length := explain_seq_len(resolved, models.get_max_positions(model_config))) is not None:
        lines.append(f"note: {length}")
    if resolved.config.data.format == "auto":
        lines.append(
            "note: data.format is detected after the data is downloaded; if the data has conversations or "
            "pairs, the defaults for fine-tuning apply"
        )
    if assembled.aligned:
        taken = "; ".join(assembled.aligned)
        lines.append(f"note: the model takes over the tokenizer's special tokens: {taken}")
    if getattr(model_config, "disable_ngram_loss", None) is False:
        lines.append(
            "note: the model is trained on the next token alone, as with disable_ngram_loss; "
            "transformers adds losses of the tokens after it"
        )
    if adds_router_loss(model_config, resolved.config.model):
        coefficient = model_config.get_text_config().router_aux_loss_coef
        lines.append(
            "note: the loss has the model's router loss, weighed by its router_aux_loss_coef "
            f"{coefficient:g}, as in TRL; model.config.output_router_logits: false leaves it out"
        )
    if assembled.adapter is not None and resolved.config.model.from_scratch:
        lines.append(
            "note: the base model has random weights, which follow from the seed and are not saved; for an "
            "adapter to use elsewhere, set model.name_or_path"
        )
    if assembled.adapter is not None:
        lines += [f"note: {note}" for note in assembled.adapter.notes]
    lines += [f"note: {note}" for note in list_packing_notes(resolved.config, assembled.model)]
    if resolved.config.train.freezes:
        lines += [f"note: {note}" for note in build_tie_notes(assembled.model, resolved.config.train)]
    if (padding := explain_padding(model_config, resolved.config)) is not None:
        lines.append(f"warning: {padding}")
    workers = resolved.config.data.num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", resolved.world.ranks))
    if workers > (count := count_cores()):
        lines.append(
            f"note: data.num_workers: {workers} processes on {format_count(count, 'core')}, and each takes "
            "seconds to start; 0 is a thread"
        )
    if (few := warn_of_few_steps(resolved.config, data.train_samples, resolved.world)) is not None:
        lines.append(f"warning: {few}")
    if (rare := warn_of_rare_checkpoints(resolved.config, data.train_samples)) is not None:
        lines.append(f"warning: {rare}")
    step = resolved.config.train.global_batch_size
    if data.train_samples is not None and 0 < data.train_samples < step:
        lines.append(
            f"note: train.global_batch_size: a step takes {step} samples and the data has "
            f"{data.train_samples}: each comes more than once in a step"
        )
    lines += [f"warning: {warning}" for warning in data.warnings]
    return lines
