"""Tokenize the documents of a source, and write the tokens to a token cache."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from portable.converters.writers.parallel_jobs import count_usable_cores
from portable.data.sources.documents import PIECE_CHARS, Document, compute_text_digest
from portable.data.sources.records import CollectedErrors, EnoughErrors
from portable.data.sources.source import TokenSource
from portable.data.tokens.bounded_tokenizer import encode_targets, encode_text
from portable.data.tokens.cache import (
    CACHE_FORMAT,
    CacheDamagedError,
    TokenCache,
    TokenCacheWriter,
    open_or_resume_writer,
)
from portable.data.tokens.parallel_map import map_in_order
from portable.data.tokens.tokenizer import (
    Vocabulary,
    compute_tokenizer_digest,
    enable_tokenizer_threads,
    starts_with_prefix,
)
from portable.errors import UserError, to_one_line
from portable.formatting import format_bytes
from portable.node_folder import compute_once_per_node
from portable.temporary_folder import open_or_build_cache_folder
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from portable.data.sources.source import DataSource, SourceSettings, SourceShard
    from portable.data.tokens.chat_template import ConversationEncoder
    from portable.data.tokens.special_tokens import Frame

TOKENS_FOLDER = "tokens"
"""Name of the cache subfolder for token caches."""
_BATCH_CHARS = 1 << 18  # characters per batch, few enough to keep all processes busy
_BATCH_DOCUMENTS = 4096
_CHARS_PER_IMAGE = 1 << 13  # each image counts as this many characters; a batch has at most 32 images
_LOCAL_CHAT_BATCHES = 16  # batches of conversations to encode before starting other processes
# Batches of texts that the tokenizer's threads encode before other processes are started.
_LOCAL_TEXT_BATCHES = 64
_MAX_PROCESSES = 32  # with more processes, reading the documents would be the bottleneck
_SAVE_SECONDS = 30.0
"""Interval in seconds at which the progress is saved. A killed process loses at most this much work."""
_LARGE_BYTES = 4 << 30
"""Minimum size in bytes of a source for which a note suggests faster ways to tokenize it."""


class DocumentBatch(NamedTuple):
    """Documents that are encoded together.

    Attributes:
        documents: Documents or pieces of documents.
        continues: Whether the first piece continues the last document of the previous batch.
    """

    documents: list[Document]
    continues: bool


class EncodedField(NamedTuple):
    """Tokens of one field of a batch.

    Attributes:
        tokens: Concatenated tokens of all documents, int64 ``[tokens]``.
        lengths: Number of tokens of each document that ends in this batch, int64 ``[documents]``.
            Only the tokens in this batch are counted. Tokens after the last of these documents
            belong to a document that continues in the next batch and has no entry.
    """

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenizeJob:
    """Job that tokenizes one source, or a shard of it, with fixed settings.

    The settings of the job determine the tokens of each text. A job can be pickled, so that other
    processes can tokenize shards.

    Attributes:
        settings: Settings of the source.
        tokenizer: Transformers tokenizer.
        vocabulary: Vocabulary size and special tokens of the tokenizer.
        frame: Special tokens to put around each text.
        cache: Cache folder. The token caches are in one of its subfolders.
        conversation_encoder: Encoder for conversations and completions. None if the documents are
            plain text.
    """

    settings: SourceSettings
    tokenizer: Any
    vocabulary: Vocabulary
    frame: Frame
    cache: Path
    conversation_encoder: ConversationEncoder | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of all settings that determine the tokens of a text.

        It is computed on first access, which can take a long time for a large tokenizer.
        """
        content = f"{CACHE_FORMAT} {compute_tokenizer_digest(self.tokenizer)} {self.frame} {PIECE_CHARS}"
        content += "" if self.frame.target is None else f" {self.frame.target}"
        content += "" if self.conversation_encoder is None else f" {self.conversation_encoder.cache_key}"
        return compute_text_digest(content)

    def get_cache_folder(self, source: DataSource) -> Path:
        """Return the folder of the source's token cache. It may not exist yet."""
        # Do not use caches of older versions, because they added a second prefix to texts that already begin
        # with it.
        version = " one prefix" if self.frame.prefix else ""
        return self.cache / TOKENS_FOLDER / compute_text_digest(f"{source.cache_key} {self.digest}{version}")

    def __call__(self, shard: SourceShard) -> Path:
        """Tokenize a shard, and return the folder of its token cache. Called in worker processes.

        Lowers the priority of the process permanently, because training has priority.
        """
        os.nice(0 if os.nice(0) >= 5 else 5)  # training has priority
        return self.tokenize_shard(shard).folder

    def tokenize_shard(self, shard: SourceShard) -> TokenCache:
        """Return the token cache of a shard. Tokenize the shard first if necessary.

        If ``portable-data`` has already tokenized the shard, this method opens these tokens.
        Otherwise, it opens the shard's own token cache, which it creates first if the cache does
        not exist. In this second case, it finally removes the local copies of the shard's remote
        files.

        Raises:
            UserError: If the shard cannot be read, if its tokens from ``portable-data`` are
                damaged, or if the cache is not writable. If the disk is full, ``__cause__`` is the
                OSError.
            NoTextError: If the shard contains no text.
        """
        source = shard.open_source(self.settings)
        if (folder := source.find_pretokenized_folder(self.cache / TOKENS_FOLDER, self.digest)) is None:
            try:
                return self.tokenize_source(source)
            finally:
                source.remove_local_copies()
        try:
            return TokenCache.open(folder)
        except CacheDamagedError as error:
            reason = to_one_line(error).rpartition("; ")[0]  # the remedy differs for such tokens
            raise UserError(f"data.source: {reason}; run portable-data again") from error

    def tokenize_source(self, source: DataSource, *, progress: bool = False) -> TokenCache:
        """Tokenize a source, or open its token cache if the cache exists and is intact.

        The cache is rebuilt if it is damaged, or if an image file that it uses has changed. If an
        earlier process was killed while it tokenized the source, this method keeps the batches that
        the process wrote, and continues after them. Only a few batches of documents are in memory
        at a time.

        Args:
            source: Source to tokenize.
            progress: Whether to show a progress bar if tokenizing takes more than a second.

        Raises:
            UserError: If the cache is not writable, or if the source cannot be read or encoded. See
                :meth:`_write_cache`.
            NoTextError: If the source contains no text.
        """
        defect, is_written = "is damaged", False

        def open_unchanged(folder: Path) -> TokenCache | None:
            nonlocal defect
            cache = TokenCache.open_if_intact(folder)
            if cache is None or is_written or (path := self._find_changed_image(cache)) is None:
                return cache
            defect = f"the image {path!r} has changed"
            return None

        def write(folder: Path) -> None:
            nonlocal is_written
            self._write_cache(source, folder, progress=progress)
            is_written = True

        return open_or_build_cache_folder(
            self.get_cache_folder(source),
            open_unchanged,
            write,
            resumes=True,
            describe_defect=lambda: defect,
        )

    def open_cached(self, source: DataSource) -> TokenCache | None:
        """Open the token cache of a source.

        Returns:
            The cache. None if it does not exist, if it is damaged, or if image files of the source have
            changed.
        """
        cache = TokenCache.open_if_intact(self.get_cache_folder(source))
        return None if cache is None or self._find_changed_image(cache) is not None else cache

    def _find_changed_image(self, cache: TokenCache) -> str | None:
        """Find an image file of the source that has changed since the cache was written.

        If this process is a rank, only one rank of the node reads the files and shares the result.
        See :func:`portable.node_folder.compute_once_per_node`.

        Returns:
            Path of the file, as in the record. None if no file has changed.
        """
        reader = None if self.conversation_encoder is None else self.conversation_encoder.image_reader
        if reader is None or not cache.has_images:
            return None
        return compute_once_per_node(
            f"images of {cache.folder} {cache.meta['digest']}",
            partial(cache.find_changed_image_file, reader.root),
        )

    def _write_cache(self, source: DataSource, folder: Path, progress: bool) -> None:
        """Write the token cache of ``source`` into ``folder``.

        Continues the incomplete cache of a killed process if ``folder`` contains one.

        Raises:
            UserError: If the source cannot be read, if another program has changed it, or if its
                records cannot be encoded and are not skipped. For conversations, see also
                :func:`_write_conversations`.
            NoTextError: If the source contains no text.
        """
        fields = source.fields
        names = ["text"]
        names += ["target"] * (fields.target is not None) + ["pair"] * (fields.pair is not None)
        writer, facts = open_or_resume_writer(
            folder,
            {"batch": [_BATCH_CHARS, _BATCH_DOCUMENTS, PIECE_CHARS]},
            names,
            self.vocabulary.size,
            labels=fields.label is not None,
            masked=self.conversation_encoder is not None,
            images=self.conversation_encoder is not None
            and self.conversation_encoder.image_reader is not None,
            columns=fields.columns,
        )
        self._report_start(source, writer)
        bar = tqdm(
            total=source.size_bytes,
            unit="B",
            unit_scale=True,
            delay=1,
            desc="tokenizing",
            disable=not progress,
        )
        with closing(writer), enable_tokenizer_threads(), bar:
            descriptions: dict[str, Any] = {}
            fields.blank.num_skipped = 0
            with source.check_unchanged():
                if isinstance(source, TokenSource):
                    _copy_tokens(source, self.vocabulary, _TokenizeProgress(writer, facts, bar))
                elif self.conversation_encoder is not None:
                    descriptions = _write_conversations(
                        source, self.conversation_encoder, _TokenizeProgress(writer, facts, bar)
                    )
                else:
                    _write_texts(source, self, _TokenizeProgress(writer, facts, bar))
            if not writer.num_documents:
                raise source.build_no_text_error()
            if fields.bad is not None:
                fields.bad.print_skipped_count(source.name)
            if blank := fields.blank.describe_skipped(source.name, fields):
                descriptions["notes"] = [*descriptions.get("notes", ()), *blank]
            writer.write_metadata(suffix=list(self.frame.suffix), source=source.name, **descriptions)

    def _report_start(self, source: DataSource, writer: TokenCacheWriter) -> None:
        """Print a note if an incomplete cache is continued, and another one if a source is large.

        The note for a large source suggests faster ways to tokenize it. It is not printed for
        streams and evaluation data, which cannot be streamed, or if the source already contains
        tokens.
        """
        if writer.num_documents:
            print_status(
                f"note: {source.name}: continuing after the {writer.num_documents:,} documents that an "
                "interrupted run has tokenized"
            )
        size = source.size_bytes or 0
        is_streamable = not self.settings.data.stream and not self.settings.is_evaluation
        if size >= _LARGE_BYTES and is_streamable and not source.has_tokens:
            print_status(
                f"note: {source.name}: {format_bytes(size)} of text must be tokenized by this machine "
                "before the first step; set data.stream: true to start immediately, or run portable-data "
                "first, which can use several machines"
            )

    def find_end_of_turn(self, source: DataSource) -> int | None:
        """Find the token that ends most answers, by encoding the first batch of valid records.

        Returns:
            Id of the token that ends most answers in the batch, such as an end-of-turn token. None
            if the source contains plain text or no valid records.

        Raises:
            UserError: If the batch contains bad records that are not skipped. The error is also
                raised if no answer in the batch ends with a token that contributes to the loss,
                because the model would then not learn to stop. Tokenizing the source would raise
                the same errors.
        """
        if self.conversation_encoder is None:
            return None
        bad = source.fields.bad
        for batch in _iter_batches(source.iter_documents(), keep_whole=True):
            encoded = self.conversation_encoder.encode_documents(batch, collect=True)
            collected = CollectedErrors()
            for error in encoded.refused_records:
                (collected if bad is None else bad).skip_record(error)
            if collected.errors:
                raise collected.to_error(source.name)
            if not encoded.tokens:
                continue
            if not encoded.num_stopping:
                raise _build_never_stops_error(self.conversation_encoder, encoded.unstopped_example)
            return _find_most_frequent_token(encoded.end_token_counts)
        return None


class _TokenizeProgress:
    """Progress of writing a token cache.

    If an interrupted launch has already written the first batches to the cache, writing continues
    after them.

    Args:
        writer: Writer of the token cache.
        facts: Values to save with the progress. For a new cache, they only identify how the cache
            is written. For a continued cache, they also contain the other values that the
            interrupted launch saved, such as ``batches``, the number of batches written. See
            :func:`open_or_resume_writer`.
        bar: Progress bar that counts bytes of text.
    """

    def __init__(self, writer: TokenCacheWriter, facts: Mapping[str, Any], bar: Any) -> None:
        self.writer = writer
        self.facts = facts
        self.bar = bar
        self.pending: deque[list[Document]] = deque()
        """Batches that are being encoded, in order."""
        self._batches: int = facts.get("batches", 0)
        self._save_at = time.monotonic() + _SAVE_SECONDS

    def iter_unwritten(self, batches: Iterable[list[Document]]) -> Iterator[DocumentBatch]:
        """Yield the batches that the interrupted launch did not write.

        Each yielded batch is also appended to ``pending``. The caller must call
        :meth:`finish_batch` after it has written the batch. For the batches that the interrupted
        launch did write, this method only registers the labels of the documents and advances the
        progress bar.
        """
        continues = False
        for number, batch in enumerate(batches):
            if number < self.facts.get("batches", 0):
                labels = (document.label for document in batch if document.is_last_piece)
                self.writer.add_labels(list(labels), write=False)
                self._advance_bar(batch)
            else:
                self.pending.append(batch)
                yield DocumentBatch(batch, continues)
            continues = not batch[-1].is_last_piece

    def finish_batch(self, facts: Callable[[], Mapping[str, Any]] | None) -> None:
        """Record that the oldest pending batch has been written, and save the progress if due.

        See :meth:`save_if_due`.

        Args:
            facts: Function that returns additional values to save with the progress. None if bad
                records have been found that are not skipped. The launch will then fail, so nothing
                is saved.
        """
        self._advance_bar(self.pending.popleft())
        self._batches += 1
        if facts is not None:
            self.save_if_due(lambda: {**facts(), "batches": self._batches})

    def save_if_due(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Save the progress if the last save was at least :data:`_SAVE_SECONDS` ago.

        Args:
            facts: Function that returns values to save in addition to the attribute ``facts``. If
                both contain the same name, the returned value is saved. The function is called only
                if the progress is saved.
        """
        if time.monotonic() >= self._save_at:
            self.writer.save_progress(**{**self.facts, **facts()})
            self._save_at = time.monotonic() + _SAVE_SECONDS

    def _advance_bar(self, batch: list[Document]) -> None:
        """Advance the progress bar by the number of UTF-8 bytes in the texts of a batch."""
        self.bar.update(sum(map(_count_bytes, batch)))


def _count_processes() -> int:
    """Return the number of processes to use for encoding documents.

    This is the number of usable CPU cores, at most :data:`_MAX_PROCESSES`.
    """
    return min(count_usable_cores(), _MAX_PROCESSES)


def _write_conversations(
    source: DataSource, chat: ConversationEncoder, progress: _TokenizeProgress
) -> dict[str, Any]:
    """Write all conversations of a source to the token cache.

    Returns:
        Entries for the cache's metadata: ``end_of_turn`` is the id of the token that ends
        most answers (or None), and ``notes`` is a list of lines about unexpected effects of
        the template and about empty answers.

    Raises:
        UserError: If the source cannot be read, if records cannot be encoded and are not
            skipped, or if no answer in the first batch ends with a token that contributes to
            the loss. Also if the template drops all reasoning, and most records contain
            reasoning.
    """
    from portable.data.tokens.chat_template import build_template_notes

    writer, saved = progress.writer, progress.facts
    stopping, prompt_left = saved.get("stopping", 0), saved.get("prompt_left", "")
    unstopped = saved.get("unstopped", "")
    ends, counts = Counter[int](dict(saved.get("ends", ()))), Counter[str](saved.get("counts", {}))
    skipped: list[str] = list(saved.get("skipped", ()))
    bad = source.fields.bad
    collected = CollectedErrors()
    if bad is not None:
        for line in skipped:
            bad.skip_record(UserError(line))
    batches = (
        batch for batch, _ in progress.iter_unwritten(_iter_batches(source.iter_documents(), keep_whole=True))
    )
    encode = partial(chat.encode_documents, collect=True)

    def build_facts() -> dict[str, Any]:
        return {
            "stopping": stopping,
            "prompt_left": prompt_left,
            "unstopped": unstopped,
            "ends": list(ends.items()),
            "counts": counts,
            "skipped": skipped,
        }

    for encoded in map_in_order(
        encode, batches, num_processes=_count_processes(), num_local_items=_LOCAL_CHAT_BATCHES
    ):
        writer.add_image_files(encoded.image_files)
        try:
            for error in encoded.refused_records:
                (collected if bad is None else bad).skip_record(error)
                skipped.append(str(error))
        except EnoughErrors:
            break
        if encoded.tokens:
            lengths = [len(tokens) for tokens in encoded.tokens]
            writer.add_documents(
                "text", np.concatenate(encoded.tokens), lengths, np.concatenate(encoded.trained_masks)
            )
            writer.add_images(encoded.images)
            pairs = zip(progress.pending[0], encoded.samples_per_document, strict=True)
            writer.add_columns(
                [document.extra_columns for document, samples in pairs for _ in range(samples)]
            )
            stopping, ends, counts = (
                stopping + encoded.num_stopping,
                ends + encoded.end_token_counts,
                counts + encoded.counts,
            )
            prompt_left, unstopped = (
                prompt_left or encoded.unmatched_prompt,
                unstopped or encoded.unstopped_example,
            )
            # The template must be the cause, because none of thousands of samples contains an end token in
            # its loss mask.
            if not stopping:
                raise _build_never_stops_error(chat, unstopped)
        progress.finish_batch(None if collected.errors else build_facts)
    if collected.errors:
        raise collected.to_error(source.name)
    return {
        "end_of_turn": _find_most_frequent_token(ends),
        "notes": build_template_notes(counts, prompt_left),
    }


def _find_most_frequent_token(ends: Counter[int]) -> int | None:
    """Return the most frequent token, or None if there are no tokens.

    If several tokens are equally frequent, returns the smallest id.
    """
    return min(ends, key=lambda token: (-ends[token], token)) if ends else None


def _build_never_stops_error(chat: ConversationEncoder, unstopped: str) -> UserError:
    """Build the error for conversations whose loss mask never includes the end of an answer.

    Args:
        chat: Encoder of the conversations.
        unstopped: Example of tokens at the end of an answer. See
            :attr:`EncodedConversations.unstopped_example`.
    """
    remedy = (
        "in the template, end each answer with a special token of the tokenizer (inside {% generation %} if "
        "the template uses this tag)"
    )
    if lacking := chat.missing_tokens:
        tokens = json.dumps(lacking, ensure_ascii=False)
        remedy = (
            f"set data.added_tokens to {tokens}, because the tokenizer lacks these tokens of the template"
        )
    return UserError(
        "data.chat_template: the model would not learn to stop, because no trained token ends an answer (the "
        f"trained tokens end in {unstopped}); {remedy}"
    )


def _copy_tokens(source: TokenSource, vocabulary: Vocabulary, progress: _TokenizeProgress) -> None:
    """Copy the tokens of a source to the token cache.

    Tokens that an interrupted launch has already copied are read again, but not written again.
    """
    writer = progress.writer
    written = writer.count_tokens("text")
    for tokens, lengths in source.iter_token_chunks(vocabulary.size, vocabulary.end_token):
        progress.bar.update(len(tokens))
        if written >= len(tokens):
            written -= len(tokens)
            continue
        ends = np.cumsum(lengths, dtype=np.int64)
        # Only part of an array may have been written, because the interrupted launch used shorter arrays.
        if written:
            ends = ends[ends > written] - written
        writer.add_documents("text", tokens[written:], np.diff(ends, prepend=0))
        written = 0
        progress.save_if_due(dict)


def _write_texts(source: DataSource, job: TokenizeJob, progress: _TokenizeProgress) -> None:
    """Encode the documents of a plain-text source, and write them to the token cache."""
    writer = progress.writer
    items = progress.iter_unwritten(_iter_batches(source.iter_documents()))
    encode = partial(_encode_document_batch, job.tokenizer, job.frame)
    for encoded in map_in_order(
        encode, items, num_processes=_count_processes(), num_local_items=_LOCAL_TEXT_BATCHES
    ):
        for name, (tokens, lengths) in encoded.items():
            writer.add_documents(name, tokens, lengths)
        documents = [document for document in progress.pending[0] if document.is_last_piece]
        writer.add_labels([document.label for document in documents])
        writer.add_columns([document.extra_columns for document in documents])
        progress.finish_batch(dict)


def _encode_document_batch(tokenizer: Any, frame: Frame, item: DocumentBatch) -> dict[str, EncodedField]:
    """Encode a batch of documents.

    If a document is split into pieces, the prefix of ``frame`` is put before the first piece, and
    the suffix after the last piece. A prefix is omitted if the text already begins with it.

    Args:
        tokenizer: Transformers tokenizer.
        frame: Special tokens to put around each text. Targets get the tokens of
            ``frame.target`` if it is set. The second texts of pairs get no special tokens.
        item: Batch of documents.

    Returns:
        Encoded fields, keyed by name: ``text``, and ``target`` or ``pair`` if the documents
        have them.
    """
    batch, continues = item
    tokens: list[int] = []
    ends: list[int] = []
    for document, ids in zip(
        batch, _encode_batch(tokenizer, [document.text for document in batch]), strict=True
    ):
        tokens += ids if continues or starts_with_prefix(ids, frame.prefix) else [*frame.prefix, *ids]
        continues = not document.is_last_piece
        if document.is_last_piece:
            if not frame.once or tuple(ids[-len(frame.suffix) :]) != frame.suffix:
                tokens += frame.suffix
            ends.append(len(tokens))
    lengths: npt.NDArray[np.int64] = np.diff([0, *ends]).astype(np.int64)
    encoded = {"text": EncodedField(np.array(tokens, np.int64), lengths)}
    documents = [document for document in batch if document.is_last_piece]
    target_frame = frame.target or frame
    targets = [document.target for document in documents if document.target is not None]
    pairs = [document.pair_text for document in documents if document.pair_text is not None]
    for name, sequences in (
        (
            "target",
            [
                [
                    *(() if starts_with_prefix(ids, target_frame.prefix) else target_frame.prefix),
                    *ids,
                    *target_frame.suffix,
                ]
                for ids in _encode_batch(tokenizer, targets, targets=True)
            ],
        ),
        ("pair", _encode_batch(tokenizer, pairs)),
    ):
        if sequences:
            lengths = np.array([*map(len, sequences)], np.int64)
            encoded[name] = EncodedField(np.array([*chain.from_iterable(sequences)], np.int64), lengths)
    return encoded


def _encode_batch(tokenizer: Any, texts: list[str], *, targets: bool = False) -> list[list[int]]:
    """Encode texts without special tokens, and return the token ids of each text.

    Args:
        tokenizer: Transformers tokenizer.
        texts: Texts to encode.
        targets: Whether the texts are the targets of a seq2seq task. Some tokenizers encode targets
            differently from inputs.
    """
    if not texts:
        return []
    encoded: list[list[int]] = (encode_targets if targets else encode_text)(
        tokenizer,
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning about the tokenizer's length limit, because documents are truncated later
    )["input_ids"]
    return encoded


def _iter_batches(documents: Iterator[Document], *, keep_whole: bool = False) -> Iterator[list[Document]]:
    """Group documents into batches.

    A batch is complete when it has at least :data:`_BATCH_CHARS` characters or
    :data:`_BATCH_DOCUMENTS` documents. An image counts as :data:`_CHARS_PER_IMAGE` characters.

    Args:
        documents: Documents of a source.
        keep_whole: Whether to leave long texts unsplit, and to keep both documents of a preference
            pair in the same batch. To keep pairs together, each batch except the last has an even
            number of documents.
    """
    batch: list[Document] = []
    num_chars = 0
    for document in documents if keep_whole else _iter_pieces(documents):
        batch.append(document)
        num_chars += len(document.text) + len(document.target or "") + len(document.pair_text or "")
        if document.conversation is not None:
            num_chars += _CHARS_PER_IMAGE * len(document.conversation.images)
        # Both documents of a preference pair must be in the same batch.
        if (num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS) and not (
            keep_whole and len(batch) % 2
        ):
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _iter_pieces(documents: Iterator[Document]) -> Iterator[Document]:
    """Split very long texts into pieces, at line ends if possible.

    Texts with more than twice :data:`PIECE_CHARS` characters are split into pieces of at most this
    size, to limit the memory that a tokenizer call requires. Other documents are unchanged. Only
    the last piece has the label, the target and the other attributes of the document.
    """
    for document in documents:
        text, start = document.text, 0
        while len(text) - start > 2 * PIECE_CHARS:
            least = start + PIECE_CHARS
            cut = text.find("\n", least, least + PIECE_CHARS) + 1 or least
            yield Document(text[start:cut], is_last_piece=False)
            start = cut
        yield replace(document, text=text[start:])


def _count_bytes(document: Document) -> int:
    """Count the UTF-8 bytes of all texts in a document."""
    texts = (document.text, document.target or "", document.pair_text or "")
    return sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
