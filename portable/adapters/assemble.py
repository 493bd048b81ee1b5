"""From a config and its data to the model on the meta device: one way for a run and all that looks at it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.adapters.settings import resolve_adapter_config
from portable.data.dataset import inspect_data_sizes
from portable.data.sources.source_kinds import detect_run_format
from portable.errors import MissingDataError
from portable.model import build as models
from portable.model.auxiliary_losses import needs_last_token_as_input
from portable.model.document_attention import (
    apply_default_packing,
    check_causal_attention,
    check_document_separation,
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
    from portable.data.sizes import DataSizes


class AssembledModel(NamedTuple):
    """A model on the meta device, with its adapter."""

    model: PreTrainedModel
    """As it is trained."""
    adapter: Adapter | None
    """In ``model``; None if all of it is trained."""
    grown_from: int | None
    """The rows of its vocabulary before ``data.added_tokens``; None if it has not grown."""
    replaced_tokens: list[str]
    """The special tokens of a pretrained model that the tokenizer's replace, for the user."""


def assemble_model(
    config: RunConfig,
    model_config: PretrainedConfig,
    special_tokens: ModelSpecialTokens,
    tokenizer: Any,
    data: RunData | DataSizes,
) -> AssembledModel:
    """Build the model of a run for its data, with the rows, ids and adapter that it will have.

    Args:
        config: of the run.
        model_config: of the model; gets the vocabulary, the special tokens and what ``model.function``
            changes, which are saved with the weights.
        special_tokens: made of the two.
        tokenizer: of the data; None while it is not here.
        data: of the run, or what is known of it.

    Raises:
        UserError: for settings that do not fit the model, or a tokenizer that does not.
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
    assign_parameter_groups(model, config.train)  # refuses patterns that do not fit
    if config.model.task == "causal-lm":
        check_causal_attention(model)
    check_custom_rotary_layers(model, config)
    if config.data.packing == "documents":
        check_document_separation(model, seq_len=config.data.seq_len)
    check_parallel_support(model, config)
    # A new model has no special tokens to lose.
    return AssembledModel(model, adapter, grown_from, [] if config.model.name_or_path is None else aligned)


def check_parallel_support(model: PreTrainedModel, config: RunConfig) -> None:
    """Raise UserError if the ranks or devices of a run cannot share the sequences or layers of ``model``."""
    if config.context_parallel_size > 1:
        from portable.model.context_parallel_support import check_context_parallel_support

        check_context_parallel_support(model, config)
    if config.tensor_parallel_size > 1:
        from portable.model.tensor_parallel_plan import check_tensor_parallel_support

        check_tensor_parallel_support(model, config.tensor_parallel_size)


class InspectedRun(NamedTuple):
    """The model of a run, and the sizes of its data."""

    assembled: AssembledModel
    data: DataSizes


def inspect_run(config: RunConfig) -> InspectedRun:
    """Assemble the model of a run and inspect its data, without writing or downloading any data.

    Raises:
        UserError: for what a run refuses.
    """
    model_config = models.load_model_config(config.model)
    models.check_seq_len(model_config, config)
    read_problem_type(model_config, config.model)  # refuses what a run refuses
    special_tokens = ModelSpecialTokens(model_config, config.model)
    data = inspect_data_sizes(
        config.data, task=config.model.task, **build_data_arguments(config, model_config)
    )
    return InspectedRun(
        assemble_model(config, model_config, special_tokens, data.tokenizer_object, data), data
    )


def resolve_defaults(config: RunConfig) -> RunConfig:
    """Set the defaults that depend on the files of the adapter, the data and the model.

    Data is not downloaded. If the data is missing, ``data.format`` does not change.

    Raises:
        UserError: If a run would refuse the files.
    """
    config = resolve_adapter_config(config)
    try:
        kind = detect_run_format(config.data, config.model.task, downloads=False)
    except MissingDataError:  # the code that reads the data raises the error again
        kind = config.data.format
    return apply_default_packing(models.apply_default_seq_len(config.replaced({"data.format": kind})))


class PlanInputs(NamedTuple):
    """A resolved config and its model, for a plan.

    Attributes:
        config: The resolved config.
        model: The model on the meta device.
        sizes: The sizes of the data, or None if the data was not read.
    """

    config: RunConfig
    model: PreTrainedModel
    sizes: DataSizes | None


def resolve_and_build_model(config: RunConfig, *, with_data: bool = True) -> PlanInputs:
    """Resolve a config with the files on this machine, and build its model on the meta device.

    Args:
        config: Config of the run.
        with_data: Whether to read the data and the tokenizer, if they are on this machine.

    Raises:
        UserError: If a run would refuse the config.
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
    """What the model's settings and the loss say about the data, as arguments of ``build_data``.

    ``data.tokenizer: null`` means the pretrained model's tokenizer, or a new one of the model's size.
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
