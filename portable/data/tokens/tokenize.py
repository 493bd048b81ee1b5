"""Tokenize documents into a token cache."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from converters.writers.parallel import cores
from portable.data.sources.documents import PIECE_CHARS, Document, digest_of
from portable.data.sources.records import CollectedErrors, EnoughErrors
from portable.data.sources.source import TokenSource
from portable.data.tokens.bounded_tokenizer import encode, encode_targets
from portable.data.tokens.cache import FORMAT, CacheDamagedError, TokenCache, TokenWriter
from portable.data.tokens.parallel import ordered_map
from portable.data.tokens.tokenizer import (
    Vocabulary,
    begins_with,
    parallel_tokenizers,
    tokenizer_digest,
)
from portable.errors import UserError, one_line
from portable.temporary_folder import made_once

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from portable.data.sources.source import Shard, Source, SourceSettings
    from portable.data.tokens.chat_template import ChatTemplate
    from portable.data.tokens.frame import Frame

TOKENS = "tokens"
"""The folder of a cache with the token caches."""
_BATCH_CHARS = 2 << 20  # enough for the tokenizer's threads, and little memory
_BATCH_DOCUMENTS = 4096
_CHAT_CHARS = 1 << 18  # small enough to keep all processes busy
_ALONE = 16  # batches of it: about as long as processes take to start


@dataclass(frozen=True)
class TokenizeJob:
    """How the documents of a source become tokens; other processes may do it.

    Attributes:
        settings: of the source.
        tokenizer, vocabulary: of the run.
        frame: the special tokens around each text.
        cache: the folder of the cache.
        chat: what tokenizes conversations and completions, by all cores; None for plain text.
    """

    settings: SourceSettings
    tokenizer: Any
    vocabulary: Vocabulary
    frame: Frame
    cache: Path
    chat: ChatTemplate | None = None

    @cached_property
    def made(self) -> str:
        """A digest of what decides the tokens of a text. It takes long for a large tokenizer."""
        content = f"{FORMAT} {tokenizer_digest(self.tokenizer)} {self.frame} {PIECE_CHARS}"
        content += "" if self.frame.target is None else f" {self.frame.target}"
        content += "" if self.chat is None else f" {self.chat.key}"
        return digest_of(content)

    def folder(self, source: Source) -> Path:
        """The folder of the token cache of ``source``, whether or not it exists."""
        # Older versions gave a second prefix to texts that begin with it.
        version = " one prefix" if self.frame.prefix else ""
        return self.cache / TOKENS / digest_of(f"{source.key} {self.made}{version}")

    def __call__(self, shard: Shard) -> Path:
        """The folder of the tokens of a shard, in a process of its own."""
        os.nice(0 if os.nice(0) >= 5 else 5)  # the step comes first
        return self.tokens_of_shard(shard).folder

    def tokens_of_shard(self, shard: Shard) -> TokenCache:
        """The tokens of a shard, from the cache if possible. No copy of its file stays."""
        source = shard.open(self.settings)
        if (folder := source.tokenized_in(self.cache / TOKENS, self.made)) is None:
            try:
                return self.tokens(source)
            finally:
                source.release()
        try:
            return TokenCache.open(folder)
        except CacheDamagedError as error:
            raise UserError(f"data.source: {one_line(error)}; run portable-data again") from error

    def tokens(self, source: Source, *, progress: bool = False) -> TokenCache:
        """Return the tokens of ``source``, from the cache if possible.

        A damaged cache is rebuilt. One batch of documents is in memory at a time.

        Raises:
            UserError: if the source cannot be read or has no text, or the cache is not writable.
        """
        return made_once(
            self.folder(source), TokenCache.intact, partial(self._write, source, progress=progress)
        )

    def _write(self, source: Source, folder: Path, progress: bool) -> None:
        fields = source.fields
        names = ["text"]
        names += ["target"] * (fields.target is not None) + ["pair"] * (fields.pair is not None)
        labels, masked = fields.label is not None, self.chat is not None
        writer = TokenWriter(
            folder, names, self.vocabulary.size, labels=labels, masked=masked, columns=fields.columns
        )
        bar = tqdm(
            total=source.size_bytes,
            unit="B",
            unit_scale=True,
            delay=1,
            desc="tokenizing",
            disable=not progress,
        )
        with closing(writer), parallel_tokenizers(), bar:
            facts: dict[str, Any] = {}
            fields.blank.count = 0
            with source.unchanged():
                if isinstance(source, TokenSource):
                    for tokens, lengths in source.tokens(self.vocabulary.size, self.vocabulary.end):
                        writer.add("text", tokens, lengths)
                        bar.update(len(tokens))
                elif self.chat is not None:
                    facts = _write_conversations(source, self.chat, writer, bar)
                else:
                    within = False
                    for batch in _batches(source.documents()):
                        within = _write(batch, self, writer, within)
                        bar.update(sum(map(_size, batch)))
            if not writer.documents:
                raise source.no_text()
            if fields.bad is not None:
                fields.bad.tell(source.name)
            if blank := fields.blank.describe(source.name, fields):
                facts["notes"] = [*facts.get("notes", ()), *blank]
            writer.finish(suffix=list(self.frame.suffix), source=source.name, **facts)

    def first_end(self, source: Source) -> int | None:
        """The token that ends an answer in the first records, which are refused as all of them would be."""
        if self.chat is None:
            return None
        bad = source.fields.bad
        for batch in _batches(source.documents(), _CHAT_CHARS, whole=True):
            encoded = self.chat.encode(batch, collect=True)
            collected = CollectedErrors()
            for error in encoded.refused:
                (collected if bad is None else bad).skip(error)
            if collected.errors:
                raise collected.to_error(source.name)
            if not encoded.tokens:
                continue
            if not encoded.stopping:
                raise _never_stops(self.chat, encoded.unstopped)
            return _most_frequent(encoded.ends)
        return None


def _write_conversations(source: Source, chat: ChatTemplate, writer: TokenWriter, bar: Any) -> dict[str, Any]:
    """Write all records; return what is known about the ends of answers."""
    sizes: deque[int] = deque()
    columns: deque[list[tuple[float, ...]]] = deque()

    def batches() -> Iterator[list[Document]]:
        for batch in _batches(source.documents(), _CHAT_CHARS, whole=True):
            sizes.append(sum(_size(document) for document in batch))
            columns.append([document.columns for document in batch])
            yield batch

    from portable.data.tokens.chat_template import notes

    stopping, ends, counts, prompt_left, unstopped = 0, Counter[int](), Counter[str](), "", ""
    bad = source.fields.bad
    collected = CollectedErrors()
    encode = partial(chat.encode, collect=True)
    for encoded in ordered_map(encode, batches(), processes=cores(), alone=_ALONE):
        bar.update(sizes.popleft())
        try:
            for error in encoded.refused:
                (collected if bad is None else bad).skip(error)
        except EnoughErrors:
            break
        if not encoded.tokens:
            columns.popleft()
            continue
        lengths = [len(tokens) for tokens in encoded.tokens]
        writer.add("text", np.concatenate(encoded.tokens), lengths, np.concatenate(encoded.trained))
        pairs = zip(columns.popleft(), encoded.samples, strict=True)
        writer.add_columns([values for values, samples in pairs for _ in range(samples)])
        stopping, ends, counts = stopping + encoded.stopping, ends + encoded.ends, counts + encoded.counts
        prompt_left, unstopped = prompt_left or encoded.prompt_left, unstopped or encoded.unstopped
        if not stopping:  # not one of thousands: the template's, not the record's
            raise _never_stops(chat, unstopped)
    if collected.errors:
        raise collected.to_error(source.name)
    return {"end_of_turn": _most_frequent(ends), "notes": notes(counts, prompt_left)}


def _most_frequent(ends: Counter[int]) -> int | None:
    return min(ends, key=lambda token: (-ends[token], token)) if ends else None


def _never_stops(chat: ChatTemplate, unstopped: str) -> UserError:
    remedy = (
        "end the turn with a special token of the tokenizer, inside {% generation %} if the template has it"
    )
    if lacking := chat.lacking:
        tokens = json.dumps(lacking, ensure_ascii=False)
        remedy = f"the tokenizer lacks tokens that the template writes; set data.added_tokens to {tokens}"
    return UserError(
        "data.chat_template: the trained tokens never include the one that ends an answer, so the "
        f"model would never stop: they end in {unstopped}; {remedy}"
    )


def _write(batch: list[Document], job: TokenizeJob, writer: TokenWriter, within: bool) -> bool:
    """Write a batch; ``within`` says whether its first text goes on a document, and so does the result."""
    frame, encoded = job.frame, _encode(job.tokenizer, [document.text for document in batch])
    tokens: list[int] = []
    ends: list[int] = []
    for document, ids in zip(batch, encoded, strict=True):
        tokens += ids if within or begins_with(ids, frame.prefix) else [*frame.prefix, *ids]
        within = not document.ends
        if document.ends:
            if not frame.once or tuple(ids[-len(frame.suffix) :]) != frame.suffix:
                tokens += frame.suffix
            ends.append(len(tokens))
    writer.add("text", tokens, np.diff(ends, prepend=0))
    whole = [document for document in batch if document.ends]
    around = frame.target or frame
    targets = [document.target for document in whole if document.target is not None]
    for name, found in (
        (
            "target",
            [
                [*(() if begins_with(ids, around.prefix) else around.prefix), *ids, *around.suffix]
                for ids in _encode(job.tokenizer, targets, targets=True)
            ],
        ),
        ("pair", _encode(job.tokenizer, [document.pair for document in whole if document.pair is not None])),
    ):
        if found:
            writer.add(name, [*chain.from_iterable(found)], [*map(len, found)])
    writer.add_labels([document.label for document in whole])
    writer.add_columns([document.columns for document in whole])
    return within


def _encode(tokenizer: Any, texts: list[str], *, targets: bool = False) -> list[list[int]]:
    if not texts:
        return []
    encoded: list[list[int]] = (encode_targets if targets else encode)(
        tokenizer,
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # ignore the tokenizer's length limit: documents are truncated later
    )["input_ids"]
    return encoded


def _batches(
    documents: Iterator[Document], chars: int = _BATCH_CHARS, *, whole: bool = False
) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held = 0
    for document in documents if whole else _in_pieces(documents):
        batch.append(document)
        held += len(document.text) + len(document.target or "") + len(document.pair or "")
        # The two of a preference stay together.
        if (held >= chars or len(batch) >= _BATCH_DOCUMENTS) and not (whole and len(batch) % 2):
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _in_pieces(documents: Iterator[Document]) -> Iterator[Document]:
    """Split very long texts, at line ends if possible, to limit the memory of a call."""
    for document in documents:
        text, start = document.text, 0
        while len(text) - start > 2 * PIECE_CHARS:
            least = start + PIECE_CHARS
            cut = text.find("\n", least, least + PIECE_CHARS) + 1 or least
            yield Document(text[start:cut], ends=False)
            start = cut
        yield replace(document, text=text[start:])


def _size(document: Document) -> int:
    texts = (document.text, document.target or "", document.pair or "")
    return sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
