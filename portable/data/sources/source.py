"""Base classes of all data sources, and the settings of a source.

Each kind of source is a subclass of :class:`DataSource` in a separate file. Its method
:meth:`DataSource.from_names` opens the source if the names in ``data.source`` are of this kind. The
source then yields records, documents or tokens, and computes their digest. To add a kind, implement
a subclass and add it to ``list_source_classes`` in ``source_kinds.py``.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from portable.config.sections import DataConfig, SourceConfig
from portable.config.sources import list_number_columns, list_renamed_fields
from portable.data.sources.documents import (
    DEFAULT_TRAINED_ROLES,
    Document,
    NoTextError,
    RecordError,
    RecordFormat,
    build_data_changed_error,
)
from portable.data.sources.read_errors import convert_read_errors
from portable.data.sources.records import (
    BadRecords,
    CollectedErrors,
    EnoughErrors,
    Fields,
    LocatedRow,
    parse_record,
    refuse_columns,
    rename_fields,
)
from portable.errors import MissingDataError, MultipleMistakesError, RunError, UserError
from portable.paths import get_default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt


STREAMS_FOLDER = "streams"
"""Name of the folder in the cache for the files and tokens of streams."""
CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
)
"""Tasks of a model, which are the values of ``model.task``."""
PREFERENCE, CUSTOM_SAMPLES = "preference", "samples"
"""Values of ``data.format`` for preference pairs, and for samples from user-defined code."""


@dataclass(frozen=True)
class SourceSettings:
    """Settings of one source.

    Attributes:
        data: The ``data`` section for this source.
        task: Task of the model, one of ``TASKS``.
        config_key: Dotted key of the source in the config, used in error messages.
        offline: Whether to avoid all writes and downloads.
        bad_records: Counter or collector of records that cannot be read. If None,
            ``data.on_bad_record`` determines whether they are skipped or end the run.
    """

    data: DataConfig
    task: str = CAUSAL
    config_key: str = "data"
    offline: bool = False
    bad_records: BadRecords | None = field(default=None, compare=False)

    @cached_property
    def fields(self) -> Fields:
        """Names of a record's columns to read, and settings for reading them."""
        data, kind = self.data, self.data.format
        labelled, translated = self.task == CLASSIFICATION, self.task == SEQ2SEQ
        return Fields(
            text=data.text_field,
            target=data.target_field if translated else None,
            label=data.label_field if labelled else None,
            text_split=data.text_split,
            pair=data.text_pair_field if labelled else None,
            prefix=data.source_prefix if translated else "",
            bad=self.bad_records or (BadRecords() if data.on_bad_record == "skip" else None),
            columns=list_number_columns(data),
            renamed=list_renamed_fields(data),
            format="text" if self.task != CAUSAL else None if kind == "auto" else kind,
            roles=frozenset(data.roles_to_train or DEFAULT_TRAINED_ROLES),
        )

    def with_format(self, kind: RecordFormat) -> SourceSettings:
        """Return a copy of the settings with ``data.format`` set to ``kind``.

        The copy shares the counter of bad records, so each bad record is printed and counted only once.
        """
        data = self.data.model_copy(update={"format": kind})
        return replace(self, data=data, bad_records=self.fields.bad)

    @property
    def has_conversations(self) -> bool:
        """Whether the records are conversations, completions or preferences instead of texts.

        Always False if ``data.format`` is ``auto``, because the format has not been detected yet.
        """
        return self.data.format not in ("auto", "text", CUSTOM_SAMPLES)

    @property
    def packing(self) -> bool | Literal["documents"]:
        """Value of ``data.packing``, or False if the task does not support packing."""
        return self.data.packing if self.task in (CAUSAL, MASKED) else False

    @property
    def split(self) -> str:
        """Name of the dataset split to read. Defaults to ``train``."""
        return self.data.split or "train"

    @property
    def cache_folder(self) -> Path:
        """Cache folder for this source. Streams use a subfolder."""
        folder = get_default_cache_dir() if self.data.cache_dir is None else Path(self.data.cache_dir)
        return folder / STREAMS_FOLDER if self.data.stream else folder

    @property
    def tokenizer_languages(self) -> dict[str, Any]:
        """Language arguments for :func:`portable.data.tokens.tokenizer.load_tokenizer`, keyed by name.

        Empty if the task is not seq2seq.
        """
        if self.task != SEQ2SEQ:
            return {}
        return {"source_language": self.data.source_language, "target_language": self.data.target_language}

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Convert UserErrors within this context, so that they refer to the settings of this source.

        For example, ``data.source`` in a message becomes ``data.sources.news.source``.
        """
        try:
            yield
        except UserError as error:
            if self.config_key == "data":
                raise
            if isinstance(error, MultipleMistakesError):
                raise MultipleMistakesError(list(map(self._replace_config_key, error.lines))) from error
            kind = MissingDataError if isinstance(error, MissingDataError) else UserError
            raise kind(self._replace_config_key(str(error))) from error

    def _replace_config_key(self, message: str) -> str:
        """Replace the prefix ``data.`` of a setting in an error message with the key of this source.

        If the message then does not contain the key, the key is added at its start.
        """
        settings = "|".join(SourceConfig.model_fields)
        message = re.sub(rf"\bdata\.(?=({settings})\b)", f"{self.config_key}.", message)
        return message if self.config_key in message else f"{self.config_key}: {message}"


@dataclass(frozen=True)
class SourceShard:
    """One shard of a stream: a file, a part of a file, or pretokenized data.

    Attributes:
        open_source: Function that opens the shard with given settings. Each call opens the file again,
            to detect changes.
        identity: Text that identifies the content, such as name and size. It is independent of the
            machine, and known without reading the shard.
        size_bytes: Size of the shard in bytes.
        num_tokens: Number of tokens. None if not known before tokenizing.
        fingerprint: Fingerprint of the tokens. Empty if not known before tokenizing.
    """

    open_source: Callable[[SourceSettings], DataSource]
    identity: str
    size_bytes: int
    num_tokens: int | None = None
    fingerprint: str = ""


class DataSource(ABC):
    """Source of documents that can be read repeatedly in a fixed order.

    Args:
        name: Name of the source for error messages, such as the path in the config.
        settings: Settings of the source.

    Raises:
        UserError: If the settings refer to a column, but this kind of source has only text.
    """

    downloads_to_open = False
    """Whether opening the source may download data."""
    downloads_to_read = False
    """Whether reading records of the source may download data."""
    has_tokens = False
    """Whether the source has tokens instead of text."""
    only_text = ""
    """Description of the source in error messages if it has only text or tokens. Empty if it has columns."""
    must_stream_alone = False
    """Whether a stream of this source cannot also contain sources for which this attribute is False."""

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> DataSource | None:
        """Open the source if this class can read sources with these names.

        Args:
            names: Entries of ``data.source``.
            settings: Settings of the source.

        Returns:
            The source. None if the names belong to another kind of source; the next class is then tried.

        Raises:
            UserError: If the names belong to this kind of source, but it cannot be used.
        """
        return None

    def __init__(self, name: str, settings: SourceSettings) -> None:
        self.name = name
        self._apply_settings(settings)

    def _apply_settings(self, settings: SourceSettings) -> None:
        """Store the settings, and reset the cache key, which depends on them.

        Raises:
            UserError: If the settings refer to a column, but this kind of source has only text.
        """
        if self.only_text:
            refuse_columns(settings.fields, self.only_text)
        self.settings = settings
        self._cache_key: str | None = None

    @property
    def fields(self) -> Fields:
        """Names of a record's columns to read, and settings for reading them."""
        return self.settings.fields

    @property
    def description(self) -> str:
        """Name of the source, with facts that are known without reading it, such as its size."""
        return self.name

    @property
    def cache_key(self) -> str:
        """Digest that identifies the source in the cache.

        It is computed by :meth:`compute_digest` on the first access, and kept until the settings change,
        even if the files change.
        """
        if self._cache_key is None:
            self._cache_key = self.compute_digest()
        return self._cache_key

    @abstractmethod
    def compute_digest(self) -> str:
        """Compute a digest of the current content and of the settings for reading it."""

    def detect_and_set_format(self) -> RecordFormat:
        """Detect the format of the first record, and store it in the settings.

        Reads nothing if the settings already define the format.

        Returns:
            The format. ``text`` if there are no records.

        Raises:
            UserError: If several formats fit the record, or if it cannot be read.
        """
        try:
            kind = self._determine_record_format()
        except RecordError as error:
            raise self.collect_record_errors(error) from error
        if kind != self.settings.data.format:
            self._apply_settings(self.settings.with_format(kind))
        return kind

    def _determine_record_format(self) -> RecordFormat:
        """Detect the format of the first valid record, without changing the settings.

        Returns the format in the settings if it is defined there, and ``text`` if there are no records.
        """
        if self.fields.format is not None:
            return self.fields.format
        from portable.data.sources.conversations import detect_record_format

        for location, row in self.iter_rows():
            try:
                return detect_record_format(
                    rename_fields(row, self.fields, location), self.fields.text, location
                )
            except RecordError as error:
                self.fields.skip_record_or_raise(error)
        return "text"

    def iter_rows(self) -> Iterator[LocatedRow]:
        """Yield each record with its location. Yields nothing for plain text, which has no records.

        Subclasses implement :meth:`_read_rows`. This method converts its exceptions to UserError.

        Raises:
            UserError: If a file is damaged.
        """
        with convert_read_errors(self.name):
            yield from self._read_rows()

    def _read_rows(self) -> Iterator[LocatedRow]:
        """Yield each record with its location. Overridden by subclasses that have records."""
        return iter(())

    def iter_documents(self) -> Iterator[Document]:
        """Yield the nonempty documents in a fixed order.

        Raises:
            UserError: If the source or some of its records cannot be read. The message lists the bad
                records.
        """
        try:
            with convert_read_errors(self.name):
                yield from self._read_documents()
        except RecordError as error:
            raise self.collect_record_errors(error) from error

    def _read_documents(self) -> Iterator[Document]:
        """Yield the documents of the first ``data.max_samples`` records."""
        for location, row in islice(self.iter_rows(), self.settings.data.max_samples):
            yield from parse_record(row, self.fields, location)

    def collect_record_errors(self, first: RecordError) -> UserError:
        """Read the source again from the start, and build an error that lists its bad records.

        Args:
            first: Error of the first bad record.

        Returns:
            The error. Returns ``first`` if the bad records are no longer found. Also returns ``first`` if
            no record can be read and all have the same mistake, which suggests that a setting is wrong.
            Returns the error of the source if the source itself cannot be read.
        """
        collected = CollectedErrors()
        reader = copy.copy(self)
        reader.settings = replace(self.settings, bad_records=collected)
        # Until the format of the records is known, only the syntax of their lines is checked.
        records = reader._read_documents() if self.fields.format is not None else reader.iter_rows()
        has_read_record = False
        try:
            for _ in records:
                has_read_record = True
                collected.raise_if_enough()
        except EnoughErrors:
            pass
        except (UserError, RunError) as error:  # an error of the source itself
            return error if isinstance(error, UserError) else first
        if not collected.errors:  # the source has changed
            return first
        if not has_read_record and len(collected.count_by_kind) == 1:  # a setting is wrong
            return first
        return collected.to_error(self.name)

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """Check that the source does not change within this context.

        On exit, recomputes the digest of the source, and compares it with :attr:`cache_key`. Data that was
        read from the source must not be written to a cache before this check.

        Raises:
            UserError: On exit, if another program has changed the source.
        """
        before, refusal = self.cache_key, None
        try:
            yield
        except (UserError, RunError) as error:  # another program may be writing the file
            refusal = error
        if self._has_changed(before):
            raise build_data_changed_error(self.name) from refusal
        if refusal is not None:
            raise refusal

    def _has_changed(self, old_digest: str) -> bool:
        """Return whether the current digest of the source differs from ``old_digest``.

        Returns False if the digest cannot be computed because the source is no longer readable.
        """
        try:
            return self.compute_digest() != old_digest
        except UserError:
            return False

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Class names that the source declares. Its labels are then indices into these names.

        None if the source declares no class names.
        """
        return None

    @property
    def content_digests(self) -> frozenset[bytes]:
        """Digests of the contents of all local files of the source. Empty if there are none.

        They are used to detect training files that are also evaluation files.
        """
        return frozenset()

    @property
    def stored_bytes(self) -> int:
        """Total size of the source's files in bytes, used to compute the sizes of a stream's shards."""
        return 0

    @property
    def size_bytes(self) -> int | None:
        """Estimated size of the text in bytes. None if it is not known."""
        return None

    def remove_local_copies(self) -> None:
        """Remove the local copies of remote files. They are downloaded again when needed."""
        return

    def check_readable(self) -> None:
        """Check that the first document can be read. Does nothing if reading would download data.

        Raises:
            UserError: If the source cannot be read or contains no text.
        """
        if not self.downloads_to_read and next(self.iter_documents(), None) is None:
            raise self.build_no_text_error()

    def build_no_text_error(self) -> NoTextError:
        """Build the error for a source that contains no text."""
        return NoTextError(
            f"data.source: {self.name} contains no text; choose a source with at least one document"
        )

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield the files of the source as shards of a stream. Long files are divided into parts.

        Args:
            part_bytes: Approximate size of each part in bytes.

        Raises:
            UserError: If the source has no files.
        """
        raise UserError(
            "data.stream: data.source names no files; set data.source to files, a pattern or a URL"
        )

    def find_pretokenized_folder(self, copies_folder: Path, job_digest: str) -> Path | None:
        """Return the folder with the source's tokens if ``portable-data`` has tokenized the source.

        Args:
            copies_folder: Folder for copies of remote tokens.
            job_digest: Digest of the tokenizer and of other settings that determine the tokens.

        Returns:
            Folder of the token cache or of its local copy. None if the source has to be tokenized.

        Raises:
            UserError: If the tokens are missing, or were created with different settings.
            NoTextError: If there are no tokens.
        """
        return None

    def find_tokenizer_folder(self) -> Path | None:
        """Return the folder of the tokenizer that was used to tokenize the source.

        Returns:
            The folder. None if the source is not tokenized, or if its tokenizer is not stored with the
            tokens.
        """
        return None


class TokenChunk(NamedTuple):
    """Consecutive tokens of an already tokenized source.

    Attributes:
        tokens: Token ids, an integer array ``[tokens]``.
        lengths: Number of tokens in the chunk for each document that ends in it. Any remaining tokens
            belong to a document that continues in the next chunk.
    """

    tokens: npt.NDArray[Any]
    lengths: list[int]


class TokenSource(DataSource):
    """Base class of sources that contain tokens instead of text."""

    has_tokens = True
    only_text = "files of tokens"
    must_stream_alone = True

    def iter_documents(self) -> Iterator[Document]:
        """Raise UserError: documents are read to train a tokenizer, but this source contains no text."""
        raise UserError(
            f"data.tokenizer: {self.name} contains tokens, not text; set data.tokenizer to the tokenizer "
            "that created the tokens"
        )

    def iter_token_chunks(self, vocab_size: int, document_separator: int | None) -> Iterator[TokenChunk]:
        """Yield the tokens of the source in order.

        Args:
            vocab_size: Vocabulary size of the tokenizer. Larger token ids are an error.
            document_separator: Token that ends each document, for files without document boundaries.

        Raises:
            UserError: If a file is damaged, or if a token is outside the vocabulary.
        """
        with convert_read_errors(self.name):
            yield from self._read_token_chunks(vocab_size, document_separator)

    @abstractmethod
    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]: ...
