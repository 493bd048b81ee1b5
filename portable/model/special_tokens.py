"""What a model takes over from data and tokenizer, so that it is right by itself once it is saved."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from portable.data import LAST_LABEL, KnownClasses
from portable.data.classes import PROBLEMS, SINGLE
from portable.data.tokenizer import Vocabulary
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config import ModelConfig
    from portable.data import Classes, Frame
    from portable.data.classes import Problem

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_STARTS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")

# -- classes -------------------------------------------------------------------------------------------------


def known_classes(config: PretrainedConfig, settings: ModelConfig) -> KnownClasses | None:
    """The classes of a model whose head is trained, or that ``model.config`` names; None where it has none.

    What a regression tells in numbers counts as classes here.
    """
    if settings.task != "sequence-classification":
        return None
    place = "model.config" if settings.name_or_path is None else "model.name_or_path"
    given = settings.config or {} if settings.name_or_path is None else {}
    names = _class_names(config)
    if settings.name_or_path is None:
        known = any(key in given for key in ("num_labels", "id2label", "label2id"))
    elif settings.init == "scratch":
        known = False
    else:
        built = getattr(config, "architectures", None)
        named = any(not name.startswith("LABEL_") for name in names)
        known = any(n.endswith("ForSequenceClassification") for n in built) if built else named
    return KnownClasses(place, tuple(names)) if known else None


def problem_of(config: PretrainedConfig, settings: ModelConfig) -> Problem | None:
    """What a classifier's config says that it is for; None where its labels are to say it.

    Raises:
        UserError: transformers has no such classifiers.
    """
    kind = getattr(config, "problem_type", None)
    if settings.task != "sequence-classification" or kind is None:
        return None
    if kind not in PROBLEMS:
        place = "model.config" if settings.name_or_path is None else "model.name_or_path"
        raise UserError(f"{place}: problem_type is {kind!r}; it may be {', '.join(PROBLEMS)}")
    problem: Problem = kind
    return problem


def _class_names(config: PretrainedConfig) -> list[str]:
    """The names of a config's classes in the order of their ids."""
    count = int(config.num_labels or 0)
    by_id = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    names = [by_id.get(index, f"LABEL_{index}") for index in range(count)]
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        told = {int(index): str(name) for name, index in (config.label2id or {}).items()}
        names = [told.get(index, name) for index, name in enumerate(names)]
    return names


def classifies_at_the_end(config: PretrainedConfig) -> bool:
    """Whether a classifier looks at the last position, padding or not, so that padding must come first."""
    return getattr(config, "summary_type", None) == "last"


def classifies_at_end_token(config: PretrainedConfig) -> bool:
    """Whether a classifier looks for the end token of a text, as BART and T5 do, and fails without one."""
    from transformers import AutoModelForSequenceClassification

    try:
        kind: Any = AutoModelForSequenceClassification._model_mapping[type(config)]
    except KeyError:  # code from the hub, or no classifier at all
        return False
    return "eos_token_id" in inspect.unwrap(kind.forward).__code__.co_names


def adopt_labels(config: PretrainedConfig, classes: Classes | None) -> None:
    """Give a classifier its classes, in the order of their ids, and its loss; None leaves it alone."""
    if classes is None:
        return
    config.id2label = dict(enumerate(classes.names))
    config.label2id = {name: index for index, name in enumerate(classes.names)}
    if classes.problem != SINGLE or getattr(config, "problem_type", None) is not None:
        config.problem_type = classes.problem


# -- special tokens ------------------------------------------------------------------------------------------


@dataclass
class SpecialTokens:
    """The ids of special tokens: which a model is built with, and which it is saved with.

    A model is built with its config as it is, as transformers builds it: a padding id becomes the
    ``padding_idx`` of the embedding, the row of which gets no gradient. Only then do model, generation config
    and saved config take over the tokenizer's ids, as the Trainer does it.

    Attributes:
        config: what is saved with the weights.
        generation: the pretrained model's own; None where there is none.
    """

    config: PretrainedConfig
    settings: ModelConfig
    generation: Any = field(init=False)

    def __post_init__(self) -> None:
        self.generation = _pretrained_generation(self.settings)

    def prepare(self, tokenizer: Any) -> None:
        """Replace the ids that a config built from scratch has by default, before the model is built.

        These are ids of the tokenizer that the first model of its kind came with: generation would begin and
        stop at whatever tokens have those numbers here. A pretrained model keeps the ids that it has.
        """
        if self.settings.name_or_path is None:
            _replace_defaults(self.config, self.settings.config or {}, tokenizer)

    def decoder_start(self, tokenizer: Any) -> int:
        """What the decoder begins with in training; ``LAST_LABEL`` for a row's own last label, as in mBART.

        The model's own way to shift labels decides, with the config's start, or the generation config's.
        """
        config = self._with_start(tokenizer)
        start = _shifted_start(config)
        if start is None:
            start = config.decoder_start_token_id
        return config.pad_token_id if start is None else int(start)

    def label_shift(self, tokenizer: Any) -> LabelShift | None:
        """What makes a masked language model's decoder input from labels; None without a decoder."""
        if self.settings.task != "masked-lm" or not getattr(self.config, "is_encoder_decoder", False):
            return None
        config = self._with_start(tokenizer)
        if tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id  # as the model will have it
        return LabelShift(config)

    def _with_start(self, tokenizer: Any) -> Any:
        """The config with the ids that labels are shifted by."""
        config = copy.deepcopy(self.config)
        if self.settings.name_or_path is None:
            _replace_defaults(config, self.settings.config or {}, tokenizer)
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(self.generation, "decoder_start_token_id", None)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = Vocabulary.of(tokenizer).pad
        return config

    def align(self, model: PreTrainedModel, tokenizer: Any, target: Frame | None = None) -> list[str]:
        """Give ``model``, its generation config and the config to save the ids that the Trainer gives them.

        Args:
            model: as it was built.
            tokenizer: of the data; one without a padding token gets its end token for a classifier.
            target: what stands around a target text, where there are any.

        Returns:
            what a person should be told of.
        """
        if self.generation is not None and getattr(model, "generation_config", None) is not None:
            model.generation_config = self.generation
        generation = getattr(model, "generation_config", None)
        text = model.config.get_text_config()
        notes = []
        for name in _IDS:
            if (change := _align(name, getattr(tokenizer, name), text, generation)) is not None:
                notes.append(change)
        if self.settings.task == "sequence-classification":
            self._align_padding(text, tokenizer, notes)
        if getattr(model.config, "is_encoder_decoder", False):
            self._align_start(model.config, generation, tokenizer, target)
        saved = self.config.get_text_config()
        for name in _IDS:
            if hasattr(text, name):
                setattr(saved, name, getattr(text, name))
        if getattr(model.config, "is_encoder_decoder", False):
            self.config.decoder_start_token_id = model.config.decoder_start_token_id
        return notes

    def _align_padding(self, text: Any, tokenizer: Any, notes: list[str]) -> None:
        """A decoder classifies at the last token that is no padding: its config must say what padding is."""
        fill = Vocabulary.of(tokenizer).pad
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id == fill:
            tokenizer.pad_token = tokenizer.eos_token
        if getattr(text, "pad_token_id", None) != fill:
            notes.append(f"pad_token_id {getattr(text, 'pad_token_id', None)} -> {fill}")
            text.pad_token_id = fill

    def _align_start(self, config: Any, generation: Any, tokenizer: Any, target: Frame | None) -> None:
        """What generation begins with, which is what training began with."""
        prefix, suffix = ((), ()) if target is None else (target.prefix, target.suffix)
        several = getattr(tokenizer, "tgt_lang", None) is not None  # its texts name their language
        start: int | None = self.decoder_start(tokenizer)
        if start == LAST_LABEL:
            start = suffix[-1] if suffix else None
        if getattr(config, "decoder_start_token_id", None) is None or (several and suffix and not prefix):
            config.decoder_start_token_id = start
        if generation is None:
            return
        generation.decoder_start_token_id = config.decoder_start_token_id
        if several and prefix:
            generation.forced_bos_token_id = prefix[0]


class LabelShift:
    """Gives the decoder its labels, shifted by the model's own way, as ``forward(labels=...)`` does.

    Args:
        config: of an encoder-decoder, with the ids that it is trained with.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config

    def __call__(self, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        from transformers import AutoModelForSeq2SeqLM

        model = _without_layers(AutoModelForSeq2SeqLM, self._config)
        shifted = model.prepare_decoder_input_ids_from_labels(labels=torch.from_numpy(labels))
        return np.asarray(shifted.numpy())


def _without_layers(auto_class: Any, config: Any) -> Any:
    """A model that has its config alone, which is all that it shifts labels by."""
    kind = auto_class._model_mapping[type(config)]
    model = object.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    return model


def _pretrained_generation(settings: ModelConfig) -> Any:
    """The generation config that ``from_pretrained`` gives a model."""
    if settings.from_scratch or settings.task == "sequence-classification":
        return None
    from transformers import GenerationConfig

    name = settings.name_or_path
    assert name is not None
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:  # it has none of its own: what its config says of generation
        pass
    try:
        return GenerationConfig.from_pretrained(name, config_file_name="config.json", _from_model_config=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name_or_path: {one_line(error)}") from error


def _replace_defaults(config: Any, given: dict[str, Any], tokenizer: Any) -> None:
    parts = [("", config), *((name, getattr(config, name, None)) for name in config.sub_configs)]
    for name, part in parts:
        if part is config or hasattr(part, "vocab_size"):  # of text, not of pictures
            inner = given.get(name, {}) if name else given
            _replace_defaults_of(part, inner if isinstance(inner, dict) else {}, tokenizer)


def _replace_defaults_of(config: Any, given: dict[str, Any], tokenizer: Any) -> None:
    defaults = {name: getattr(config, name, None) for name in _IDS}
    size = getattr(config.get_text_config(), "vocab_size", None)

    def outside(token: Any) -> bool:
        return isinstance(size, int) and isinstance(token, int) and token >= size

    own = tokenizer.pad_token_id
    own = None if own in (tokenizer.bos_token_id, tokenizer.eos_token_id) else own
    replaced = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if (default := defaults["pad_token_id"]) is not None:
        # The row of a padding id gets no gradient: it must not be that of a token that stands in the text.
        replaced["pad_token_id"] = own if own is not None or outside(default) else default
    for name, value in replaced.items():
        if name not in given and hasattr(config, name):
            setattr(config, name, value)
    for name in _STARTS:
        default = getattr(config, name, None)
        if name in given or default is None:
            continue
        roles = ("eos_token_id", "pad_token_id", "bos_token_id")
        if (role := next((role for role in roles if defaults[role] == default), None)) is not None:
            setattr(config, name, getattr(tokenizer, role))
        elif outside(default):
            setattr(config, name, None)


def _shifted_start(config: Any) -> int | None:
    """What the model itself puts before labels; None where it cannot be asked."""
    from transformers import AutoModelForSeq2SeqLM

    try:
        model = _without_layers(AutoModelForSeq2SeqLM, config)
        free = [n for n in range(8) if n not in (config.pad_token_id, config.decoder_start_token_id)][:4]
        first, second = ([*free[:2], last] for last in free[2:])
        shift = model.prepare_decoder_input_ids_from_labels
        shifted = [shift(labels=torch.tensor([labels]))[0].tolist() for labels in (first, second)]
    except Exception:  # whatever a model's own code wants besides
        return None
    starts = [row[0] for row in shifted]
    if starts == [first[-1], second[-1]]:
        return LAST_LABEL
    return int(starts[0]) if starts[0] == starts[1] else None


def _align(name: str, token: int | None, config: Any, generation: Any) -> str | None:
    """One id of the Trainer's ``align_special_tokens``; what changed, in words.

    An id that the tokenizer does not define is left alone. Several end tokens all stay, behind its own.
    """
    if token is None:
        return None
    several = name == "eos_token_id"
    ours = getattr(config, name, None)
    theirs = getattr(generation, name, None)
    before = ours if isinstance(ours, list) else [ours]
    stops = theirs if isinstance(theirs, list) else [theirs]
    if token in before and (generation is None or token in stops):
        return None
    if several and isinstance(ours, list):
        setattr(config, name, [token, *(other for other in ours if other != token)])
    else:
        setattr(config, name, token)
    told = f"{name} {ours} -> {getattr(config, name)}" if getattr(config, name) != ours else None
    if generation is not None:
        kept = [token, *(other for other in stops if other is not None and other != token)]
        setattr(generation, name, kept if several and len(kept) > 1 else token)
        if told is None and theirs is not None:
            told = f"{name} of generation {theirs} -> {getattr(generation, name)}"
    return told


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens the model has positions for; None where it has no bound."""
    bound = getattr(config.get_text_config(), "max_position_embeddings", None)
    return bound if isinstance(bound, int) and bound > 0 else None
