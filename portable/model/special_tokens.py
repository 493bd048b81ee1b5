"""Align the special token ids of a model and its saved configs with the tokenizer.

The ids include the decoder start token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from portable.data.samples.base import LAST_LABEL
from portable.data.tokens.tokenizer import Vocabulary
from portable.hub_requests import read_hub_once_per_node
from portable.private.transformers_internals import get_model_class, read_generation_config
from portable.untrusted_settings import convert_library_errors

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config.sections import ModelConfig
    from portable.data.tokens.special_tokens import Frame

_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION_TOKEN_KEYS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


@dataclass
class ModelSpecialTokens:
    """Special token ids of a run's model, and the configs that contain them.

    The ids are stored in three configs: the model's own config, its generation config and the
    config that is saved with the weights. The model's own config is a copy of the saved config, and
    the model is built with the ids in this copy, as in transformers. The padding id then becomes
    the ``padding_idx`` of the embedding, so the row of this id gets no gradient. Later,
    :meth:`align_token_ids` receives the model and sets the tokenizer's ids in all three configs, as
    transformers' Trainer does. For encoder-decoder models, the class also determines the decoder
    start id and builds the label shift.

    Attributes:
        saved_config: Config that is saved with the weights.
        settings: The ``model`` section of the config.
        generation_config: Generation config of the pretrained model. It is loaded when the object
            is created, which may raise :class:`UserError`. None if the run trains from scratch or
            trains a classifier.
    """

    saved_config: PretrainedConfig
    settings: ModelConfig
    generation_config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.generation_config = _load_generation_config(self.settings)

    def replace_default_ids(self, tokenizer: Any) -> None:
        """Replace the default special token ids in the saved config with the ids of the tokenizer.

        The saved config is the model config that is saved with the weights. The defaults of its
        class are ids of another tokenizer, so generation would start and stop at arbitrary tokens.
        Ids that the user sets in ``model.config`` do not change. Does nothing if
        ``model.name_or_path`` is set, because a pretrained config already has the correct ids. Call
        this method before the model is built.

        Args:
            tokenizer: Tokenizer of the run.
        """
        if self.settings.name_or_path is None:
            _replace_default_ids(self.saved_config, self.settings.config or {}, tokenizer)

    def compute_decoder_start(self, tokenizer: Any) -> int:
        """Determine the id of the decoder's first token.

        The id is found by running the model's label shift, the method that computes decoder inputs
        from labels, on a few made-up labels. If this does not give a result, the id is
        ``decoder_start_token_id`` of the config or the generation config. If neither has one, it is
        the padding id.

        Args:
            tokenizer: Tokenizer of the run.

        Returns:
            The id. ``LAST_LABEL`` if the decoder starts with the last label of the row, as in
            mBART.
        """
        config = self._copy_config_with_start(tokenizer)
        start = _find_shifted_start(config)
        if start is None:
            start = config.decoder_start_token_id
        return config.pad_token_id if start is None else int(start)

    def build_label_shift(self, tokenizer: Any) -> LabelShift | None:
        """Build the function that derives decoder inputs from labels, for an encoder-decoder masked-lm model.

        Args:
            tokenizer: Tokenizer of the run.

        Returns:
            The function. None if the task is not ``masked-lm`` or the model has no decoder.
        """
        if self.settings.task != "masked-lm" or not getattr(self.saved_config, "is_encoder_decoder", False):
            return None
        config = self._copy_config_with_start(tokenizer)
        if tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id  # `align_token_ids` sets the same id later
        return LabelShift(config)

    def _copy_config_with_start(self, tokenizer: Any) -> Any:
        """Copy the saved config, and set missing decoder start and padding ids in the copy.

        The start id comes from the generation config, and the padding id from the tokenizer.
        Without ``model.name_or_path``, the default token ids are first replaced with the
        tokenizer's ids. The start id may still be None.
        """
        config = copy.deepcopy(self.saved_config)
        if self.settings.name_or_path is None:
            _replace_default_ids(config, self.settings.config or {}, tokenizer)
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(self.generation_config, "decoder_start_token_id", None)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = Vocabulary.from_tokenizer(tokenizer).pad_token
        return config

    def align_token_ids(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        target: Frame | None = None,
        end_of_turn: int | None = None,
    ) -> list[str]:
        """Copy the tokenizer's beginning, end and padding ids to the configs of the model.

        The configs are the model's config, its generation config, and the config that is saved
        with the weights. This follows transformers' Trainer. Ids that the tokenizer does not have
        do not change, except the padding id of a classifier. For an encoder-decoder model, the
        decoder start token is also set.

        Before the ids are copied, :attr:`generation_config` replaces the generation config of the
        model, unless one of the two configs is None.

        Args:
            model: The built model.
            tokenizer: Tokenizer of the run. For a classifier, the end token becomes the tokenizer's
                padding token if it has none.
            target: Special tokens around a target text. None if there are no targets.
            end_of_turn: Token that ends the answers of a chat model. Generation also stops at this
                token.

        Returns:
            Descriptions of the changes, for the user.
        """
        if self.generation_config is not None and getattr(model, "generation_config", None) is not None:
            model.generation_config = self.generation_config
        generation = getattr(model, "generation_config", None)
        text = model.config.get_text_config()
        notes = []
        for name in _TOKEN_ID_KEYS:
            if (change := _align_token_id(name, getattr(tokenizer, name), text, generation)) is not None:
                notes.append(change)
        if end_of_turn is not None and generation is not None:
            notes += _add_stop_token(end_of_turn, generation)
        if self.settings.task == "sequence-classification":
            self._align_padding_id(text, tokenizer, notes)
        if getattr(model.config, "is_encoder_decoder", False):
            self._align_decoder_start(model.config, generation, tokenizer, target)
        saved_text_config = self.saved_config.get_text_config()
        for name in _TOKEN_ID_KEYS:
            if hasattr(text, name):
                setattr(saved_text_config, name, getattr(text, name))
        if getattr(model.config, "is_encoder_decoder", False):
            self.saved_config.decoder_start_token_id = model.config.decoder_start_token_id
        return notes

    def _align_padding_id(self, text: Any, tokenizer: Any, notes: list[str]) -> None:
        """Set the padding id of a classifier.

        A decoder uses this id to find the last token of a text. The id is the tokenizer's
        padding token. If the tokenizer has none, the id is the end token, the separator or 0, in
        this order. See :class:`Vocabulary`.

        Args:
            text: Text config of the model. Modified in place.
            tokenizer: Tokenizer of the run. If it lacks a padding token but has an end-of-sequence
                token, this token becomes its padding token.
            notes: List to which a note is appended if the id changes.
        """
        fill = Vocabulary.from_tokenizer(tokenizer).pad_token
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id == fill:
            tokenizer.pad_token = tokenizer.eos_token
        if getattr(text, "pad_token_id", None) != fill:
            notes.append(f"pad_token_id {getattr(text, 'pad_token_id', None)} -> {fill}")
            text.pad_token_id = fill

    def _align_decoder_start(
        self, config: Any, generation: Any, tokenizer: Any, target: Frame | None
    ) -> None:
        """Make generation start with the same decoder token as training.

        A decoder start token that the config already has is kept, with one exception for
        multilingual tokenizers. These tokenizers add a language token to the labels:

        - If the language token is at the end of the labels, the decoder start token in the config
          is set to the first decoder token in training, even if the config already has one.
        - If the language token is at the start of the labels, it is forced as the first generated
          token.

        Args:
            config: Config of the model. Modified in place.
            generation: Generation config. Modified in place. May be None.
            tokenizer: Tokenizer of the run.
            target: Special tokens around a target text. None if there are no targets.
        """
        prefix, suffix = ((), ()) if target is None else (target.prefix, target.suffix)
        is_multilingual = getattr(tokenizer, "tgt_lang", None) is not None  # a multilingual tokenizer
        start: int | None = self.compute_decoder_start(tokenizer)
        if start == LAST_LABEL:
            start = suffix[-1] if suffix else None
        if getattr(config, "decoder_start_token_id", None) is None or (
            is_multilingual and suffix and not prefix
        ):
            config.decoder_start_token_id = start
        if generation is None:
            return
        generation.decoder_start_token_id = config.decoder_start_token_id
        if is_multilingual and prefix:
            generation.forced_bos_token_id = prefix[0]


class LabelShift:
    """Function that shifts labels to the right to get decoder inputs.

    The result is the same as in the model's ``forward(labels=...)``.

    Args:
        config: Config of an encoder-decoder model. Its ``decoder_start_token_id`` and
            ``pad_token_id`` must already have the values that the run uses.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config

    def __call__(self, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Shift labels, int64 ``[batch, tokens]``, to decoder inputs of the same shape."""
        from transformers import AutoModelForSeq2SeqLM

        model = _build_model_without_layers(AutoModelForSeq2SeqLM, self._config)
        shifted = model.prepare_decoder_input_ids_from_labels(labels=torch.from_numpy(labels))
        return np.asarray(shifted.numpy())


def _build_model_without_layers(auto_class: Any, config: Any) -> Any:
    """Create a model object that has only a config, without running its constructor.

    The object is sufficient for the label shift: the model's method that computes decoder inputs
    from labels needs only the config.

    Args:
        auto_class: Auto class in transformers that selects the model class.
        config: Transformers config of the model.
    """
    model_class = get_model_class(auto_class, config)
    model = object.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    return model


def _load_generation_config(settings: ModelConfig) -> Any:
    """Load the generation config of the pretrained model, as ``from_pretrained`` does.

    Returns:
        The generation config. None if the run trains from scratch or trains a classifier.

    Raises:
        UserError: If the generation config cannot be loaded.
    """
    name = settings.name_or_path
    if name is None or settings.from_scratch or settings.task == "sequence-classification":
        return None
    from transformers import GenerationConfig

    def load() -> Any:
        try:
            return GenerationConfig.from_pretrained(name)
        except OSError:  # no generation_config.json: read the generation settings of config.json
            return read_generation_config(name)

    with convert_library_errors("model.name_or_path"):
        return read_hub_once_per_node(name, "generation config", load)


def _replace_default_ids(config: Any, values: dict[str, Any], tokenizer: Any) -> None:
    """Replace the default token ids in a config and its text configs with the tokenizer's ids.

    Args:
        config: Transformers config. Modified in place.
        values: Value of ``model.config``. Token ids that the user has set there are kept.
        tokenizer: Tokenizer of the run.
    """
    parts = [("", config), *((name, getattr(config, name, None)) for name in config.sub_configs)]
    for name, part_config in parts:
        if part_config is config or hasattr(part_config, "vocab_size"):  # text parts only
            part_values = values.get(name, {}) if name else values
            _replace_text_default_ids(
                part_config, part_values if isinstance(part_values, dict) else {}, tokenizer
            )


def _replace_text_default_ids(config: Any, values: dict[str, Any], tokenizer: Any) -> None:
    """Replace the default token ids in one text config with the tokenizer's ids.

    The padding id is replaced only if the config has one. If the tokenizer has no separate padding
    token, the padding id is kept. However, it is removed if it exceeds the vocabulary.

    The config may also contain ids for the decoder start token, and for the tokens that generation
    must produce first and last. If such an id equals the config's default end, padding or beginning
    id, it is assumed to have the same role. It is then replaced with the tokenizer's id for this
    role. For example, a decoder start id that equals the padding id becomes the tokenizer's padding
    id. Any other id is kept, or removed if it exceeds the vocabulary.

    Args:
        config: Text config. Modified in place.
        values: User settings for this config. Token ids that are set there are kept.
        tokenizer: Tokenizer of the run.
    """
    defaults = {name: getattr(config, name, None) for name in _TOKEN_ID_KEYS}
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)

    def is_outside(token: Any) -> bool:
        return isinstance(vocab_size, int) and isinstance(token, int) and token >= vocab_size

    padding = tokenizer.pad_token_id
    padding = None if padding in (tokenizer.bos_token_id, tokenizer.eos_token_id) else padding
    replaced = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if (default := defaults["pad_token_id"]) is not None:
        # The row of a padding id gets no gradient, so it must not belong to a token of the text.
        replaced["pad_token_id"] = padding if padding is not None or is_outside(default) else default
    for name, value in replaced.items():
        if name not in values and hasattr(config, name):
            setattr(config, name, value)
    for name in _GENERATION_TOKEN_KEYS:
        default = getattr(config, name, None)
        if name in values or default is None:
            continue
        roles = ("eos_token_id", "pad_token_id", "bos_token_id")
        if (role := next((role for role in roles if defaults[role] == default), None)) is not None:
            setattr(config, name, getattr(tokenizer, role))
        elif is_outside(default):
            setattr(config, name, None)


def _find_shifted_start(config: Any) -> int | None:
    """Find the first decoder input token that a model's label shift produces.

    The label shift is the model's method that computes decoder inputs from labels. It runs on two
    test sequences that differ only in their last label. If both results start with the same token,
    this token is the start token. If each result starts with the last label of the corresponding
    sequence, the label shift moves the last label to the front, as in mBART.

    Returns:
        The id of the start token, or ``LAST_LABEL`` if the label shift moves the last label to the
        front. None in all other cases, for example if the label shift cannot be run on test labels.
    """
    from transformers import AutoModelForSeq2SeqLM

    try:
        model = _build_model_without_layers(AutoModelForSeq2SeqLM, config)
        free = [n for n in range(8) if n not in (config.pad_token_id, config.decoder_start_token_id)][:4]
        first, second = ([*free[:2], last] for last in free[2:])
        shift = model.prepare_decoder_input_ids_from_labels
        shifted = [shift(labels=torch.tensor([labels]))[0].tolist() for labels in (first, second)]
    except Exception:  # the code of the model may need more than its config
        return None
    starts = [row[0] for row in shifted]
    if starts == [first[-1], second[-1]]:
        return LAST_LABEL
    return int(starts[0]) if starts[0] == starts[1] else None


def _add_stop_token(token: int, generation: Any) -> list[str]:
    """Add an end token to a generation config in place, so that generation also stops at this token.

    Returns:
        A list with a note for the user. Empty if generation already stops at the token.
    """
    before = generation.eos_token_id
    stops = before if isinstance(before, list) else [] if before is None else [before]
    if token in stops:
        return []
    generation.eos_token_id = [token, *stops] if stops else token
    return [
        f"eos_token_id of the generation config {before} -> {generation.eos_token_id}, to stop at the end "
        "of a turn"
    ]


def _align_token_id(name: str, token: int | None, config: Any, generation: Any) -> str | None:
    """Set a special token id in the model config and generation config, like transformers' Trainer.

    If the id is already among the ids in both configs, nothing changes. Otherwise, the
    tokenizer's end token becomes the first end token. The other end tokens are kept in the
    generation config, and also in the model config if it has a list of end tokens.

    Args:
        name: Name of the id, such as ``eos_token_id``.
        token: Id in the tokenizer. If it is None, nothing changes.
        config: Text config of the model. Modified in place.
        generation: Generation config. Modified in place. May be None.

    Returns:
        A note for the user. None if neither config changes, or if only the generation config
        changes and had no such id before.
    """
    if token is None:
        return None
    allows_several = name == "eos_token_id"
    config_value = getattr(config, name, None)
    generation_value = getattr(generation, name, None)
    config_ids = config_value if isinstance(config_value, list) else [config_value]
    generation_ids = generation_value if isinstance(generation_value, list) else [generation_value]
    if token in config_ids and (generation is None or token in generation_ids):
        return None
    if allows_several and isinstance(config_value, list):
        setattr(config, name, [token, *(other_id for other_id in config_value if other_id != token)])
    else:
        setattr(config, name, token)
    note = (
        f"{name} {config_value} -> {getattr(config, name)}" if getattr(config, name) != config_value else None
    )
    if generation is not None:
        end_tokens = [
            token,
            *(other_id for other_id in generation_ids if other_id is not None and other_id != token),
        ]
        setattr(generation, name, end_tokens if allows_several and len(end_tokens) > 1 else token)
        if note is None and generation_value is not None:
            note = f"{name} of the generation config {generation_value} -> {getattr(generation, name)}"
    return note
