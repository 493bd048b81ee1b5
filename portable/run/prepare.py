"""Prepare a run: tokenizer, data, model on the meta device, batch plan, and schedule."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from portable.adapters.assemble import assemble_model, build_data_arguments
from portable.batch_plan import compute_batch_plan_of_rank, compute_total_steps
from portable.config.origins import format_short_value
from portable.converters.writers.parallel_jobs import count_usable_cores
from portable.data.dataset import build_data
from portable.data.samples.classes import SINGLE_LABEL
from portable.data.sources.documents import format_name_list
from portable.errors import UserError
from portable.evaluation.builtin_metrics import MetricSettings, build_metrics
from portable.formatting import format_count, format_short_count
from portable.model import build as models
from portable.model.auxiliary_losses import enables_router_loss_by_default
from portable.model.document_attention import build_packing_notes
from portable.model.flops import compute_flops_per_token, count_parameters, count_trained_parameters
from portable.model.freezing import build_tied_parameter_notes
from portable.model.labels import (
    build_label_arguments,
    find_known_classes,
    read_problem_type,
    set_config_labels,
)
from portable.model.padding import explain_padding_dependence
from portable.model.published_names import PublishedNames
from portable.model.special_tokens import ModelSpecialTokens
from portable.model.unused_parameters import get_unreached_names, summarize_as_outermost_modules
from portable.optim.schedule import build_schedule, explain_long_warmup
from portable.registry import load_backend_package
from portable.run.evaluation import build_best_tracker
from portable.run.length import (
    build_few_steps_warning,
    build_rare_checkpoints_warning,
    explain_chosen_seq_len,
)
from portable.run.resolve import resolve_precision
from portable.run.stages import PreparedRun
from portable.terminal import shows_progress_bars

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.adapters.assemble import AssembledModel
    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.data.dataset import RunData
    from portable.data.samples.classes import LabelMapping
    from portable.data.sizes import DataSizes
    from portable.run.stages import ResolvedRun


def prepare_run(resolved: ResolvedRun, backend: Backend) -> PreparedRun:
    """Build the tokenizer, the data, the meta-device model, the batch plan, and the schedule.

    Must be called before :meth:`portable.backend.Backend.start`, because the search for a
    micro-batch size starts its own process groups. The size that the search finds applies only to
    this rank. After the start, :func:`agree_on_micro_batch_size` reduces it to the minimum over all
    ranks.

    The function also builds the metrics. If a custom loss uses precomputed values, it attaches
    their tables to the data.

    Args:
        resolved: Result of :func:`portable.run.resolve.resolve_run`, which contains the config.
        backend: Backend of this rank. It is not started yet.

    Returns:
        The prepared run.

    Raises:
        UserError: If the model or the data cannot be used, or if settings are not possible with
            them, for example a warmup that exceeds the run.
    """
    resolved = resolve_precision(resolved)
    config = resolved.config
    model_config = models.load_model_config(config.model)
    models.check_seq_len(model_config, config)
    special_tokens = ModelSpecialTokens(model_config, config.model)
    if config.checkpoint.export == "like_base":
        from portable.model.pretrained import open_quantized_base

        open_quantized_base(config.model)  # otherwise the run would fail after the last step
    data = open_run_data(config, model_config, special_tokens)
    problem_type = config.model.task if data.classes is None else data.classes.problem_type
    label_notes = (
        [] if data.classes is None else _add_classes_to_model_config(data.classes, model_config, config, data)
    )
    setting = MetricSettings(
        problem_type, data.label_names, data.tokenizer, user_loss=config.train.loss is not None
    )
    metrics = build_metrics(config.train.metrics, setting)
    best_tracker = build_best_tracker(config, data.evals, metrics)
    assembled = assemble_model(config, model_config, special_tokens, data.tokenizer, data)
    model, adapter = assembled.model, assembled.adapter
    if adapter is not None and config.checkpoint.export in ("merged", "like_base"):
        from portable.adapters.merge_check import check_adapter_can_be_merged

        check_adapter_can_be_merged(adapter)  # otherwise the run would fail after the last step
    reference = None
    if config.train.loss is not None:
        from portable.run.precompute import attach_precomputed_tables, compute_reference_digest

        reference = compute_reference_digest(config)
        attach_precomputed_tables(config, backend, data, reference)
    config = _resolve_micro_batch_size(resolved, backend, model_config, data)
    num_steps = compute_total_steps(config, data.train.epoch_samples)
    if (reason := explain_long_warmup(config.train, num_steps)) is not None:
        raise UserError(reason)
    published = PublishedNames(config.model, model)
    if adapter is None and config.checkpoint.export == "like_base":
        published.check_export_like_base()  # otherwise the run would fail after the last step
    notes = [*build_start_notes(resolved, assembled, model_config, data.sizes), *label_notes]
    return PreparedRun(
        resolved=resolved,
        config=config,
        backend=backend,
        model_config=model_config,
        data=data,
        model=model,
        adapter=adapter,
        published_names=published,
        vocabulary_size_before_growth=assembled.grown_from,
        architecture=type(model).__name__,
        num_parameters=count_parameters(model),
        num_trained_parameters=count_trained_parameters(model),
        frozen_description="" if adapter is not None else describe_unreached_parameters(model, config),
        flops_per_token=compute_flops_per_token(
            model, model_config, data.train.mean_context_length or config.data.seq_len
        ),
        batch_plan=compute_batch_plan_of_rank(config, backend),
        steps=num_steps,
        end_step=min(num_steps, config.train.stop_after or num_steps),
        schedule=build_schedule(config.train, num_steps),
        metrics=metrics,
        best_tracker=best_tracker,
        reference_digest=reference,
        notes=tuple(notes),
    )


_MAX_PARTS_SHOWN = 4
"""Maximum number of modules that :func:`describe_unreached_parameters` names."""


def describe_unreached_parameters(model: PreTrainedModel, config: RunConfig) -> str:
    """Describe the parameters that are frozen because they do not affect the loss on text.

    An example is the image encoder of a multimodal model. Parameters that only the settings freeze,
    such as ``train.frozen``, are not included.

    Args:
        model: Model on the meta device, before an engine shards its parameters.
        config: Config of the run.

    Returns:
        The text for the table at the start of the run. Empty if there are no such parameters.
    """
    unreached = get_unreached_names(model)
    frozen = {name: p for name, p in model.named_parameters() if name in unreached and not p.requires_grad}
    if not frozen:
        return ""
    parts = summarize_as_outermost_modules(model, frozen)
    more = f" and {len(parts) - _MAX_PARTS_SHOWN} more" if len(parts) > _MAX_PARTS_SHOWN else ""
    count = format_short_count(sum(p.numel() for p in frozen.values()))
    reached = "are reached only by images" if config.data.images else "are not reached by text"
    share = f"{count} of {format_short_count(count_parameters(model))} parameters {reached}"
    return f"{', '.join(parts[:_MAX_PARTS_SHOWN])}{more} ({share})"


def open_run_data(
    config: RunConfig, model_config: PretrainedConfig, special_tokens: ModelSpecialTokens
) -> RunData:
    """Open the training and evaluation data of a run. Tokenize it if it is not cached.

    Must be called on all ranks.

    Args:
        config: Config of the run.
        model_config: Config of the model.
        special_tokens: Special tokens of the model. Some tasks need them.

    Raises:
        UserError: If the settings or the data cannot be used.
    """
    classifies = config.model.task == "sequence-classification"
    return build_data(
        config.data,
        task=config.model.task,
        seed=config.seed,
        decoder_start_token_id=special_tokens.compute_decoder_start,
        label_shift=special_tokens.build_label_shift,
        global_batch_size=config.train.global_batch_size,
        progress=shows_progress_bars(),  # only the rank that builds the cache shows it
        **(build_label_arguments(model_config, config.model) if classifies else {}),
        **build_data_arguments(config, model_config),
    )


def agree_on_micro_batch_size(prepared: PreparedRun) -> PreparedRun:
    """Reduce a micro-batch size chosen by ``auto`` to the minimum over all ranks.

    Returns ``prepared`` unchanged if ``train.micro_batch_size`` is not ``auto``. All ranks must
    call this function, because it is a collective call.
    """
    if prepared.resolved.config.train.micro_batch_size != "auto":
        return prepared
    from portable.run import micro_batch

    backend, config = prepared.backend, prepared.config
    size = prepared.batch_plan.micro_batch_size
    config = micro_batch.replace_micro_batch_size(
        config, micro_batch.agree_on_smallest_size(size, config, prepared.resolved.world, backend)
    )
    return replace(prepared, config=config, batch_plan=compute_batch_plan_of_rank(config, backend))


def _resolve_micro_batch_size(
    resolved: ResolvedRun, backend: Backend, model_config: PretrainedConfig, data: RunData
) -> RunConfig:
    """Replace ``train.micro_batch_size: auto`` with a number.

    If the run has a checkpoint and the settings that affect memory are unchanged, the size of the
    latest launch is used again. Otherwise, the largest size that fits on this rank's device is
    used.
    """
    config = resolved.config
    if config.train.micro_batch_size != "auto":
        return config
    from portable.run import micro_batch

    size = micro_batch.read_previous_micro_batch_size(
        config, resolved.existing, resolved.output_place, resolved.world
    )
    if size is None:
        search = micro_batch.MicroBatchSearch(backend, config, model_config, data.train, resolved.world)
        size = micro_batch.find_largest_micro_batch(search)
    return micro_batch.replace_micro_batch_size(config, size)


def _add_classes_to_model_config(
    classes: LabelMapping, model_config: PretrainedConfig, config: RunConfig, data: RunData
) -> list[str]:
    """Store the class names and the problem type of the data in the model's config, in place.

    Returns:
        At most two notes about assumptions: that the problem type was inferred from the labels, and
        that the model's unnamed classes are assumed to be the labels of the data, in the same
        order. Empty if nothing was assumed.
    """
    notes = []
    problem, model_classes = (
        read_problem_type(model_config, config.model),
        find_known_classes(model_config, config.model),
    )
    if problem is None and classes.problem_type != SINGLE_LABEL:
        notes.append(f"note: problem_type is {classes.problem_type}, inferred from the labels and num_labels")
    if model_classes is not None and model_classes.would_rename_classes(data.label_names):
        notes.append(
            f"note: {model_classes.setting_key}: the classes have no names, so they are assumed to be "
            f"{format_name_list(data.label_names)}, in this order"
        )
    set_config_labels(model_config, classes)
    return notes


def build_start_notes(
    resolved: ResolvedRun, assembled: AssembledModel, model_config: PretrainedConfig, data: DataSizes
) -> list[str]:
    """Build the notes and warnings that are printed before the first step, one line each.

    Args:
        resolved: The resolved run.
        assembled: Model of the run, and its adapter.
        model_config: Config of the model.
        data: Sizes of the data, on which some warnings are based.
    """
    lines = [
        f"note: {note}" for note in load_backend_package(resolved.config.backend).build_notes(resolved.config)
    ]
    if resolved.inherited_settings:
        values = ", ".join(
            f"{key}: {format_short_value(value)}" for key, value in resolved.inherited_settings.items()
        )
        lines.append(
            f"note: these settings of the run in {resolved.output_place} are kept, because they are not set "
            f"here: {values}"
        )
    if (length := explain_chosen_seq_len(resolved, models.get_max_positions(model_config))) is not None:
        lines.append(f"note: {length}")
    if resolved.config.data.format == "auto":
        lines.append(
            "note: data.format is detected after the data is downloaded; if the data has conversations or "
            "pairs, the defaults for fine-tuning apply"
        )
    if assembled.replaced_tokens:
        special_tokens_text = "; ".join(assembled.replaced_tokens)
        lines.append(f"note: the model uses the special tokens of the tokenizer: {special_tokens_text}")
    if getattr(model_config, "disable_ngram_loss", None) is False:
        lines.append(
            "note: the loss covers only next-token prediction, as with disable_ngram_loss: true; the loss "
            "in transformers also covers later tokens"
        )
    if enables_router_loss_by_default(model_config, resolved.config.model):
        coefficient = model_config.get_text_config().router_aux_loss_coef
        lines.append(
            "note: the loss includes the model's router loss, weighted by router_aux_loss_coef "
            f"({coefficient:g}), as in TRL; set model.config.output_router_logits to false to exclude the "
            "router loss"
        )
    if assembled.adapter is not None and resolved.config.model.from_scratch:
        lines.append(
            "note: the base model has random weights, which depend on the seed and are not saved; to use "
            "the adapter elsewhere, set model.name_or_path"
        )
    if assembled.adapter is not None:
        lines += [f"note: {note}" for note in assembled.adapter.notes]
    lines += [f"note: {note}" for note in build_packing_notes(resolved.config, assembled.model)]
    if resolved.config.train.has_frozen_patterns:
        lines += [
            f"note: {note}" for note in build_tied_parameter_notes(assembled.model, resolved.config.train)
        ]
    if (padding := explain_padding_dependence(model_config, resolved.config)) is not None:
        lines.append(f"warning: {padding}")
    workers = resolved.config.data.num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", resolved.world.ranks))
    if workers > (count := count_usable_cores()):
        lines.append(
            f"note: data.num_workers: {workers} processes share {format_count(count, 'core')}, and each "
            "takes seconds to start; set data.num_workers to 0 to use a thread instead"
        )
    if (
        few_steps_warning := build_few_steps_warning(resolved.config, data.train_samples, resolved.world)
    ) is not None:
        lines.append(f"warning: {few_steps_warning}")
    if (
        rare_checkpoints_warning := build_rare_checkpoints_warning(resolved.config, data.train_samples)
    ) is not None:
        lines.append(f"warning: {rare_checkpoints_warning}")
    global_batch_size = resolved.config.train.global_batch_size
    if data.train_samples is not None and 0 < data.train_samples < global_batch_size:
        lines.append(
            f"note: train.global_batch_size: a step takes {global_batch_size} samples, but the data has "
            f"{data.train_samples}, so samples occur more than once in a step"
        )
    lines += [f"warning: {warning}" for warning in data.warnings]
    return lines
