"""A source of documents with its settings: what each kind of source has in common.

A kind is a class in a file of its own. It says in :meth:`DataSource.from_names` what it is named by, gives
records in :meth:`DataSource.iter_rows` (or documents, or tokens), and a digest of them.
``list_source_classes`` in ``opening.py`` lists it.
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
"""The folder of the cache with the files and tokens of streams, of which old ones are removed."""
CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
)
PREFERENCE, CUSTOM_SAMPLES = "preference", "samples"


@dataclass(frozen=True)
class SourceSettings:
    """What the ``data`` section says about one source.

    Attributes:
        data: the section, as the source has it.
        task: one of ``TASKS``.
        config_key: the dotted key of the source, for messages.
        offline: write nothing, and download nothing.
        bad_records: Receiver of bad records. By default, ``data.on_bad_record`` selects it.
    """

    data: DataConfig
    task: str = CAUSAL
    config_key: str = "data"
    offline: bool = False
    bad_records: BadRecords | None = field(default=None, compare=False)

    @cached_property
    def fields(self) -> Fields:
        """The columns of a record that are read, and how."""
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
        """The same, once the format of the records is known."""
        return replace(self, data=self.data.model_copy(update={"format": kind}))

    @property
    def has_conversations(self) -> bool:
        """Whether the records are conversations, or prompts with completions; asked once that is known."""
        return self.data.format not in ("auto", "text", CUSTOM_SAMPLES)

    @property
    def packing(self) -> bool | Literal["documents"]:
        return self.data.packing if self.task in (CAUSAL, MASKED) else False

    @property
    def split(self) -> str:
        return self.data.split or "train"

    @property
    def cache_folder(self) -> Path:
        """The folder of the cache; a stream has its own in it."""
        folder = get_default_cache_dir() if self.data.cache_dir is None else Path(self.data.cache_dir)
        return folder / STREAMS_FOLDER if self.data.stream else folder

    @property
    def tokenizer_languages(self) -> dict[str, Any]:
        """Arguments of the tokenizer."""
        if self.task != SEQ2SEQ:
            return {}
        return {"source_language": self.data.source_language, "target_language": self.data.target_language}

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Within this context, errors about a setting of ``data`` name the same setting of ``config_key``."""
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
        """Name the settings of this source instead of the settings of ``data``."""
        settings = "|".join(SourceConfig.model_fields)
        message = re.sub(rf"\bdata\.(?=({settings})\b)", f"{self.config_key}.", message)
        return message if self.config_key in message else f"{self.config_key}: {message}"


@dataclass(frozen=True)
class SourceShard:
    """One shard of a stream: a file, a part of one, or tokens made ahead of time.

    Attributes:
        open_source: its source, as it is now, so that a change is seen.
        identity: what tells, without reading it, that it is the same on another machine.
        size_bytes: its length.
        num_tokens, fingerprint: of its tokens, where they are known beforehand.
    """

    open_source: Callable[[SourceSettings], DataSource]
    identity: str
    size_bytes: int
    num_tokens: int | None = None
    fingerprint: str = ""


class DataSource(ABC):
    """Documents that can be read repeatedly, in a fixed order.

    Args:
        name: for messages, such as the path as given by the user.
        settings: of this source.

    Raises:
        UserError: if the kind of source has not what the settings ask for.
    """

    downloads_to_open = False
    """Whether opening it may download it."""
    downloads_to_read = False
    """Whether reading its records may download them."""
    has_tokens = False
    """Whether it has tokens in place of text."""
    only_text = ""
    """What it is, if it has neither columns nor records, for messages."""
    must_stream_alone = False
    """Whether a stream of it can have nothing else."""

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> DataSource | None:
        """The source that ``names`` mean, if they mean one of this kind.

        Raises:
            UserError: if they do, and it cannot be used.
        """
        return None

    def __init__(self, name: str, settings: SourceSettings) -> None:
        self.name = name
        self._apply_settings(settings)

    def _apply_settings(self, settings: SourceSettings) -> None:
        if self.only_text:
            refuse_columns(settings.fields, self.only_text)
        self.settings = settings
        self._cache_key: str | None = None

    @property
    def fields(self) -> Fields:
        return self.settings.fields

    @property
    def description(self) -> str:
        """The name, with what else is known without reading it."""
        return self.name

    @property
    def cache_key(self) -> str:
        """The digest when it was first asked for."""
        if self._cache_key is None:
            self._cache_key = self.compute_digest()
        return self._cache_key

    @abstractmethod
    def compute_digest(self) -> str:
        """A digest of the content as it is now, and of the settings for reading it."""

    def detect_and_set_format(self) -> RecordFormat:
        """Learn the format of the records by the first one, if the settings leave it open.

        Raises:
            UserError: if several formats fit it, or it cannot be read.
        """
        try:
            kind = self._detect_format()
        except RecordError as error:
            raise self.collect_record_errors(error) from error
        if kind != self.settings.data.format:
            self._apply_settings(self.settings.with_format(kind))
        return kind

    def _detect_format(self) -> RecordFormat:
        if self.fields.format is not None:
            return self.fields.format
        if (first := next(self.iter_rows(), None)) is None:
            return "text"
        from portable.data.sources.conversations import detect_record_format

        return detect_record_format(
            rename_fields(first[1], self.fields, first[0]), self.fields.text, first[0]
        )

    def iter_rows(self) -> Iterator[LocatedRow]:
        """Yield the place and the columns of each record; nothing for plain text.

        Raises:
            UserError: If a file is damaged. Subclasses read in :meth:`_read_rows`, whose exceptions are
                converted here.
        """
        with convert_read_errors(self.name):
            yield from self._read_rows()

    def _read_rows(self) -> Iterator[LocatedRow]:
        return iter(())

    def iter_documents(self) -> Iterator[Document]:
        """Yield the nonempty documents in a fixed order.

        Raises:
            UserError: naming all records that cannot be read, if there are any.
        """
        try:
            with convert_read_errors(self.name):
                yield from self._read_documents()
        except RecordError as error:
            raise self.collect_record_errors(error) from error

    def _read_documents(self) -> Iterator[Document]:
        for location, row in islice(self.iter_rows(), self.settings.data.max_samples):
            yield from parse_record(row, self.fields, location)

    def collect_record_errors(self, first: RecordError) -> UserError:
        """Read the source from its start and build the error that names all bad records.

        Args:
            first: Error of the first bad record.
        """
        collected = CollectedErrors()
        reader = copy.copy(self)
        reader.settings = replace(self.settings, bad_records=collected)
        # Until the format of the records is known, only their lines are checked.
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
        if (
            not has_read_record and len(collected.count_by_kind) == 1
        ):  # a setting is wrong, but not the records
            return first
        return collected.to_error(self.name)

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """Read it within this context, which checks at the end that it is what ``cache_key`` says.

        Raises:
            UserError: at the end, if another program has changed it. Results must not be cached then.
        """
        before, refusal = self.cache_key, None
        try:
            yield
        except (UserError, RunError) as error:  # may come from a file that is being written
            refusal = error
        if self._has_changed(before):
            raise build_data_changed_error(self.name) from refusal
        if refusal is not None:
            raise refusal

    def _has_changed(self, old_digest: str) -> bool:
        try:
            return self.compute_digest() != old_digest
        except UserError:
            return False

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Class names, if the source has them. Its labels are then indices of these."""
        return None

    @property
    def content_digests(self) -> frozenset[bytes]:
        """Digests of the local files that it reads."""
        return frozenset()

    @property
    def stored_bytes(self) -> int:
        """The length of its files, for a stream of them."""
        return 0

    @property
    def size_bytes(self) -> int | None:
        """Estimated bytes of text; ``None`` if unknown."""
        return None

    def remove_local_copies(self) -> None:
        """Remove local copies, which are made again when they are needed."""
        return

    def check_readable(self) -> None:
        """Read the first document without writing anything. Raises ``UserError`` if reading fails."""
        if not self.downloads_to_read and next(self.iter_documents(), None) is None:
            raise self.build_no_text_error()

    def build_no_text_error(self) -> NoTextError:
        return NoTextError(
            f"data.source: {self.name} contains no text; choose a source with at least one document"
        )

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Its files as the shards of a stream, long ones in parts of about ``part_bytes``.

        Raises:
            UserError: if it has none.
        """
        raise UserError("data.stream: data.source names no files; set it to files, a pattern or a URL")

    def find_pretokenized_folder(self, copies_folder: Path, job_digest: str) -> Path | None:
        """The folder with its tokens, if they were made ahead of time; a copy in ``copies_folder`` of one elsewhere.

        Args:
            job_digest: a digest of what the run's tokens are made with.

        Raises:
            UserError: if they are missing, or were made with something else. NoTextError: if there are none.
        """
        return None

    def find_tokenizer_folder(self) -> Path | None:
        """The folder of the tokenizer that made its tokens, if it has some with one."""
        return None


class TokenChunk(NamedTuple):
    """Consecutive tokens of a source that another program has tokenized.

    Attributes:
        tokens: Token ids, an array of integers ``[tokens]``.
        lengths: Number of tokens up to each document end in the chunk, counted from the end before it. Tokens
            beyond the last end belong to a document that continues in the next chunk.
    """

    tokens: npt.NDArray[Any]
    lengths: list[int]


class TokenSource(DataSource):
    """Tokens that another program made."""

    has_tokens = True
    only_text = "files of tokens"
    must_stream_alone = True

    def iter_documents(self) -> Iterator[Document]:
        raise UserError(
            f"data.tokenizer: {self.name} has tokens and no text; set it to the tokenizer that made them"
        )

    def iter_token_chunks(self, vocab_size: int, end_token: int | None) -> Iterator[TokenChunk]:
        """Yield tokens, and how many of them there are up to each end of a document from the end before.

        The tokens beyond the last end belong to a document that goes on in the next part.

        Args:
            vocab_size: of the tokenizer, which all tokens must be below.
            end_token: the token after which a document ends, where the files do not tell.
        """
        with convert_read_errors(self.name):
            yield from self._read_token_chunks(vocab_size, end_token)

    @abstractmethod
    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]: ...
