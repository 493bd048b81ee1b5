"""Turn the sources of a run into tokens, and the tokens into samples."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.data.samples.base import (
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
from portable.data.samples.mixture import seed_of
from portable.data.samples.packing import PackedDocuments, planned
from portable.data.samples.tasks import Classification, LabelShift, MaskedLM, Seq2Seq
from portable.data.samples.truncation import Truncated, answered_blocks, keeps_an_end, truncated
from portable.data.settings import (
    CAUSAL,
    MASKED,
    PREFERENCE,
    SEQ2SEQ,
    STREAMS,
    cache_dir,
    converses,
    fields_of,
    packs,
)
from portable.data.stream import Stream
from portable.data.tokens.ahead import Tokenizing
from portable.data.tokens.cache import CacheDamagedError, TokenCache
from portable.data.tokens.chat_template import ChatTemplate, chat_template
from portable.data.tokens.tokenize import Frame, frame, token_cache_folder, tokenize
from portable.data.tokens.tokenizer import PairFrame, Vocabulary, check_languages
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from portable.config.sections import DataConfig
    from portable.data.samples.classes import Classes
    from portable.data.sources.opening import Source
    from portable.data.sources.shard import Shard
    from portable.data.sources.shards import StreamedFiles


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
        seed, decoder_start_token_id, label_shift, pad_left, whole: as in :func:`build_data`.
    """

    task: str
    tokenizer: Any
    vocabulary: Vocabulary
    seed: int = 0
    decoder_start_token_id: int | Callable[[Any], int] | None = None
    label_shift: Callable[[Any], LabelShift | None] | None = None
    pad_left: bool = False
    whole: bool = False

    def framed(self, settings: DataConfig) -> Frame:
        """The special tokens around each text."""
        return _frame(settings, self.task, self.tokenizer, self.vocabulary)

    def open(self, settings: DataConfig, source: Source, *, progress: bool = False) -> Opened:
        """Tokenize ``source``, if it is not cached."""
        framed, fields = self.framed(settings), fields_of(settings, self.task)
        cache = cache_dir(settings)
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
        return Opened(settings, source, framed, tokens, self.truncated(settings, tokens))

    def tokenizing(self, settings: DataConfig, source: StreamedFiles, cache: Path) -> Tokenizing:
        """How the shards of ``source`` become tokens in ``cache``."""
        chat = self.chat(settings)
        return Tokenizing(self.tokenizer, self.vocabulary, source.fields, self.framed(settings), cache, chat)

    def stream(
        self, settings: DataConfig, source: StreamedFiles, name: str, *, progress: bool = False
    ) -> tuple[Stream, Opened]:
        """The samples of a stream, and its first shard as tokens."""
        cache = cache_dir(settings) / STREAMS
        framed = self.framed(settings)
        work = self.tokenizing(settings, source, cache)
        shard = _ShardSamples(replace(self, label_shift=None, decoder_start_token_id=None), settings, source)
        limit = settings.cache_limit
        try:
            cache.mkdir(parents=True, exist_ok=True)
            room = disk_usage(cache).free // 2 if limit is None else int(limit * 1e9)
        except OSError as error:
            raise UserError(f"data.cache_dir: cannot write in {cache} ({one_line(error)})") from error
        seed = seed_of(name, self.seed) if name else self.seed
        local_rank = os.environ.get("LOCAL_RANK", "0")
        found = Stream(
            name or "data.source",
            source,
            work,
            shard,
            seed=seed,
            window=settings.shuffle_window,
            limit=room,
            processes=max(1, settings.num_workers) if local_rank == "0" else 0,  # one reader for a machine
        )
        first = found.first_tokens()
        content = f"{source.key} {work.made} {settings.seq_len} {settings.shuffle_window}"
        found.fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        return found, Opened(settings, source, framed, first, self.truncated(settings, first))

    def chat(self, settings: DataConfig) -> ChatTemplate | None:
        """What tokenizes conversations; None for plain text. Saves a chosen template with the tokenizer."""
        if not converses(settings):
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
            pairs=settings.format == PREFERENCE,
            kwargs=settings.chat_template_kwargs,
        )

    def cached(self, settings: DataConfig, source: Source) -> Opened | None:
        """``source``, if its tokens are cached."""
        if source.remote:
            return None
        framed = self.framed(settings)
        folder = token_cache_folder(source, self.tokenizer, framed, cache_dir(settings), self.chat(settings))
        with suppress(CacheDamagedError):
            tokens = TokenCache.open(folder)
            return Opened(settings, source, framed, tokens, self.truncated(settings, tokens))
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
            paired = fields_of(settings, self.task).pair is not None
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
            return Pairs(tokens, part, length, vocabulary.pad, settings.truncation, whole=self.whole)
        if settings.packing == "documents":
            plan = planned(tokens, part, length)
            return PackedDocuments(tokens, plan, length, vocabulary.pad, settings.truncation)
        if settings.packing:
            return PackedCausal(tokens, part, length)
        return PaddedCausal(tokens, part, length, vocabulary.pad, settings.truncation, whole=self.whole)

    def truncated(self, settings: DataConfig, tokens: TokenCache) -> Truncated | None:
        """What truncation does; None where it only cuts the ends of plain texts, or joins them."""
        if self.task != CAUSAL:
            return None
        if tokens.trained_bits is None and (settings.packing is True or settings.truncation == "end"):
            return None
        if settings.packing is True:
            return answered_blocks(tokens, settings.seq_len, _blocks(settings, self.task, tokens))
        return truncated(tokens, settings.truncation, settings.seq_len, whole=self.whole)


def parts(
    settings: DataConfig, task: str, tokens: TokenCache, cut: Truncated | None = None
) -> tuple[Part, Part]:
    left_out = None if cut is None else cut.left_out
    if settings.format == PREFERENCE:
        pairs = None if left_out is None else np.unique(left_out // 2)
        return split_documents(tokens.documents // 2, settings.eval_fraction, pairs)
    if settings.packing == "documents" or not packs(settings, task):
        return split_documents(tokens.documents, settings.eval_fraction, left_out)
    return split_blocks(_blocks(settings, task, tokens), settings.eval_fraction, left_out)


def _blocks(settings: DataConfig, task: str, tokens: TokenCache) -> int:
    return packed_samples(tokens.total_tokens, settings.seq_len, shifted=task == CAUSAL)


@dataclass(frozen=True)
class _ShardSamples:
    """Makes samples of the tokens of a shard."""

    reading: Reading
    settings: DataConfig
    source: Source

    def count(self, shard: Shard) -> int | None:
        settings = self.settings
        if shard.tokens is None or settings.packing is not True or converses(settings):
            return None
        return max(0, (shard.tokens - 1) // settings.seq_len)

    def __call__(self, tokens: TokenCache) -> Samples | None:
        settings, task = self.settings, self.reading.task
        if settings.packing is True and tokens.total_tokens <= settings.seq_len:
            return None
        cut = self.reading.truncated(settings, tokens)
        part, _ = parts(settings.model_copy(update={"eval_fraction": 0.0}), task, tokens, cut)
        framed = self.reading.framed(settings)
        return self.reading.samples(Opened(settings, self.source, framed, tokens, cut), part)


def check_ends(opened: Opened, tokenizer: Any) -> None:
    """Raise UserError if truncation takes the end of every answer: the model would never stop."""
    end = opened.tokens.meta.get("end_of_turn")
    if end is None or opened.truncated is None or keeps_an_end(opened.tokens, opened.truncated, end):
        return
    raise UserError(
        f"data.truncation: all samples are cut before {tokenizer.decode([end])!r}, which ends an answer, so "
        f"the model would never stop; raise data.seq_len, which is {opened.settings.seq_len}, or set "
        "data.truncation to start or drop"
    )


def _frame(settings: DataConfig, task: str, tokenizer: Any, vocabulary: Vocabulary) -> Frame:
    if fields_of(settings, task).pair is not None:
        _pair_frame(settings, tokenizer)  # raises before anything is tokenized
        return Frame((), ())  # special tokens are added after truncation
    if task != SEQ2SEQ:
        return frame(task, vocabulary)
    check_languages(tokenizer, source=settings.source_language, target=settings.target_language)
    return frame(task, vocabulary, Vocabulary.of(tokenizer, targets=True))


def target_frame_of(framed: Frame, task: str) -> Frame | None:
    return (framed.target or framed) if task == SEQ2SEQ else None


def _pair_frame(settings: DataConfig, tokenizer: Any) -> PairFrame:
    found = PairFrame.of(tokenizer)
    if settings.seq_len < found.length + 2:
        raise UserError(
            f"data.seq_len: {settings.seq_len} tokens are too few for a pair of texts with "
            f"{found.length} special tokens; raise it"
        )
    return found


def vocabulary_of(tokenizer: Any, task: str, *, ends_texts: bool = False) -> Vocabulary:
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
