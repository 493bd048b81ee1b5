"""Build the tokenizer, the training set and the evaluation set from the ``data`` section of a config."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from portable.config.evaluation_sources import ALONE, HELD_OUT, evaluation_sources, key_of, of_source
from portable.config.sections import DataConfig
from portable.data.cache import CacheDamagedError, TokenCache
from portable.data.chat_template import ChatTemplate, chat_template
from portable.data.classes import Classes, KnownClasses, Problem, classes_as, classes_of
from portable.data.packing import PackedDocuments, packed_sizes, planned
from portable.data.samples import (
    PackedCausal,
    PaddedCausal,
    Pairs,
    Part,
    Samples,
    WithColumns,
    packed_samples,
    split_blocks,
    split_documents,
)
from portable.data.sources import Fields, Source, open_source
from portable.data.tasks import Classification, LabelShift, MaskedLM, Seq2Seq
from portable.data.tokenize import Frame, frame, token_cache_folder, tokenize
from portable.data.tokenizer import (
    PairFrame,
    Vocabulary,
    check_languages,
    is_trained,
    load_tokenizer,
    train_tokenizer,
    trained_tokenizer_folder,
    trained_vocab_size,
)
from portable.data.truncation import Truncated, answered_blocks, keeps_an_end, truncated
from portable.errors import UserError
from portable.paths import default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from portable.data.conversations import Format

CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
)


PREFERENCE = "preference"
MAX_CUT = 0.05  # a larger share of truncated tokens causes a warning


@dataclass(frozen=True)
class DataSizes:
    """The size of the data; ``None`` for values that are unknown until it is tokenized."""

    source: str
    tokenizer: str
    vocab_size: int | None
    """One more than the tokenizer's largest id."""
    seq_len: int
    packing: bool | Literal["documents"]
    documents: int | None = None
    tokens: int | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    cut: float = 0.0
    """The share of truncated tokens in documents longer than ``seq_len``."""
    waste: float | None = None
    """With packed documents, the share of positions to train on that are padding."""
    truncated: Truncated | None = None
    """What truncation does to conversations, or to texts where it does not only cut their ends."""
    trained: float | None = None
    """The share of a conversation's tokens that is trained."""
    prompt_left: str = ""
    """What a generation prompt of the template has that no answer in the data begins with."""
    cached: Path | None = None
    """The token cache, if it exists."""
    evals: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    """Source and samples of each of ``data.eval``, by name."""
    trained_on: tuple[str, ...] = ()
    """The names of those that have files of the training data."""
    opened: Any = field(default=None, compare=False, repr=False)
    """The tokenizer, if it is available locally."""
    target_frame: Frame | None = field(default=None, compare=False, repr=False)
    """The special tokens around a target text, if the tokenizer is available."""

    def __str__(self) -> str:
        vocabulary = "" if self.vocab_size is None else f" ({self.vocab_size:,} tokens)"
        packed = "whole documents packed" if self.packing == "documents" else "packed"
        made = f"samples of {self.seq_len} tokens, {packed if self.packing else 'padded'}"
        how = f"{self.tokenizer}{vocabulary}; {made}"
        own = "".join(
            f"; evaluation{f' {name}' if name else ''}: {source}"
            + ("" if samples is None else f", {samples:,} samples")
            for name, (source, samples) in self.evals.items()
        )
        if self.cached is None:
            return f"{self.source}: sizes are known after tokenizing by {how}{own}"
        held_out = f", {self.eval_samples:,} to evaluate" if self.eval_samples or not self.evals else ""
        text = (
            f"{self.source}: {self.documents:,} documents, {self.tokens:,} tokens by {how}: "
            f"{self.train_samples:,} to train{held_out}{own}"
        )
        text += "" if self.trained is None else f"; {self.trained:.1%} of the tokens are trained"
        if self.waste is not None:
            text += f"; {self.waste:.2%} of the positions are padding"
        return text if self.cut <= MAX_CUT else f"{text}; {self.cut:.0%} of the tokens are cut off"

    @property
    def warnings(self) -> list[str]:
        """What may surprise the user about the data, a line each."""
        found = []
        if self.truncated is not None and (lost := str(self.truncated)):
            found.append(f"data.truncation: of the samples, {lost}")
        elif self.cut > MAX_CUT:
            found.append(self._cut_warning)
        found += [f"{key_of(name)}: the run is trained on files of it, too" for name in self.trained_on]
        if self.prompt_left:
            found.append(
                f"data.chat_template: its generation prompt ends in {self.prompt_left!r}, which it does not "
                "write before the answers of the data: the model is trained without it"
            )
        return found

    @property
    def _cut_warning(self) -> str:
        return (
            f"data.seq_len: {self.cut:.0%} of the tokens are cut off, because documents are truncated to "
            f"{self.seq_len} tokens; raise it, set data.packing to true (language models), or for .txt files "
            "set data.text_split to paragraph or line"
        )


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    tokenizer: Any
    train: Samples
    evals: Mapping[str, Samples]
    """To evaluate on, by name; a single source has the empty name."""
    sizes: DataSizes
    fingerprint: str
    """A digest of every token and label; equal on all machines with the same text and tokenizer."""
    vocab_size: int
    """One more than the tokenizer's largest id: the minimum size of the model's embedding."""
    classes: Classes | None = None
    """For classification, the outputs of the model."""
    target_frame: Frame | None = None
    """For seq2seq, the special tokens around each target."""
    tokens: TokenCache | None = None
    """All tokens of the source of ``train``."""
    end_of_turn: int | None = None
    """For conversations, the token after which the assistant has said everything."""
    eval_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """The same for each source of ``data.eval``. It may change between the launches of a run."""

    @property
    def eval(self) -> Samples | None:
        """The first of ``evals``."""
        return next(iter(self.evals.values()), None)

    @property
    def label_names(self) -> tuple[str, ...]:
        """For classification, the classes in the order of their ids."""
        return () if self.classes is None else self.classes.names

    @property
    def num_labels(self) -> int | None:
        return len(self.label_names) or None

    @property
    def description(self) -> str:
        return str(self.sizes)


def build_data(
    settings: DataConfig,
    *,
    task: str = CAUSAL,
    seed: int = 0,
    model_tokenizer: str | None = None,
    model_vocab_size: int | None = None,
    ends_texts: bool = False,
    decoder_start_token_id: int | Callable[[Any], int] | None = None,
    label_shift: Callable[[Any], LabelShift | None] | None = None,
    known_classes: KnownClasses | None = None,
    problem: Problem | None = None,
    pad_left: bool = False,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Data:
    """Open the data. Tokenizes it first if it is not cached.

    Every rank calls this with the same arguments. On each machine one rank builds what is missing in the
    cache and shows progress, while the others wait.

    Args:
        settings: the ``data`` section. task: one of ``TASKS``. seed: for the masking of a masked language
        model. model_tokenizer: the pretrained model's tokenizer, used if ``data.tokenizer`` is null; None
        trains one.
        model_vocab_size: the size of a trained tokenizer if ``data.vocab_size`` is null.
        ends_texts: every text must have an end token, because the model classifies there.
        decoder_start_token_id: the first decoder input of seq2seq, a function of the tokenizer that returns
            it, or ``LAST_LABEL``; None for the padding token.
        label_shift: a function of the tokenizer that returns the label shift of a masked language model with
            a decoder.
        known_classes: the classes of the model, if any.
        problem: ``problem_type`` of the model's config.
        pad_left: pad a classifier's texts on the left.
        trust_remote_code: run Python code of the tokenizer.
        progress: show progress on stderr if it takes more than a second.

    Raises:
        UserError: if the settings or the data cannot be used.
    """
    cache = _cache_dir(settings)
    settings, source = _recognised(settings, task, _source(settings, task, cache))
    eval_sources = _eval_sources(settings, task, source)
    name = settings.tokenizer or model_tokenizer
    if name is not None:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, **_languages(settings, task))
    else:
        size = settings.vocab_size or model_vocab_size
        kind = {"mask": task == MASKED, "ends": ends_texts, "chat": _converses(settings)}
        tokenizer = train_tokenizer(source, size, cache, **kind)
    reading = Reading(
        task,
        tokenizer,
        _vocabulary(tokenizer, task, ends_texts=ends_texts),
        seed=seed,
        decoder_start_token_id=decoder_start_token_id,
        label_shift=label_shift,
        pad_left=pad_left,
    )
    opened = reading.open(settings, source, progress=progress)
    _check_ends(opened, tokenizer)
    classes: Classes | None = None
    if task == CLASSIFICATION:
        classes = classes_of(opened.tokens, source.class_names, known_classes, problem)
    train, held_out = _parts(settings, task, opened.tokens, opened.truncated)
    evals = {}
    for key, (own, own_source) in eval_sources.items():
        with errors_under(key_of(key)):
            evals[key] = reading.open(own, own_source, progress=progress)
    samples = {name: _all_samples(name, reading, one, opened, classes) for name, one in evals.items()}
    if held_out.num_samples:
        samples[HELD_OUT if evals else ALONE] = reading.samples(opened, held_out, classes)
    sizes = _sizes(settings, task, source, name, reading.vocabulary.size, opened.tokens, opened.truncated)
    return Data(
        tokenizer=tokenizer,
        train=reading.samples(opened, train, classes),
        evals=samples,
        sizes=replace(
            sizes,
            evals={key: (evals[key].source.name, len(samples[key])) for key in evals},
            trained_on=_trained_on(source, eval_sources),
        ),
        fingerprint=opened.tokens.fingerprint,
        vocab_size=reading.vocabulary.size,
        classes=classes,
        target_frame=_target_frame(opened.framed, task),
        tokens=opened.tokens,
        end_of_turn=opened.tokens.meta.get("end_of_turn"),
        eval_fingerprints={key: one.tokens.fingerprint for key, one in evals.items()},
    )


def _eval_sources(
    settings: DataConfig, task: str, training: Source, *, remember: bool = True
) -> dict[str, tuple[DataConfig, Source]]:
    """The sources of ``data.eval`` with their settings, by name."""
    found = {}
    for name, own in evaluation_sources(settings).items():
        with errors_under(key_of(name)):
            source = _source(own, task, _cache_dir(own), remember=remember)
            if remember or not source.downloads:
                own, source = _recognised(own, task, source, remember=remember)
            source.check()
        found[name] = own, source
        if (remember or not source.remote) and source.key == training.key:
            raise UserError(f"{key_of(name)}: is the training data itself; name other files or another split")
    return found


def _trained_on(training: Source, evals: Mapping[str, tuple[DataConfig, Source]]) -> tuple[str, ...]:
    """The names of the evaluation sources that have files of the training data."""
    return tuple(name for name, (_, source) in evals.items() if training.contents & source.contents)


def _all_samples(
    name: str, reading: Reading, opened: Opened, training: Opened, classes: Classes | None
) -> Samples:
    """All samples of an evaluation source."""
    with errors_under(key_of(name)):
        if classes is not None:
            declared = training.source.class_names
            classes = classes_as(classes, training.tokens, declared, opened.tokens, opened.source.class_names)
        part, _ = _parts(opened.settings, reading.task, opened.tokens, opened.truncated)
        return reading.samples(opened, part, classes)


@contextmanager
def errors_under(key: str) -> Iterator[None]:
    """Within this context, errors about a setting of ``data`` name the same setting of ``key``."""
    try:
        yield
    except UserError as error:
        own = "|".join(of_source(DataConfig))
        said = re.sub(rf"\bdata\.(?=({own})\b)", f"{key}.", str(error))
        raise UserError(said if key in said else f"{key}: {said}") from error


@dataclass(frozen=True)
class Opened:
    """A source as tokens, with the settings that it was opened with."""

    settings: DataConfig
    source: Source
    framed: Frame
    tokens: TokenCache
    truncated: Truncated | None = None


@dataclass(frozen=True)
class Reading:
    """How the sources of a run become tokens and samples: equal for all of them.

    What may differ between sources (files, fields, lengths) stands in the ``settings`` of each.

    Attributes:
        task: one of ``TASKS``.
        seed, decoder_start_token_id, label_shift, pad_left: as in :func:`build_data`.
    """

    task: str
    tokenizer: Any
    vocabulary: Vocabulary
    seed: int = 0
    decoder_start_token_id: int | Callable[[Any], int] | None = None
    label_shift: Callable[[Any], LabelShift | None] | None = None
    pad_left: bool = False

    def framed(self, settings: DataConfig) -> Frame:
        """The special tokens around each text."""
        return _frame(settings, self.task, self.tokenizer, self.vocabulary)

    def open(self, settings: DataConfig, source: Source, *, progress: bool = False) -> Opened:
        """Tokenize ``source``, if it is not cached."""
        framed, fields = self.framed(settings), _fields(settings, self.task)
        cache = _cache_dir(settings)
        tokens = tokenize(
            source,
            self.tokenizer,
            self.vocabulary,
            fields,
            framed,
            cache,
            chat=self.chat(settings),
            progress=progress,
        )
        return Opened(settings, source, framed, tokens, _truncated(settings, self.task, tokens))

    def chat(self, settings: DataConfig) -> ChatTemplate | None:
        """What tokenizes conversations; None for plain text. Saves a chosen template with the tokenizer."""
        if not _converses(settings):
            return None
        given = settings.chat_template
        has_one = given is not None or getattr(self.tokenizer, "chat_template", None)
        # Prompts and completions may be strings, which need none.
        needs_one = settings.format != "prompt_completion" or has_one
        templates = chat_template(self.tokenizer, given) if needs_one else None
        if given is not None:
            self.tokenizer.chat_template = templates
        return ChatTemplate(
            self.tokenizer,
            templates,
            self.framed(settings),
            train_on=settings.train_on,
            split_turns=settings.split_turns,
            kwargs=settings.chat_template_kwargs,
        )

    def cached(self, settings: DataConfig, source: Source) -> Opened | None:
        """``source``, if its tokens are cached."""
        if source.remote:
            return None
        framed = self.framed(settings)
        folder = token_cache_folder(source, self.tokenizer, framed, _cache_dir(settings), self.chat(settings))
        with suppress(CacheDamagedError):
            tokens = TokenCache.open(folder)
            return Opened(settings, source, framed, tokens, _truncated(settings, self.task, tokens))
        return None

    def samples(self, opened: Opened, part: Part, classes: Classes | None = None) -> Samples:
        """The samples of a part of ``opened``, with its further columns."""
        found = self._samples(opened, part, classes)
        return WithColumns(found, opened.tokens) if opened.settings.columns else found

    def _samples(self, opened: Opened, part: Part, classes: Classes | None) -> Samples:
        settings, framed, tokens = opened.settings, opened.framed, opened.tokens
        length, vocabulary = settings.seq_len, self.vocabulary
        if self.task == MASKED:
            return MaskedLM(
                tokens,
                part,
                length,
                vocabulary,
                mask=_mask_token(vocabulary),
                suffix=framed.suffix,
                seed=self.seed,
                packed=bool(settings.packing),
                shift=None if self.label_shift is None else self.label_shift(self.tokenizer),
            )
        if self.task == SEQ2SEQ:
            start = self.decoder_start_token_id
            start = start(self.tokenizer) if callable(start) else start
            return Seq2Seq(
                tokens,
                part,
                length,
                vocabulary,
                suffix=framed.suffix,
                decoder_start_token_id=vocabulary.pad if start is None else start,
                target_suffix=(framed.target or framed).suffix,
                target_seq_len=settings.target_seq_len,
            )
        if classes is not None:
            paired = _fields(settings, self.task).pair is not None
            return Classification(
                tokens,
                part,
                length,
                vocabulary,
                suffix=framed.suffix,
                classes=classes,
                left=self.pad_left,
                pair=_pair_frame(settings, self.tokenizer) if paired else None,
            )
        if settings.format == PREFERENCE:
            return Pairs(tokens, part, length, vocabulary.pad, settings.truncation)
        if settings.packing == "documents":
            plan = planned(tokens, part, length)
            return PackedDocuments(tokens, plan, length, vocabulary.pad, settings.truncation)
        if settings.packing:
            return PackedCausal(tokens, part, length)
        return PaddedCausal(tokens, part, length, vocabulary.pad, settings.truncation)


def inspect_data(
    settings: DataConfig,
    *,
    task: str = CAUSAL,
    model_tokenizer: str | None = None,
    model_vocab_size: int | None = None,
    trust_remote_code: bool = False,
    ends_texts: bool = False,
) -> DataSizes:
    """Return the sizes that ``build_data`` would, as far as possible without writing or downloading.

    Raises:
        UserError: for the errors of ``build_data`` that the first document reveals.
    """
    cache = _cache_dir(settings)
    source = _source(settings, task, cache, remember=False)
    if not source.downloads:
        settings, source = _recognised(settings, task, source, remember=False)
    source.check()
    evals = _eval_sources(settings, task, source, remember=False)
    name = settings.tokenizer or model_tokenizer
    size: int | None = None
    folder: str | None = name
    opened: dict[str, Any] = {}
    if name is None:
        size = trained_vocab_size(settings.vocab_size or model_vocab_size, mask=task == MASKED)
        if not source.remote:
            kind = {"mask": task == MASKED, "ends": ends_texts, "chat": _converses(settings)}
            trained = trained_tokenizer_folder(source, size, cache, **kind)
            folder = str(trained) if is_trained(trained) else None
    tokens = cut = None
    counted: dict[str, int] = {}
    if folder is not None:
        try:
            tokenizer = load_tokenizer(
                folder, offline=True, trust_remote_code=trust_remote_code, **_languages(settings, task)
            )
        except UserError:
            if name is not None and Path(name).exists():
                raise
        else:
            reading = Reading(task, tokenizer, _vocabulary(tokenizer, task, ends_texts=ends_texts))
            size = reading.vocabulary.size
            target_frame = _target_frame(reading.framed(settings), task)
            opened = {"opened": tokenizer, "target_frame": target_frame}
            if (cached := reading.cached(settings, source)) is not None:
                _check_ends(cached, tokenizer)
                tokens, cut = cached.tokens, cached.truncated
            elif not source.downloads and (chat := reading.chat(settings)) is not None:
                chat.encode(list(islice(source.documents(), 1)))  # raises what the first record reveals
            for key, (own, own_source) in evals.items():
                if (found := reading.cached(own, own_source)) is not None:
                    with errors_under(key_of(key)):
                        counted[key] = _sample_counts(found.settings, task, found.tokens, found.truncated)[0]
    sizes = _sizes(settings, task, source, name, size, tokens, cut)
    return replace(
        sizes,
        evals={key: (one.name, counted.get(key)) for key, (_, one) in evals.items()},
        trained_on=_trained_on(source, evals),
        **opened,
    )


def recognise_format(settings: DataConfig, task: str, *, downloads: bool = True) -> str:
    """The format of the records that ``data.format`` auto means; auto if that needs a download.

    Args:
        settings: the ``data`` section.
        task: one of ``TASKS``.
        downloads: whether a source may be downloaded.

    Raises:
        UserError: no format fits the first record, or several do.
    """
    if settings.format != "auto" or settings.source is None or task != CAUSAL:
        return "text" if task != CAUSAL or settings.source is None else settings.format
    source = _source(settings, task, _cache_dir(settings), remember=False)
    return "auto" if source.downloads and not downloads else source.recognised(_fields(settings, task))


def _recognised(
    settings: DataConfig, task: str, source: Source, *, remember: bool = True
) -> tuple[DataConfig, Source]:
    """The settings with the format of ``source``, and the source as one of that format."""
    kind = source.recognised(_fields(settings, task))
    if kind == settings.format:
        return settings, source
    settings = settings.model_copy(update={"format": kind})
    return settings, _source(settings, task, _cache_dir(settings), remember=remember)


def _converses(settings: DataConfig) -> bool:
    """Whether the records are conversations, or prompts with completions; asked once the format is known."""
    return settings.format not in ("auto", "text")


def _truncated(settings: DataConfig, task: str, tokens: TokenCache) -> Truncated | None:
    """What truncation does; None where it only cuts the ends of plain texts, or joins them."""
    if task != CAUSAL:
        return None
    if tokens.trained_bits is None and (settings.packing is True or settings.truncation == "end"):
        return None
    if settings.packing is True:
        return answered_blocks(tokens, settings.seq_len, _blocks(settings, task, tokens))
    return truncated(tokens, settings.truncation, settings.seq_len)


def _check_ends(opened: Opened, tokenizer: Any) -> None:
    """Raise UserError if truncation takes the end of every answer: the model would never stop."""
    end = opened.tokens.meta.get("end_of_turn")
    if end is None or opened.truncated is None or keeps_an_end(opened.tokens, opened.truncated, end):
        return
    raise UserError(
        f"data.truncation: all samples are cut before {tokenizer.decode([end])!r}, which ends an answer, so "
        f"the model would never stop; raise data.seq_len, which is {opened.settings.seq_len}, or set "
        "data.truncation to start or drop"
    )


def _cache_dir(settings: DataConfig) -> Path:
    return default_cache_dir() if settings.cache_dir is None else Path(settings.cache_dir)


def _languages(settings: DataConfig, task: str) -> dict[str, Any]:
    if task != SEQ2SEQ:
        return {}
    return {"source_language": settings.source_language, "target_language": settings.target_language}


def _frame(settings: DataConfig, task: str, tokenizer: Any, vocabulary: Vocabulary) -> Frame:
    if _fields(settings, task).pair is not None:
        _pair_frame(settings, tokenizer)  # raises before anything is tokenized
        return Frame((), ())  # special tokens are added after truncation
    if task != SEQ2SEQ:
        return frame(task, vocabulary)
    check_languages(tokenizer, source=settings.source_language, target=settings.target_language)
    return frame(task, vocabulary, Vocabulary.of(tokenizer, targets=True))


def _target_frame(framed: Frame, task: str) -> Frame | None:
    return (framed.target or framed) if task == SEQ2SEQ else None


def _pair_frame(settings: DataConfig, tokenizer: Any) -> PairFrame:
    found = PairFrame.of(tokenizer)
    if settings.seq_len < found.length + 2:
        raise UserError(
            f"data.seq_len: {settings.seq_len} tokens are too few for a pair of texts with "
            f"{found.length} special tokens; raise it"
        )
    return found


def _fields(settings: DataConfig, task: str) -> Fields:
    return Fields(
        text=settings.text_field,
        target=settings.target_field if task == SEQ2SEQ else None,
        label=settings.label_field if task == CLASSIFICATION else None,
        text_split=settings.text_split,
        pair=settings.text_pair_field if task == CLASSIFICATION else None,
        prefix=settings.source_prefix if task == SEQ2SEQ else "",
        columns=settings.columns,
        format=None if settings.format == "auto" and task == CAUSAL else _format(settings, task),
    )


def _format(settings: DataConfig, task: str) -> Format:
    kind = settings.format
    return "text" if kind == "auto" or task != CAUSAL else kind


def _source(settings: DataConfig, task: str, cache: Path, *, remember: bool = True) -> Source:
    if task not in TASKS:
        raise UserError(f"model.task: {task!r} is not one of {', '.join(TASKS)}")
    if settings.seq_len < 1:
        raise UserError(f"data.seq_len: {settings.seq_len} is less than 1; give a positive number")
    if not 0 <= settings.eval_fraction < 1:
        raise UserError(f"data.eval_fraction: {settings.eval_fraction} is not in [0, 1); lower it")
    return open_source(
        settings.source,
        fields=_fields(settings, task),
        config_name=settings.config_name,
        split=settings.split,
        max_samples=settings.max_samples,
        digests=cache / "digests",
        downloads=cache / "downloads",
        remember=remember,
    )


def _vocabulary(tokenizer: Any, task: str, *, ends_texts: bool = False) -> Vocabulary:
    vocabulary = Vocabulary.of(tokenizer)
    if task == MASKED:
        _mask_token(vocabulary)
    around = (*vocabulary.prefix, *vocabulary.suffix)
    if ends_texts and (tokenizer.eos_token_id is None or tokenizer.eos_token_id not in around):
        raise UserError(
            "data.tokenizer: it adds no eos_token to a text, but this model classifies there; use the "
            "model's own tokenizer, or null to train one that adds it"
        )
    return vocabulary


def _mask_token(vocabulary: Vocabulary) -> int:
    if vocabulary.mask is None:
        raise UserError(
            "data.tokenizer: it has no mask_token, which masked-lm needs; set one in its "
            "tokenizer_config.json, use another tokenizer, or null to train one"
        )
    return vocabulary.mask


def _packs(settings: DataConfig, task: str) -> bool | Literal["documents"]:
    return settings.packing if task in (CAUSAL, MASKED) else False


def _parts(
    settings: DataConfig, task: str, tokens: TokenCache, cut: Truncated | None = None
) -> tuple[Part, Part]:
    left_out = None if cut is None else cut.left_out
    if settings.format == PREFERENCE:
        pairs = None if left_out is None else np.unique(left_out // 2)
        return split_documents(tokens.documents // 2, settings.eval_fraction, pairs)
    if settings.packing == "documents" or not _packs(settings, task):
        return split_documents(tokens.documents, settings.eval_fraction, left_out)
    return split_blocks(_blocks(settings, task, tokens), settings.eval_fraction, left_out)


def _blocks(settings: DataConfig, task: str, tokens: TokenCache) -> int:
    return packed_samples(tokens.total_tokens, settings.seq_len, shifted=task == CAUSAL)


def _cut_share(tokens: TokenCache, longest: int, longest_target: int) -> float:
    """The share of tokens beyond the first ``longest`` of their document or pair of texts."""
    cut = 0
    count = tokens.documents
    together = [["text", "pair"]] if "pair" in tokens.offsets else [[name] for name in tokens.offsets]
    for names in together:
        most = longest_target if names == ["target"] else longest
        for start in range(0, count, 1 << 20):
            stop = min(count, start + (1 << 20)) + 1
            lengths = sum(np.diff(tokens.offsets[name][start:stop].astype(np.int64)) for name in names)
            cut += int(np.maximum(lengths - most, 0).sum())
    return cut / max(1, tokens.total_tokens)


def _sample_counts(
    settings: DataConfig, task: str, tokens: TokenCache, cut: Truncated | None
) -> tuple[int, int, float | None]:
    """Samples to train and to evaluate on, and with packed documents the share of padding in the first."""
    train, held_out = _parts(settings, task, tokens, cut)
    if _packs(settings, task) != "documents":
        return train.num_samples, held_out.num_samples, None
    packed, held = (packed_sizes(tokens, part, settings.seq_len) for part in (train, held_out))
    return packed.samples, held.samples, packed.waste


def _sizes(
    settings: DataConfig,
    task: str,
    source: Source,
    tokenizer: str | None,
    vocab_size: int | None,
    tokens: TokenCache | None,
    cut: Truncated | None = None,
) -> DataSizes:
    known: dict[str, Any] = {}
    packing = _packs(settings, task)
    if tokens is not None:
        *counts, waste = _sample_counts(settings, task, tokens, cut)
        trained = tokens.meta.get("trained_tokens")
        known = {
            "truncated": cut,
            "waste": waste,
            "trained": None if trained is None else trained / max(1, tokens.total_tokens),
            "prompt_left": tokens.meta.get("prompt_left", ""),
            "documents": tokens.documents,
            "tokens": tokens.total_tokens,
            "train_samples": counts[0],
            "eval_samples": counts[1],
            "cut": 0.0
            if packing is True
            else _cut_share(
                tokens, settings.seq_len + (task == CAUSAL), settings.target_seq_len or settings.seq_len
            ),
            "cached": tokens.folder,
        }
    return DataSizes(
        source=source.name,
        tokenizer=tokenizer or "a byte-pair encoding trained on it",
        vocab_size=vocab_size,
        seq_len=settings.seq_len,
        packing=packing,
        **known,
    )
