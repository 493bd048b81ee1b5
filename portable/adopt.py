"""What a model's config takes over from data and tokenizer, so that the saved model is right by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

    from portable.config import ModelConfig


def adopt_labels(config: PretrainedConfig, names: Sequence[int | str]) -> None:
    """Give a classifier its classes, in the order of their ids; without names, leave it alone."""
    if not names:
        return
    if len(names) < 2:
        raise UserError("data.label_field: all records have one label; there is nothing to tell apart")
    config.num_labels = len(names)
    config.id2label = {index: str(name) for index, name in enumerate(names)}
    config.label2id = {str(name): index for index, name in enumerate(names)}


def adopt_special_tokens(config: PretrainedConfig, settings: ModelConfig, tokenizer: Any) -> None:
    """Take the ids of the tokenizer's special tokens, except where ``model.config`` names its own.

    A config's defaults are ids of the tokenizer that its first model came with: generation would stop at
    whatever token has that number here. A pretrained model keeps the ids that it has.
    """
    given = settings.config or {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        known = getattr(config, key, None)
        if key in given or (settings.name_or_path is not None and known is not None):
            continue
        setattr(config, key, getattr(tokenizer, key))
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = config.pad_token_id


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens the model has positions for; None where it has no bound."""
    bound = getattr(config.get_text_config(), "max_position_embeddings", None)
    return bound if isinstance(bound, int) and bound > 0 else None
