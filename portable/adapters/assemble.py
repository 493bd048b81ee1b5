"""Build the complete model of a run, including its adapter, on the meta device.

Training, ``--dry-run``, ``--show-data`` and the planner share these functions, so they build the
same model and report the same errors.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.adapters.settings import resolve_adapter_config
from portable.data.dataset import inspect_data_sizes
from portable.data.sizes import DataSizes
from portable.data.sources.source_kinds import detect_run_format, resolve_images
from portable.errors import MissingDataError, UserError
from portable.model import build as models
from portable.model.auxiliary_losses import needs_last_token_as_input
from portable.model.document_attention import (
    apply_default_packing,
    can_separate_states,
    check_causal_attention,
    check_document_separation,
    explain_image_mixing,
)
from portable.model.dynamic_rope import check_custom_rotary_layers
from portable.model.labels import classifies_at_end_token, read_problem_type
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.special_tokens import ModelSpecialTokens
from portable.model.training_loss import build_training_loss

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.adapters.adapter import Adapter
    from portable.config import RunConfig
    from portable.data.dataset import RunData


class AssembledModel(NamedTuple):
    """Model of a run and its adapter, as assembled by :func:`assemble_model`.

    The object also records whether the vocabulary was enlarged, and which special token ids were
    replaced.
    """

    model: PreTrainedModel
    """Model that the run trains, on the meta device, including the adapter."""
    adapter: Adapter | None
    """Adapter in ``model``, or None if the run trains all weights."""
    grown_from: int | None
    """Vocabulary size before ``data.added_tokens`` enlarged it, or None if it did not change."""
    replaced_tokens: list[str]
    """Notes about the special token ids of a pretrained model that were replaced by the tokenizer's
    ids. Empty for a new model."""


def assemble_model(
    config: RunConfig,
    model_config: PretrainedConfig,
    special_tokens: ModelSpecialTokens,
    tokenizer: Any,
    data: RunData | DataSizes,
) -> AssembledModel:
    """Build the model of a run on the meta device, with its final vocabulary and adapter.

    Also sets the special tokens, and checks the settings that depend on the model, such as the
    sequence length, packing and the kinds of parallelism.

    Args:
        config: Config of the run.
        model_config: Transformers config of the model, which is saved with the weights. It is
            changed in place: the final vocabulary size and special tokens are set, and
            ``model.function`` may change it.
        special_tokens: Special tokens, built from ``model_config`` and ``config.model``.
        tokenizer: Tokenizer of the data. If it is None, because it is not on this machine, the
            special tokens do not change.
        data: Data of the run, or only its sizes.

    Raises:
        UserError: If a setting or the tokenizer does not fit the model.
    """
    if tokenizer is not None:
        special_tokens.replace_default_ids(tokenizer)
    size = data.vocab_size or 0
    grown_from = models.enlarge_vocabulary(model_config, size, config)
    model = models.build_and_freeze_model(model_config, config)
    models.check_vocabulary_size(model, size, config)
    models.check_seq_len(model_config, config, model)
    aligned: list[str] = []
    if tokenizer is not None:
        aligned = special_tokens.align_token_ids(model, tokenizer, data.target_frame, data.end_of_turn_token)
    adapter = None
    if config.adapter.type is not None:
        from portable.adapters.adapter import inject_adapter

        adapter = inject_adapter(model, model_config, config, grown_from)
    assign_parameter_groups(model, config.train)  # raises an error for patterns that do not fit the model
    if config.model.task == "causal-lm":
        check_causal_attention(model)
    check_custom_rotary_layers(model, config)
    image_processor = (data if isinstance(data, DataSizes) else data.sizes).image_processor
    if image_processor is not None:
        from portable.model.image_features import check_image_features

        check_image_features(model, image_processor)
    if config.data.packing == "documents":
        check_document_separation(
            model, seq_len=config.data.seq_len, separates_states=can_separate_states(config)
        )
        if config.data.images and (reason := explain_image_mixing(model.config.model_type)) is not None:
            raise UserError(f"data.packing: {type(model).__name__} {reason}; set data.packing to false")
    check_parallel_support(model, config)
    # A new model had no special tokens that the tokenizer could replace.
    return AssembledModel(model, adapter, grown_from, [] if config.model.name_or_path is None else aligned)


def check_parallel_support(model: PreTrainedModel, config: RunConfig) -> None:
    """Check that ``model`` supports the context, tensor and expert parallelism set in ``config``.

    Raises:
        UserError: If the model does not support a kind of parallelism that is enabled.
    """
    if config.context_parallel_size > 1:
        from portable.model.context_parallel_support import check_context_parallel_support

        check_context_parallel_support(model, config)
    if config.tensor_parallel_size > 1:
        from portable.model.tensor_parallel_plan import check_tensor_parallel_support

        check_tensor_parallel_support(model, config.tensor_parallel_size)
    if config.expert_parallel_size > 1:
        from portable.model.expert_exchange import check_expert_parallel_support

        check_expert_parallel_support(model, config.expert_parallel_size, config.train.optimizer)


class InspectedRun(NamedTuple):
    """Model of a run on the meta device, and the sizes of the run's data.

    Attributes:
        assembled: Model and adapter.
        data: Sizes of the data, determined from the files on this machine.
    """

    assembled: AssembledModel
    data: DataSizes


def inspect_run(config: RunConfig) -> InspectedRun:
    """Assemble the model of a run on the meta device, and inspect its data.

    Data is neither downloaded nor written. ``--dry-run`` and the planner use this function.

    Args:
        config: Config of the run. The settings that depend on files must already be resolved, for
            example by :func:`resolve_defaults`.

    Raises:
        UserError: If a run with this config would be rejected.
        MissingDataError: If the data is not on this machine.
    """
    model_config = models.load_model_config(config.model)
    models.check_seq_len(model_config, config)
    read_problem_type(model_config, config.model)  # called only for the errors that a run would also raise
    special_tokens = ModelSpecialTokens(model_config, config.model)
    data = inspect_data_sizes(
        config.data, task=config.model.task, **build_data_arguments(config, model_config)
    )
    return InspectedRun(
        assemble_model(config, model_config, special_tokens, data.tokenizer_object, data), data
    )


def resolve_defaults(config: RunConfig) -> RunConfig:
    """Resolve the settings that depend on the files of the adapter, the data or the model.

    Resolves the section ``adapter``, ``data.format``, ``data.images``, and the defaults of
    ``data.seq_len`` and ``data.packing``. If the model, the tokenizer or the adapter is the output
    folder of a run, the exported model of the run is used instead. An adapter on the Hub is
    downloaded. Data is not downloaded: if it is missing, ``data.format`` keeps its value.

    Raises:
        UserError: If a run would reject the files.
    """
    config = resolve_adapter_config(config)
    try:
        kind = detect_run_format(config.data, config.model.task, downloads=False)
    except MissingDataError:  # the code that reads the data raises the error again
        kind = config.data.format
    config = resolve_images(config.replaced({"data.format": kind}), downloads=False)
    return apply_default_packing(models.apply_default_seq_len(config))


class PlanInputs(NamedTuple):
    """Inputs of a memory plan, returned by :func:`resolve_and_build_model`.

    Attributes:
        config: The resolved config.
        model: Model of the run, with its adapter, on the meta device.
        sizes: Sizes of the data, such as the numbers of documents, tokens and samples. None if the
            data is missing or was not requested.
    """

    config: RunConfig
    model: PreTrainedModel
    sizes: DataSizes | None


def resolve_and_build_model(config: RunConfig, *, with_data: bool = True) -> PlanInputs:
    """Resolve the settings that depend on files, and build the model on the meta device.

    Data is never downloaded. The result contains no data sizes if the data is not on this machine,
    or if ``with_data`` is False. The vocabulary is then not enlarged for ``data.added_tokens``.

    Args:
        config: Config of the run.
        with_data: Whether to read the data and the tokenizer, if they are on this machine. If
            False, the settings in the section ``data`` are not resolved either.

    Raises:
        UserError: If a run with this config would be rejected.
    """
    config = resolve_defaults(config) if with_data else resolve_adapter_config(config)
    build_training_loss(config)  # raises an error if the loss does not exist
    if with_data:
        with suppress(MissingDataError):  # a plan does not need the data
            assembled, sizes = inspect_run(config)
            return PlanInputs(config, assembled.model, sizes)
    from portable.adapters.adapter import build_training_model

    model_config = models.load_model_config(config.model)
    models.check_seq_len(model_config, config)
    model = build_training_model(model_config, config)
    check_parallel_support(model, config)
    return PlanInputs(config, model, None)


def build_data_arguments(config: RunConfig, model_config: PretrainedConfig) -> dict[str, Any]:
    """Build the keyword arguments of ``build_data`` that depend on the model's config and the loss.

    The arguments include the name of the pretrained model and the vocabulary size. If
    ``data.tokenizer`` is null, ``build_data`` loads the tokenizer of the pretrained model. Without a
    pretrained model, it trains a tokenizer with this vocabulary size.

    Returns:
        Keyword arguments for ``build_data`` and ``inspect_data_sizes``.
    """
    return {
        "model_tokenizer": config.model.name_or_path,
        "trust_remote_code": config.model.trust_remote_code,
        "model_vocab_size": getattr(model_config.get_text_config(), "vocab_size", None),
        "whole": (loss := build_training_loss(config)) is not None and loss.whole,
        "with_last": needs_last_token_as_input(model_config, config.model),
        "ends_texts": config.model.task == "sequence-classification"
        and classifies_at_end_token(model_config),
    }
