"""Base classes of all data sources, and the settings of a source.

Each kind of source is a subclass of :class:`DataSource` in another file of this package.
Its method :meth:`DataSource.from_names` opens the source if the names in ``data.source``
are of this kind. The source then yields records, documents or tokens, and computes their
digest. To add a kind, implement a subclass and add it to ``list_source_classes`` in
``source_kinds.py``.
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
"""Name of the cache subfolder for the files and tokens of streams."""
CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
)
"""Model tasks, which are the values of ``model.task``."""
PREFERENCE, CUSTOM_SAMPLES = "preference", "samples"
"""Values of ``data.format``: one for preference pairs, and one for samples from user-defined code."""


@dataclass(frozen=True)
class SourceSettings:
    """Settings of one source.

    Attributes:
        data: The ``data`` section of the config, with the values for this source.
        task: Task of the model, one of ``TASKS``.
        config_key: Dotted key of the source in the config, used in error messages.
        offline: Whether writing and downloading should be avoided. File digests are then not
            cached. A source does not enforce this setting when it is read, so the caller must first
            check ``downloads_to_open`` and ``downloads_to_read``.
        bad_records: Counter or collector of records that cannot be read. If None,
            ``data.on_bad_record`` determines whether they are skipped or end the run.
        is_evaluation: Whether the source is evaluation data. It is tokenized before the first step,
            even if ``data.stream`` is set.
    """

    data: DataConfig
    task: str = CAUSAL
    config_key: str = "data"
    offline: bool = False
    bad_records: BadRecords | None = field(default=None, compare=False)
    is_evaluation: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether the source is tokenized during training.

        This is the case if ``data.stream`` is set and the source is not evaluation data.
        """
        return self.data.stream and not self.is_evaluation

    @cached_property
    def fields(self) -> Fields:
        """Names of the columns to read from a record, and settings for reading records.

        The object is created once, because it also contains the counters of bad and blank records.
        Its format is ``text`` for all tasks except causal language modeling, and None if
        ``data.format`` is ``auto``.
        """
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
        """Folder in which this source caches its data.

        A stream uses the subfolder ``streams`` of the cache folder. Any other source uses the cache
        folder itself: ``data.cache_dir`` or, if that is null, the default cache folder.
        """
        folder = get_default_cache_dir() if self.data.cache_dir is None else Path(self.data.cache_dir)
        return folder / STREAMS_FOLDER if self.is_stream else folder

    @property
    def tokenizer_languages(self) -> dict[str, Any]:
        """Source and target language, as keyword arguments for the loader of the tokenizer.

        The loader is :func:`portable.data.tokens.tokenizer.load_tokenizer`. The property is empty
        if the task is not seq2seq.
        """
        if self.task != SEQ2SEQ:
            return {}
        return {"source_language": self.data.source_language, "target_language": self.data.target_language}

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Rewrite UserErrors raised in this context so that they name this source's settings.

        For example, ``data.source`` in a message becomes ``data.sources.news.source``. The new
        exception is a :class:`MissingDataError`, a :class:`MultipleMistakesError` or a plain
        :class:`UserError`. Other subclasses, such as :class:`NoTextError`, are not preserved.
        Nothing is changed if the config key of the source is ``data``.
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
        """Replace ``data`` in the setting names of an error message with the config key of this source.

        Only names of settings of :class:`SourceConfig` are changed. If the config key is
        ``data.sources.news``, for example, ``data.source`` becomes ``data.sources.news.source``. If the
        message then does not contain the config key, the key is added at the start.
        """
        settings = "|".join(SourceConfig.model_fields)
        message = re.sub(rf"\bdata\.(?=({settings})\b)", f"{self.config_key}.", message)
        return message if self.config_key in message else f"{self.config_key}: {message}"


@dataclass(frozen=True)
class SourceShard:
    """One shard of a stream: a file, a part of a file, or pretokenized data.

    Attributes:
        open_source: Function that opens the shard with the given settings. Each call opens the
            file again, so that changes are detected.
        identity: Text that describes the content, such as name and size. It is independent of
            the machine, and known without reading the shard. Shards with different contents can
            have the same identity.
        size_bytes: Size of the shard in bytes. 0 if unknown. For tokens that ``portable-data``
            wrote, 4 bytes per token.
        num_tokens: Number of tokens. Known without reading only for tokens that ``portable-data``
            wrote. None for other shards.
        fingerprint: Fingerprint of the tokens. Empty if ``num_tokens`` is None.
    """

    open_source: Callable[[SourceSettings], DataSource]
    identity: str
    size_bytes: int
    num_tokens: int | None = None
    fingerprint: str = ""


class DataSource(ABC):
    """Source of documents that can be read repeatedly in a fixed order.

    Args:
        name: Name of the source in error messages, such as the path in the config.
        settings: Settings of the source.

    Raises:
        UserError: If this kind of source has no columns, but the settings refer to a column or
            to a format other than text.
    """

    downloads_to_open = False
    """Whether computing the cache key or the class names may download data."""
    downloads_to_read = False
    """Whether reading records of the source may download data."""
    has_tokens = False
    """Whether the source has tokens instead of text."""
    only_text = ""
    """Description for error messages if the source has only text or tokens. Empty if the source has
    columns."""

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> DataSource | None:
        """Open the source if this class can read sources with these names.

        Args:
            names: Entries of ``data.source``.
            settings: Settings of the source.

        Returns:
            The source. None if the names belong to another kind of source, so that the next class is tried.

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
            UserError: If this kind of source has no columns, but the settings refer to a column or
                to a format other than text.
        """
        if self.only_text:
            refuse_columns(settings.fields, self.only_text)
        self.settings = settings
        self._cache_key: str | None = None

    @property
    def fields(self) -> Fields:
        """Names of the columns to read from a record, and settings for reading records."""
        return self.settings.fields

    @property
    def description(self) -> str:
        """Name of the source, with facts that are known without reading it, such as its size."""
        return self.name

    @property
    def cache_key(self) -> str:
        """Digest that identifies the source in the cache.

        The first access calls :meth:`compute_digest`, which may read all files or download a Hub
        dataset. The key is then kept until the settings change, even if the files change.
        """
        if self._cache_key is None:
            self._cache_key = self.compute_digest()
        return self._cache_key

    @abstractmethod
    def compute_digest(self) -> str:
        """Compute a digest of the current content and of the settings for reading it."""

    def detect_and_set_format(self) -> RecordFormat:
        """Detect the format of the first valid record, and store it in the settings.

        If the format was not set yet, :attr:`settings` is replaced, and :attr:`cache_key` is reset.
        Reads nothing if the settings already define the format. This is always the case for tasks
        other than causal language modeling, whose format is ``text``.

        Returns:
            The format. ``text`` if there are no records, or if no format fits the record.

        Raises:
            UserError: If several formats fit the record, or if its fields look like a known format
                with different names. The error is also raised if the source cannot be read. If a
                record cannot be read and bad records are not skipped, the error lists the bad
                records.
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

        Returns:
            The format. If the settings define it, nothing is read. ``text`` if there are no
            records, or if no format fits the record.

        Raises:
            RecordError: If a record cannot be read, and bad records are not skipped.
            UserError: If several formats fit the record, if its fields look like a known format
                with different names, or if the source cannot be read.
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
        """Yield each record with its location. Yields nothing for plain text without records.

        ``data.max_samples`` does not limit the records, except for :class:`CustomRecords`.
        :meth:`iter_documents` applies this limit. Subclasses implement :meth:`_read_rows`. Its
        exceptions are converted as in :func:`convert_read_errors`.

        Raises:
            UserError: If a file cannot be read or is damaged.
            RecordError: If a record cannot be parsed, and bad records are not skipped.
        """
        with convert_read_errors(self.name):
            yield from self._read_rows()

    def _read_rows(self) -> Iterator[LocatedRow]:
        """Yield each record with its location. Overridden by subclasses that have records."""
        return iter(())

    def iter_documents(self) -> Iterator[Document]:
        """Yield the nonempty documents in a fixed order.

        Reads at most ``data.max_samples`` records or texts. A long document of a ``.txt`` file is
        yielded in several pieces. See :attr:`Document.is_last_piece`. Blank records are omitted.
        Bad records are omitted too if ``data.on_bad_record`` is ``skip``.

        Raises:
            UserError: If the source or some of its records cannot be read. The message lists the
                bad records.
        """
        try:
            with convert_read_errors(self.name):
                yield from self._read_documents()
        except RecordError as error:
            raise self.collect_record_errors(error) from error

    def _read_documents(self) -> Iterator[Document]:
        """Yield the documents of the records, up to ``data.max_samples`` records."""
        for location, row in islice(self.iter_rows(), self.settings.data.max_samples):
            yield from parse_record(row, self.fields, location)

    def collect_record_errors(self, first: RecordError) -> UserError:
        """Read the source again from the start, and build an error that lists its bad records.

        Reading stops early after 1,000 different errors or after 20 seconds.

        Args:
            first: Error of the first bad record.

        Returns:
            Usually, the error that lists the bad records. In three cases, the result is another
            error:

            - If the source itself cannot be read, the result is the UserError of this attempt, or
              ``first`` if the attempt ends with a RunError.
            - If no bad record is found again, because the source has changed, the result is
              ``first``.
            - If no valid record is found and all bad records have the same mistake, the result is
              ``first``, because a setting is then probably wrong.
        """
        collected = CollectedErrors()
        reader = copy.copy(self)
        reader.settings = replace(self.settings, bad_records=collected)
        # If the format of the records is not known yet, only their syntax can be checked.
        records = reader._read_documents() if self.fields.format is not None else reader.iter_rows()
        has_read_record = False
        try:
            for _ in records:
                has_read_record = True
                collected.raise_if_enough()
        except EnoughErrors:
            pass
        except (UserError, RunError) as error:  # the source itself cannot be read
            return error if isinstance(error, UserError) else first
        if not collected.errors:  # the source has changed since the first error
            return first
        if not has_read_record and len(collected.count_by_kind) == 1:  # a setting is probably wrong
            return first
        return collected.to_error(self.name)

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """Check that the source does not change within this context.

        On exit, recomputes the digest of the source and compares it with :attr:`cache_key`. A cache
        of the data read within the context must not be completed before this check. The check also
        takes place if the context raises a UserError or a RunError. This exception is passed on
        only if the source has not changed.

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
        """Class names declared by the source, in the order of their label indices.

        None if the source does not declare class names.
        """
        return None

    @property
    def content_digests(self) -> frozenset[bytes]:
        """Digests of the contents of the local files, for sources of local files with records or text.

        Empty for other kinds of sources, such as remote files, Hub datasets and token files. The
        digests are used to detect training files that are also evaluation files.
        """
        return frozenset()

    @property
    def stored_bytes(self) -> int:
        """Total size of the source's files in bytes. 0 if the source does not report a size.

        It determines how large the parts are into which a stream divides long files.
        """
        return 0

    @property
    def size_bytes(self) -> int | None:
        """Estimated size of the text in bytes. None if unknown.

        It is the total of the progress bar for tokenizing. For :class:`TokenFilesSource`, it is the
        number of tokens instead.
        """
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
            "data.stream: data.source names no files; set data.source to files, a pattern or a URL, or set "
            "data.stream: false"
        )

    def find_pretokenized_folder(self, copies_folder: Path, job_digest: str) -> Path | None:
        """Return the folder of the source's token cache if ``portable-data`` has tokenized the source.

        Args:
            copies_folder: Folder for copies of remote tokens.
            job_digest: Digest of the tokenizer and of other settings that determine the tokens.

        Returns:
            Folder of the token cache or of its local copy. None if ``portable-data`` has not
            tokenized the source. The caller then has to tokenize it.

        Raises:
            UserError: If ``portable-data`` has tokenized the source, but its tokens are missing, or
                were created with different settings.
            NoTextError: If ``portable-data`` has tokenized the source, but found no documents in
                it.
        """
        return None

    def find_tokenizer_folder(self) -> Path | None:
        """Return the folder of the tokenizer with which the source was tokenized.

        A tokenizer at a URL is copied to the cache first.

        Returns:
            The folder. None if the source is not tokenized, or if its tokenizer is not stored with
            the tokens.
        """
        return None


class TokenChunk(NamedTuple):
    """Consecutive tokens of an already tokenized source.

    Attributes:
        tokens: Token ids, an integer array ``[tokens]``.
        lengths: For each document that ends in this chunk, its number of tokens in the chunk. Any
            remaining tokens belong to a document that continues in the next chunk.
    """

    tokens: npt.NDArray[Any]
    lengths: list[int]


class TokenSource(DataSource):
    """Base class of sources that contain tokens instead of text.

    Subclasses implement ``_read_token_chunks``. Callers read the tokens with
    :meth:`iter_token_chunks`, because :meth:`iter_documents` raises UserError.
    """

    has_tokens = True
    only_text = "token files"

    def iter_documents(self) -> Iterator[Document]:
        """Raise UserError, because this source contains tokens instead of text.

        Training a tokenizer reads documents, and therefore requires a source with text.
        """
        raise UserError(
            f"data.tokenizer: {self.name} contains tokens, not text; set data.tokenizer to the tokenizer "
            "that created the tokens"
        )

    def iter_token_chunks(self, vocab_size: int, document_separator: int | None) -> Iterator[TokenChunk]:
        """Yield the tokens of the source in order.

        Args:
            vocab_size: Vocabulary size of the tokenizer. All token ids must be smaller.
            document_separator: Token that ends each document, for files without document
                boundaries. If None, each of these files is one document.

        Raises:
            UserError: If a file is damaged, or if a token is outside the vocabulary.
        """
        with convert_read_errors(self.name):
            yield from self._read_token_chunks(vocab_size, document_separator)

    @abstractmethod
    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]: ...
