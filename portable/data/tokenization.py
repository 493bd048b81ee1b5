"""Turn the sources of a run into tokens, and the tokens into samples."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.config.sources import number_columns
from portable.data.samples.base import (
    PackedCausal,
    PaddedCausal,
    Pairs,
    Part,
    Samples,
    packed_samples,
    split_blocks,
    split_documents,
)
from portable.data.samples.order import seed_of
from portable.data.samples.truncation import Truncated, answered_blocks, keeps_an_end, truncated
from portable.data.sources.documents import digest_of
from portable.data.sources.opening import StreamedFiles
from portable.data.sources.source import CAUSAL, MASKED, PREFERENCE, SEQ2SEQ
from portable.data.tokens.bounded_tokenizer import decode
from portable.data.tokens.cache import TokenCache
from portable.data.tokens.frame import Frame, special_token_frame
from portable.data.tokens.tokenize import TokenizeJob
from portable.data.tokens.tokenizer import PairFrame, Vocabulary, check_languages
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from portable.data.samples.base import OfCache
    from portable.data.samples.classes import Classes
    from portable.data.samples.tasks import LabelShift
    from portable.data.sources.source import Shard, Source, SourceSettings
    from portable.data.stream import Stream
    from portable.data.tokens.chat_template import ChatTemplate


@dataclass(frozen=True)
class TokenizationContext:
    """How the sources of a run become tokens and samples: equal for all of them.

    What may differ between sources (files, fields, lengths) stands in the settings of each.

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
    with_last: bool = False

    def frame(self, settings: SourceSettings) -> Frame:
        """The special tokens around each text."""
        if settings.fields.pair is not None:
            self._pair_frame(settings)  # raises before anything is tokenized
            return Frame((), ())  # special tokens are added after truncation
        if self.task != SEQ2SEQ:
            return special_token_frame(self.task, self.vocabulary)
        data = settings.data
        check_languages(self.tokenizer, source=data.source_language, target=data.target_language)
        return special_token_frame(self.task, self.vocabulary, Vocabulary.of(self.tokenizer, targets=True))

    def target_frame(self, settings: SourceSettings) -> Frame | None:
        """The special tokens around each target text."""
        frame = self.frame(settings)
        return (frame.target or frame) if self.task == SEQ2SEQ else None

    def _pair_frame(self, settings: SourceSettings) -> PairFrame:
        found = PairFrame.of(self.tokenizer)
        if settings.data.seq_len < found.length + 2:
            raise UserError(
                f"data.seq_len: {settings.data.seq_len} tokens are too few for a pair of texts with "
                f"{found.length} special tokens; raise it"
            )
        return found

    @property
    def mask_token(self) -> int:
        if self.vocabulary.mask is None:
            raise UserError(
                "data.tokenizer: it has no mask_token, which masked-lm needs; set one in its "
                "tokenizer_config.json, use another tokenizer, or null to train one"
            )
        return self.vocabulary.mask

    def check(self, *, ends_texts: bool) -> None:
        """Raise UserError if the tokenizer lacks a token that the task or the model needs."""
        if self.task == MASKED:
            self.mask_token  # noqa: B018 - raises
        end = self.tokenizer.eos_token_id
        if ends_texts and (end is None or end not in (*self.vocabulary.prefix, *self.vocabulary.suffix)):
            raise UserError(
                "data.tokenizer: it adds no eos_token to a text, but this model classifies there; use the "
                "model's own tokenizer, or null to train one that adds it"
            )

    def job(self, settings: SourceSettings, cache: Path | None = None) -> TokenizeJob:
        """What turns a source of these settings into tokens. Saves a chosen template with the tokenizer."""
        frame = self.frame(settings)
        chat = self._chat(settings, frame)
        return TokenizeJob(settings, self.tokenizer, self.vocabulary, frame, cache or settings.cache, chat)

    def _chat(self, settings: SourceSettings, frame: Frame) -> ChatTemplate | None:
        if not settings.converses:
            return None
        from portable.data.tokens.chat_template import ChatTemplate, chat_template

        data = settings.data
        has_one = data.chat_template is not None or getattr(self.tokenizer, "chat_template", None)
        # Prompts and completions may be strings, which need none.
        needs_one = data.format != "prompt_completion" or has_one
        templates = chat_template(self.tokenizer, data.chat_template) if needs_one else None
        if data.chat_template is not None:
            self.tokenizer.chat_template = templates
        return ChatTemplate(
            self.tokenizer,
            templates,
            frame,
            train_on=data.train_on,
            split_turns=data.split_turns,
            pairs=data.format == PREFERENCE,
            kwargs=data.chat_template_kwargs,
        )

    def open(self, source: Source, *, progress: bool = False) -> TokenizedSource:
        """Tokenize ``source``, if it is not cached."""
        tokens = self.job(source.settings).tokens(source, progress=progress)
        return TokenizedSource(self, source, tokens)

    def cached(self, source: Source) -> TokenizedSource | None:
        """``source``, if its tokens are cached."""
        if source.remote or isinstance(source, StreamedFiles):
            return None
        tokens = TokenCache.intact(self.job(source.settings).folder(source))
        return None if tokens is None else TokenizedSource(self, source, tokens)

    def first_end(self, source: Source) -> int | None:
        """The token that ends an answer; raises UserError for what the first conversations reveal."""
        readable = not source.downloads and source.made_with() is None
        return self.job(source.settings).first_end(source) if readable else None

    def stream(self, source: StreamedFiles, name: str) -> tuple[Stream, TokenizedSource]:
        """The samples of a stream, and its first shard as tokens."""
        from portable.data.stream import Stream

        data, job = source.settings.data, self.job(source.settings)
        try:
            job.cache.mkdir(parents=True, exist_ok=True)
            limit = data.cache_limit
            room = disk_usage(job.cache).free // 2 if limit is None else int(limit * 1e9)
        except OSError as error:
            raise UserError(f"data.cache_dir: cannot write in {job.cache} ({one_line(error)})") from error
        found = Stream(
            name or "data.source",
            source,
            job,
            # Other processes get these, which a causal model has no use for and which cannot go there.
            partial(_shard_samples, replace(self, label_shift=None, decoder_start_token_id=None), source),
            partial(_shard_count, source.settings),
            seed=seed_of(name, self.seed) if name else self.seed,
            window=data.shuffle_window,
            limit=room,
            # One reader for a machine.
            processes=max(1, data.num_workers) if os.environ.get("LOCAL_RANK", "0") == "0" else 0,
        )
        first = found.first_tokens()
        found.fingerprint = digest_of(f"{source.key} {job.made} {data.seq_len} {data.shuffle_window}")
        return found, TokenizedSource(self, source, first)


@dataclass(frozen=True)
class TokenizedSource:
    """A source, or a shard of a stream, as tokens."""

    context: TokenizationContext
    source: Source
    tokens: TokenCache

    @property
    def settings(self) -> SourceSettings:
        return self.source.settings

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around each text."""
        return self.context.frame(self.settings)

    @property
    def end_of_turn(self) -> int | None:
        """For conversations, the token that ends an answer."""
        return self.tokens.meta.get("end_of_turn")

    @property
    def trained_tokens(self) -> int | None:
        """How many tokens are trained, where not all are."""
        return self.tokens.meta.get("trained_tokens")

    def cut_tokens(self) -> int:
        """How many tokens no sample has, since they are too far from the start of their text."""
        settings, tokens, cut = self.settings, self.tokens, 0
        if settings.packing is True:
            return 0
        longest = settings.data.seq_len + (settings.task == CAUSAL)
        longest_target = settings.data.target_seq_len or settings.data.seq_len
        pairs = "pair" in tokens.offsets
        for names in [["text", "pair"]] if pairs else [[name] for name in tokens.offsets]:
            most = longest_target if names == ["target"] else longest
            for start in range(0, tokens.documents, 1 << 20):
                rows = slice(start, start + (1 << 20) + 1)
                lengths = sum(np.diff(tokens.offsets[name][rows].astype(np.int64)) for name in names)
                cut += int(np.maximum(lengths - most, 0).sum())
        return cut

    @property
    def _blocks(self) -> int:
        shifted = self.settings.task == CAUSAL
        return packed_samples(self.tokens.total_tokens, self.settings.data.seq_len, shifted=shifted)

    @cached_property
    def truncated(self) -> Truncated | None:
        """What truncation does; None where it only cuts the ends of plain texts, or joins them."""
        tokens, data = self.tokens, self.settings.data
        if self.settings.task != CAUSAL:
            return None
        if tokens.trained_bits is None and (data.packing is True or data.truncation == "end"):
            return None
        if data.packing is True:
            return answered_blocks(tokens, data.seq_len, self._blocks)
        return truncated(tokens, data.truncation, data.seq_len, whole=self.context.whole)

    def parts(self) -> tuple[Part, Part]:
        """The samples to train on, and those that are held out to evaluate on; none of a stream."""
        data, packing = self.settings.data, self.settings.packing
        share = 0.0 if data.stream else data.eval_fraction
        left_out = None if self.truncated is None else self.truncated.left_out
        if data.format == PREFERENCE:
            pairs = None if left_out is None else np.unique(left_out // 2)
            return split_documents(self.tokens.documents // 2, share, pairs)
        if data.packing == "documents" or not packing:
            return split_documents(self.tokens.documents, share, left_out)
        return split_blocks(self._blocks, share, left_out)

    def counts(self) -> tuple[int, int, float | None]:
        """Samples to train and to evaluate on; with packed documents, the share of padding in the first."""
        train, held_out = self.parts()
        if self.settings.packing != "documents":
            return train.num_samples, held_out.num_samples, None
        from portable.data.samples.packing import packed_sizes

        length = self.settings.data.seq_len
        last = self.context.with_last
        packed, held = (packed_sizes(self.tokens, part, length, with_last=last) for part in (train, held_out))
        return packed.samples, held.samples, packed.waste

    def check_ends(self) -> None:
        """Raise UserError if truncation takes the end of every answer: the model would never stop."""
        end = self.end_of_turn
        if end is None or self.truncated is None or keeps_an_end(self.tokens, self.truncated, end):
            return
        raise UserError(
            f"data.truncation: all samples are cut before {decode(self.context.tokenizer, [end])!r}, which "
            "ends an answer, so the model would never stop; raise data.seq_len, which is "
            f"{self.settings.data.seq_len}, or set data.truncation to start or drop"
        )

    def samples(self, part: Part | None = None, classes: Classes | None = None) -> Samples:
        """The samples of a part; of all that is not held out without one."""
        found = self._samples(self.parts()[0] if part is None else part, classes)
        found.with_columns = bool(number_columns(self.settings.data))
        return found

    def _samples(self, part: Part, classes: Classes | None) -> OfCache:
        context, tokens, data = self.context, self.tokens, self.settings.data
        if context.task != CAUSAL:
            return self._of_task(part, classes)
        pad, of = context.vocabulary.pad, (tokens, part, data.seq_len)
        if data.format == PREFERENCE:
            return Pairs(*of, pad, data.truncation, whole=context.whole, with_last=context.with_last)
        if data.packing == "documents":
            from portable.data.samples.packing import PackedDocuments, planned

            plan = planned(*of, with_last=context.with_last)
            return PackedDocuments(*of, plan, pad, data.truncation, with_last=context.with_last)
        if data.packing:
            return PackedCausal(*of)
        return PaddedCausal(*of, pad, data.truncation, whole=context.whole, with_last=context.with_last)

    def _of_task(self, part: Part, classes: Classes | None) -> OfCache:
        """The samples of another task than a causal language model's."""
        from portable.data.samples.tasks import Classification, MaskedLM, Seq2Seq

        context, tokens, data = self.context, self.tokens, self.settings.data
        of = tokens, part, data.seq_len
        vocabulary, suffix = context.vocabulary, self.frame.suffix
        if context.task == MASKED:
            return MaskedLM(
                *of,
                vocabulary,
                mask=context.mask_token,
                suffix=suffix,
                seed=context.seed,
                packed=bool(data.packing),
                shift=None if context.label_shift is None else context.label_shift(context.tokenizer),
            )
        if context.task == SEQ2SEQ:
            start = context.decoder_start_token_id
            start = start(context.tokenizer) if callable(start) else start
            return Seq2Seq(
                *of,
                vocabulary,
                suffix=suffix,
                decoder_start_token_id=vocabulary.pad if start is None else start,
                target_suffix=(self.frame.target or self.frame).suffix,
                target_seq_len=data.target_seq_len,
            )
        return Classification(
            *of,
            vocabulary,
            suffix=suffix,
            classes=classes,
            left=context.pad_left,
            pair=None if self.settings.fields.pair is None else PairFrame.of(context.tokenizer),
        )


def _shard_count(settings: SourceSettings, shard: Shard) -> int | None:
    """The number of samples of a shard, if it is known without its tokens."""
    if shard.tokens is None or settings.data.packing is not True or settings.converses:
        return None
    return max(0, (shard.tokens - 1) // settings.data.seq_len)


def _shard_samples(context: TokenizationContext, source: Source, tokens: TokenCache) -> Samples | None:
    """The samples of a shard; None if it is too short for one."""
    data = source.settings.data
    if data.packing is True and tokens.total_tokens <= data.seq_len:
        return None
    return TokenizedSource(context, source, tokens).samples()
