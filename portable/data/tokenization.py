"""Tokenize the sources of a run, and build samples from the tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portable.config.sources import list_number_columns
from portable.data.images import build_image_reader
from portable.data.samples.base import (
    PackedCausalSamples,
    PaddedCausalSamples,
    PairSamples,
    SampleRange,
    Samples,
    TrainEvalSplit,
    count_packed_samples,
    split_documents,
    split_packed_blocks,
)
from portable.data.samples.order import derive_seed
from portable.data.samples.truncation import (
    NoSampleLeftError,
    TruncationStats,
    compute_block_truncation_stats,
    compute_truncation_stats,
    has_trained_end_token,
)
from portable.data.sources.documents import compute_text_digest
from portable.data.sources.source import CAUSAL, MASKED, PREFERENCE, SEQ2SEQ
from portable.data.sources.source_kinds import StreamSource
from portable.data.tokens.bounded_tokenizer import decode
from portable.data.tokens.special_tokens import Frame, build_special_token_frame
from portable.data.tokens.tokenize import TokenizeJob
from portable.data.tokens.tokenizer import PairFrame, Vocabulary, check_languages
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from portable.data.samples.base import CacheSamples
    from portable.data.samples.classes import LabelMapping
    from portable.data.samples.tasks import LabelShift
    from portable.data.sources.source import DataSource, SourceSettings, SourceShard
    from portable.data.stream import StreamSamples
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.chat_template import ConversationEncoder
    from portable.data.tokens.image_processing import ImageProcessor


class SampleCounts(NamedTuple):
    """Number of samples that a source provides for training and for evaluation.

    Attributes:
        train: Number of training samples.
        held_out: Number of samples held out for evaluation.
        padding_share: Fraction of the positions in training samples that are padding. None unless
            ``data.packing`` is ``documents``, which packs complete documents into samples.
    """

    train: int
    held_out: int
    padding_share: float | None


class OpenedStream(NamedTuple):
    """Opened stream and its first tokens.

    Attributes:
        samples: Samples of the stream.
        first_shard: Shard that contains the first sample of the stream, as a tokenized source with
            the settings of the stream.
    """

    samples: StreamSamples
    first_shard: TokenizedSource


@dataclass(frozen=True)
class TokenizationContext:
    """Tokenizer, task and model properties that all sources of a run share.

    Settings that may differ between sources, such as files, fields and lengths, are in
    :class:`SourceSettings`.

    Attributes:
        task: Task of the model, one of ``TASKS``.
        tokenizer: Transformers tokenizer.
        vocabulary: Vocabulary size and special tokens of the tokenizer.
        seed: Seed for the random masks, and for the sample order of streams.
        decoder_start_token_id: First decoder input for seq2seq, or a function that returns it for a
            tokenizer. See :class:`ModelDataHints`.
        label_shift: Function that returns the label shift for a tokenizer. See
            :class:`ModelDataHints`.
        pad_left: Whether to pad a classifier's texts on the left.
        keep_last_input: Whether the last token of every text is also an input of a causal model.
            Applies to padded samples. This input has no label, because no token follows it. If
            True, texts are truncated to ``data.seq_len`` tokens. If False, they are truncated to
            ``data.seq_len + 1`` tokens, and the last token is only a label.
        keep_last_input_if_room: Whether the last token is also an input of a causal model in texts
            of at most ``data.seq_len`` tokens. Longer texts are truncated to ``data.seq_len + 1``
            tokens, and their last token is only a label.
        image_processor: Image processor of the model. None if the run has no images.
    """

    task: str
    tokenizer: Any
    vocabulary: Vocabulary
    seed: int = 0
    decoder_start_token_id: int | Callable[[Any], int] | None = None
    label_shift: Callable[[Any], LabelShift | None] | None = None
    pad_left: bool = False
    keep_last_input: bool = False
    keep_last_input_if_room: bool = False
    image_processor: ImageProcessor | None = None

    def build_frame(self, settings: SourceSettings) -> Frame:
        """Return the special tokens to put around each text of a source.

        For text pairs, the result is empty, because their special tokens are added after
        truncation.

        Raises:
            UserError: If the tokenizer lacks a required end token, or does not support
                ``data.source_language`` or ``data.target_language``. For text pairs, if the
                tokenizer cannot encode pairs, or if ``data.seq_len`` is too small.
        """
        if settings.fields.pair is not None:
            self._build_pair_frame(settings)  # report errors before anything is tokenized
            return Frame((), ())  # special tokens are added after truncation
        if self.task != SEQ2SEQ:
            return build_special_token_frame(self.task, self.vocabulary)
        data = settings.data
        check_languages(self.tokenizer, source=data.source_language, target=data.target_language)
        return build_special_token_frame(
            self.task, self.vocabulary, Vocabulary.from_tokenizer(self.tokenizer, targets=True)
        )

    def build_target_frame(self, settings: SourceSettings) -> Frame | None:
        """Return the special tokens to put around each target text. None if the task is not seq2seq.

        Raises:
            UserError: If the tokenizer does not fit the settings. See :meth:`build_frame`.
        """
        frame = self.build_frame(settings)
        return (frame.target or frame) if self.task == SEQ2SEQ else None

    def _build_pair_frame(self, settings: SourceSettings) -> PairFrame:
        """Check ``data.seq_len``, and return the special tokens to put around a text pair.

        ``data.seq_len`` must be at least the number of special tokens plus two.

        Raises:
            UserError: If ``data.seq_len`` is too small for a pair, or if the tokenizer does not
                support pairs. It must encode a pair as the first text followed by the second text,
                with special tokens before, between and after the texts.
        """
        frame = PairFrame.from_tokenizer(self.tokenizer)
        if settings.data.seq_len < frame.num_special_tokens + 2:
            raise UserError(
                f"data.seq_len: {settings.data.seq_len} is too small for a pair of texts (the number of "
                f"their special tokens is {frame.num_special_tokens}); set data.seq_len to at least "
                f"{frame.num_special_tokens + 2}"
            )
        return frame

    @property
    def required_mask_token(self) -> int:
        """Id of the mask token.

        Raises:
            UserError: If the tokenizer has no mask token.
        """
        if self.vocabulary.mask_token is None:
            raise UserError(
                "data.tokenizer: the tokenizer has no mask_token, but model.task: masked-lm needs a "
                "mask_token; set mask_token in the tokenizer_config.json, use another tokenizer, or set "
                "data.tokenizer to null to train a tokenizer"
            )
        return self.vocabulary.mask_token

    def check_special_tokens(self, *, ends_texts: bool) -> None:
        """Check that the tokenizer has the mask token or end token that the task and the model require.

        The end token that :meth:`build_frame` requires for some tasks is not checked here.

        Args:
            ends_texts: Whether the model requires an end token in every text, because it classifies
                the text at this token.

        Raises:
            UserError: If the task is masked-lm and there is no mask token, or if ``ends_texts`` is
                True and the tokenizer does not add an end token to texts.
        """
        if self.task == MASKED:
            self.required_mask_token  # noqa: B018 - raises
        end = self.tokenizer.eos_token_id
        if ends_texts and (end is None or end not in (*self.vocabulary.prefix, *self.vocabulary.suffix)):
            raise UserError(
                "data.tokenizer: the tokenizer does not add an eos_token to texts, but this model "
                "classifies at the eos_token; use the model's own tokenizer, or set data.tokenizer to null "
                "to train a tokenizer that adds the token"
            )

    def build_tokenize_job(self, settings: SourceSettings, cache: Path | None = None) -> TokenizeJob:
        """Build the job that tokenizes a source with these settings.

        If ``data.chat_template`` is set and the records are conversations, completions or
        preferences, also sets it as the chat template of this context's tokenizer, so that exported
        models contain it.

        Args:
            settings: Settings of the source.
            cache: Cache folder. None uses the folder in the settings.

        Raises:
            UserError: If the tokenizer does not fit the settings (see :meth:`build_frame`), or if
                it or the chat template cannot be used for conversations.
        """
        frame = self.build_frame(settings)
        chat = self._build_conversation_encoder(settings, frame)
        return TokenizeJob(
            settings, self.tokenizer, self.vocabulary, frame, cache or settings.cache_folder, chat
        )

    def _build_conversation_encoder(
        self, settings: SourceSettings, frame: Frame
    ) -> ConversationEncoder | None:
        """Build the encoder for conversations and completions. None if the documents are plain text.

        If ``data.chat_template`` is set and the documents are not plain text, also sets it as the
        chat template of the tokenizer.

        Raises:
            UserError: If the tokenizer or the chat template cannot be used for conversations.
        """
        if not settings.has_conversations:
            return None
        from portable.data.tokens.chat_template import ConversationEncoder, load_chat_template

        data = settings.data
        has_template = data.chat_template is not None or getattr(self.tokenizer, "chat_template", None)
        # Prompts and completions may be plain strings, which do not need a template.
        needs_template = data.format != "prompt_completion" or has_template
        templates = load_chat_template(self.tokenizer, data.chat_template) if needs_template else None
        if data.chat_template is not None:
            self.tokenizer.chat_template = templates
        return ConversationEncoder(
            self.tokenizer,
            templates,
            frame,
            train_on=data.train_on,
            split_turns=data.split_turns,
            pairs=data.format == PREFERENCE,
            kwargs=data.chat_template_kwargs,
            image_reader=None if self.image_processor is None else build_image_reader(data),
            image_processor=self.image_processor,
        )

    def tokenize_source(self, source: DataSource, *, progress: bool = False) -> TokenizedSource:
        """Tokenize a source, or open its tokens if they are already in the cache.

        Args:
            source: Source to tokenize.
            progress: Whether to show a progress bar if tokenizing takes more than a second.

        Raises:
            UserError: If the source cannot be read or contains no text, if the tokenizer does not
                fit the settings, or if the cache is not writable.
        """
        tokens = self.build_tokenize_job(source.settings).tokenize_source(source, progress=progress)
        return TokenizedSource(self, source, tokens)

    def open_cached_source(self, source: DataSource) -> TokenizedSource | None:
        """Open the tokens of a source if they are in the cache. Tokenizes and downloads nothing.

        If image files have new modification times but the same contents, this is recorded in the
        cache, so that they need not be read again. Nothing else is written to the cache.

        Returns:
            The source and its tokens. None if the tokens are not in the cache, if they are damaged,
            if image files have changed, if the source is a stream, or if opening the source may
            download data.

        Raises:
            UserError: If the source cannot be read, or if the tokenizer does not fit the settings.
        """
        if source.downloads_to_open or isinstance(source, StreamSource):
            return None
        tokens = self.build_tokenize_job(source.settings).open_cached(source)
        return None if tokens is None else TokenizedSource(self, source, tokens)

    def find_end_of_turn(self, source: DataSource) -> int | None:
        """Find the token that ends most answers, such as an end-of-turn token.

        The first batch of valid conversations in the source is encoded to find this token.

        Returns:
            Id of the token. None if the source contains no valid conversations, is already
            tokenized, or cannot be read without a download.

        Raises:
            UserError: If conversations cannot be encoded and bad records are not skipped, or if no
                answer in the batch ends with a token that contributes to the loss.
        """
        readable = not source.downloads_to_read and source.find_tokenizer_folder() is None
        return self.build_tokenize_job(source.settings).find_end_of_turn(source) if readable else None

    def open_stream_source(self, source: StreamSource, name: str) -> OpenedStream:
        """Open the samples of a stream, and tokenize the first window of shards.

        Creates the cache folder. The first window consists of the first ``data.shuffle_window``
        shards in the order of the first epoch. If these shards contain no sample, later shards are
        tokenized too. Tokens from the cache or from ``portable-data`` are reused.

        On each machine, only the process with local rank 0 tokenizes the next shards in the
        background. This process also limits the size of the cached tokens to ``data.cache_limit``.
        The default limit is half of the free disk space.

        Args:
            source: Source that provides the shards of the stream.
            name: Name of the source in a mixture. Empty without a mixture.

        Raises:
            UserError: If the cache folder is not writable, if the tokenizer does not fit the
                settings, if a shard cannot be read, or if no shard contains a sample.
        """
        from portable.data.stream import StreamSamples

        data, job = source.settings.data, self.build_tokenize_job(source.settings)
        try:
            job.cache.mkdir(parents=True, exist_ok=True)
            limit = data.cache_limit
            room = disk_usage(job.cache).free // 2 if limit is None else int(limit * 1e9)
        except OSError as error:
            raise UserError(
                f"data.cache_dir: cannot write to {job.cache} ({to_one_line(error)}); choose a writable "
                "folder"
            ) from error
        stream = StreamSamples(
            name or "data.source",
            source,
            job,
            # Remove these two functions, because they cannot be pickled for worker processes and a causal
            # model does not need them.
            partial(
                _build_shard_samples, replace(self, label_shift=None, decoder_start_token_id=None), source
            ),
            partial(_count_shard_samples, source.settings),
            seed=derive_seed(name, self.seed) if name else self.seed,
            window_shards=data.shuffle_window,
            limit_bytes=room,
            # Only one process per machine tokenizes shards in advance.
            num_processes=max(1, data.num_workers) if os.environ.get("LOCAL_RANK", "0") == "0" else 0,
        )
        first = stream.load_first_tokens()
        stream.fingerprint = compute_text_digest(
            f"{source.cache_key} {job.digest} {data.seq_len} {data.shuffle_window}"
        )
        return OpenedStream(stream, TokenizedSource(self, source, first))


@dataclass(frozen=True)
class TokenizedSource:
    """Source together with its tokens. For a stream, the tokens of only one shard.

    Attributes:
        context: Tokenizer, task and model properties.
        source: Source of the documents. For a stream, the entire stream.
        tokens: Token cache of the source or shard.
    """

    context: TokenizationContext
    source: DataSource
    tokens: TokenCache

    @property
    def settings(self) -> SourceSettings:
        """Settings of the source."""
        return self.source.settings

    @cached_property
    def frame(self) -> Frame:
        """Special tokens put around each text."""
        return self.context.build_frame(self.settings)

    @property
    def end_of_turn_token(self) -> int | None:
        """Id of the token that ends most answers in conversations.

        None if no such token exists, or if the source has no conversations.
        """
        return self.tokens.meta.get("end_of_turn")

    @property
    def num_trained_tokens(self) -> int | None:
        """Number of tokens that contribute to the loss. None if all tokens contribute."""
        return self.tokens.meta.get("trained_tokens")

    def count_truncated_tokens(self) -> int:
        """Count the tokens that truncation removes because documents are longer than a sample.

        The result is 0 if documents are concatenated. It is only valid if ``data.truncation`` is
        ``end``. For other values, use :attr:`truncation_stats`. The result is slightly too low in
        two cases: for text pairs, because the special tokens added after truncation are not
        considered, and if the context's ``keep_last_input`` is True, by one token per truncated
        document.
        """
        settings, tokens, cut = self.settings, self.tokens, 0
        if settings.packing is True:
            return 0
        longest = settings.data.seq_len + (settings.task == CAUSAL)
        longest_target = settings.data.target_seq_len or settings.data.seq_len
        pairs = "pair" in tokens.offsets
        for names in [["text", "pair"]] if pairs else [[name] for name in tokens.offsets]:
            most = longest_target if names == ["target"] else longest
            for start in range(0, tokens.num_documents, 1 << 20):
                rows = slice(start, start + (1 << 20) + 1)
                lengths = sum(np.diff(tokens.offsets[name][rows].astype(np.int64)) for name in names)
                cut += int(np.maximum(lengths - most, 0).sum())
        return cut

    @property
    def _num_blocks(self) -> int:
        """Number of blocks of ``data.seq_len`` tokens in the concatenated documents.

        Raises:
            UserError: If there are too few tokens for one block.
        """
        shifted = self.settings.task == CAUSAL
        return count_packed_samples(self.tokens.num_tokens, self.settings.data.seq_len, shifted=shifted)

    @cached_property
    def truncation_stats(self) -> TruncationStats | None:
        """Effect of ``data.truncation`` on the documents of a causal language model.

        If documents are concatenated, the statistics refer to blocks instead of documents. A block
        is excluded if none of its tokens contributes to the loss.

        None for other tasks. Also None if truncation can never exclude a document from training.
        That is certain if all tokens contribute to the loss, and documents are concatenated or
        truncated only at their end.

        Raises:
            NoSampleLeftError: If all documents or blocks are excluded.
            UserError: If a document is too long and ``data.truncation`` is ``error``. If documents
                are concatenated, also if there are too few tokens for one block.
        """
        tokens, data = self.tokens, self.settings.data
        if self.settings.task != CAUSAL:
            return None
        if tokens.trained_bits is None and (data.packing is True or data.truncation == "end"):
            return None
        if data.packing is True:
            return compute_block_truncation_stats(tokens, data.seq_len, self._num_blocks)
        return compute_truncation_stats(
            tokens, data.truncation, data.seq_len, keep_last_input=self.context.keep_last_input
        )

    def split_samples(self) -> TrainEvalSplit:
        """Split the source into training samples and samples that are held out for evaluation.

        ``data.eval_fraction`` determines the number of held-out samples. If documents are
        concatenated, the last blocks are held out. Otherwise, a random selection is held out, which
        is equal in all runs. Samples that truncation excludes from training are in neither range. A
        stream has no held-out samples.

        Returns:
            Two ranges of sample numbers. A sample is a preference pair, a block of concatenated
            documents, or a document (if samples are padded, or packed from complete documents).

        Raises:
            NoSampleLeftError: If truncation excludes all documents or blocks, or at least one
                answer of every preference pair.
            UserError: If :attr:`truncation_stats` raises an error. If documents are concatenated,
                also if there are too few tokens for one block.
        """
        data, packing = self.settings.data, self.settings.packing
        share = 0.0 if self.settings.is_stream else data.eval_fraction
        left_out = None if self.truncation_stats is None else self.truncation_stats.left_out
        if data.format == PREFERENCE:
            num_pairs = self.tokens.num_documents // 2
            pairs = None if left_out is None else np.unique(left_out // 2)
            if pairs is not None and len(pairs) == num_pairs:
                raise NoSampleLeftError(
                    "data.truncation: all preference pairs are excluded, because at least one answer of "
                    f"every pair is left out ({self.truncation_stats}); raise data.seq_len (now "
                    f"{data.seq_len}), or change data.truncation"
                )
            return split_documents(num_pairs, share, pairs)
        if data.packing == "documents" or not packing:
            return split_documents(self.tokens.num_documents, share, left_out)
        return split_packed_blocks(self._num_blocks, share, left_out)

    def count_samples(self) -> SampleCounts:
        """Count the training samples and the held-out samples, without writing files."""
        train, held_out = self.split_samples()
        if self.settings.packing != "documents":
            return SampleCounts(train.num_samples, held_out.num_samples, None)
        from portable.data.samples.packing import compute_packing_stats

        length = self.settings.data.seq_len
        last = self.context.keep_last_input_if_room
        packed, packed_held_out = (
            compute_packing_stats(self.tokens, part, length, keep_last_input_if_room=last)
            for part in (train, held_out)
        )
        return SampleCounts(packed.samples, packed_held_out.samples, packed.padding_share)

    def check_end_of_turn_kept(self) -> None:
        """Check that at least one answer keeps its end-of-turn token after truncation.

        Otherwise, the model would never learn to stop.

        Raises:
            UserError: If truncation removes the end of every answer.
        """
        end = self.end_of_turn_token
        if (
            end is None
            or self.truncation_stats is None
            or has_trained_end_token(self.tokens, self.truncation_stats, end)
        ):
            return
        modes = "drop" if self.tokens.has_images else "start or drop"
        raise UserError(
            f"data.truncation: all samples are cut before {decode(self.context.tokenizer, [end])!r}, which "
            "ends an answer, so the model would not learn to stop; raise data.seq_len (now "
            f"{self.settings.data.seq_len}), or set data.truncation to {modes}"
        )

    def build_samples(
        self, sample_range: SampleRange | None = None, classes: LabelMapping | None = None
    ) -> Samples:
        """Build the dataset for a range of the samples.

        If ``data.packing`` is ``documents``, this method also computes the packing plan and writes
        it to the cache. A plan that is already in the cache is reused.

        Args:
            sample_range: Range of samples to include. None includes all samples that are not held
                out.
            classes: Mapping from labels to the outputs of a classifier. None for other tasks.

        Raises:
            UserError: If ``sample_range`` is None and :meth:`split_samples` raises an error. For
                packed documents, also if every document has fewer than two tokens, or if the cache
                is not writable.
        """
        samples = self._build_samples(
            self.split_samples().train if sample_range is None else sample_range, classes
        )
        samples.image_processor = self.context.image_processor
        samples.includes_columns = bool(list_number_columns(self.settings.data))
        return samples

    def _build_samples(self, part: SampleRange, classes: LabelMapping | None) -> CacheSamples:
        """Build a dataset whose class depends on the task, the record format and the packing.

        Its batches do not contain the columns of numbers from ``data.columns`` yet. See
        :meth:`build_samples` for the arguments.
        """
        context, tokens, data = self.context, self.tokens, self.settings.data
        if context.task != CAUSAL:
            return self._build_task_samples(part, classes)
        pad, common = context.vocabulary.pad_token, (tokens, part, data.seq_len)
        if data.format == PREFERENCE:
            return PairSamples(
                *common,
                pad,
                data.truncation,
                keep_last_input=context.keep_last_input,
                keep_last_input_if_room=context.keep_last_input_if_room,
            )
        if data.packing == "documents":
            from portable.data.samples.packing import PackedDocumentSamples, load_or_build_packing_plan

            plan = load_or_build_packing_plan(
                *common, keep_last_input_if_room=context.keep_last_input_if_room
            )
            return PackedDocumentSamples(
                *common,
                plan,
                pad,
                data.truncation,
                keep_last_input_if_room=context.keep_last_input_if_room,
            )
        if data.packing:
            return PackedCausalSamples(*common)
        return PaddedCausalSamples(
            *common,
            pad,
            data.truncation,
            keep_last_input=context.keep_last_input,
            keep_last_input_if_room=context.keep_last_input_if_room,
        )

    def _build_task_samples(self, part: SampleRange, classes: LabelMapping | None) -> CacheSamples:
        """Build the dataset for a masked, sequence-to-sequence or classification task."""
        from portable.data.samples.tasks import ClassificationSamples, MaskedLMSamples, Seq2SeqSamples

        context, tokens, data = self.context, self.tokens, self.settings.data
        common = tokens, part, data.seq_len
        vocabulary, suffix = context.vocabulary, self.frame.suffix
        if context.task == MASKED:
            return MaskedLMSamples(
                *common,
                vocabulary,
                mask_token=context.required_mask_token,
                suffix=suffix,
                seed=context.seed,
                is_packed=bool(data.packing),
                label_shift=None if context.label_shift is None else context.label_shift(context.tokenizer),
            )
        if context.task == SEQ2SEQ:
            start = context.decoder_start_token_id
            start = start(context.tokenizer) if callable(start) else start
            return Seq2SeqSamples(
                *common,
                vocabulary,
                suffix=suffix,
                decoder_start_token_id=vocabulary.pad_token if start is None else start,
                target_suffix=(self.frame.target or self.frame).suffix,
                target_seq_len=data.target_seq_len,
            )
        return ClassificationSamples(
            *common,
            vocabulary,
            suffix=suffix,
            label_mapping=classes,
            pad_left=context.pad_left,
            pair_frame=None
            if self.settings.fields.pair is None
            else PairFrame.from_tokenizer(context.tokenizer),
        )


def _count_shard_samples(settings: SourceSettings, shard: SourceShard) -> int | None:
    """Count the samples of a shard without reading its tokens.

    Returns:
        The count. None if the number of tokens is not known. Also None if documents are not
        concatenated or the source contains conversations, because the number of tokens does not
        determine the count in these cases.
    """
    if shard.num_tokens is None or settings.data.packing is not True or settings.has_conversations:
        return None
    return max(0, (shard.num_tokens - 1) // settings.data.seq_len)


def _build_shard_samples(
    context: TokenizationContext, source: DataSource, tokens: TokenCache
) -> Samples | None:
    """Build the samples of one shard of a stream.

    Args:
        context: Tokenizer, task and model properties.
        source: Source of the complete stream.
        tokens: Token cache of the shard.

    Returns:
        The samples. None if documents are concatenated, and the shard is too short for a sample.

    Raises:
        NoSampleLeftError: If truncation or the loss mask excludes all documents of the shard.
        UserError: If ``data.truncation`` is ``error`` and a document is too long.
    """
    data = source.settings.data
    if data.packing is True and tokens.num_tokens <= data.seq_len:
        return None
    return TokenizedSource(context, source, tokens).build_samples()
