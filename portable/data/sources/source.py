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
    ANSWERING,
    Document,
    Format,
    NoTextError,
    RecordError,
    build_changed_error,
)
from portable.data.sources.read_errors import convert_read_errors
from portable.data.sources.records import (
    BadRecords,
    CollectedErrors,
    EnoughErrors,
    Fields,
    LocatedRow,
    read_record,
    refuse_columns,
    rename_fields,
)
from portable.errors import MissingDataError, MistakesError, RunError, UserError
from portable.paths import get_default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt


STREAMS = "streams"
"""The folder of the cache with the files and tokens of streams, of which old ones are removed."""
CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
)
PREFERENCE, FINISHED = "preference", "samples"


@dataclass(frozen=True)
class SourceSettings:
    """What the ``data`` section says about one source.

    Attributes:
        data: the section, as the source has it.
        task: one of ``TASKS``.
        key: the dotted key of the source, for messages.
        offline: write nothing, and download nothing.
        bad: Receiver of bad records. By default, ``data.on_bad_record`` selects it.
    """

    data: DataConfig
    task: str = CAUSAL
    key: str = "data"
    offline: bool = False
    bad: BadRecords | None = field(default=None, compare=False)

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
            bad=self.bad or (BadRecords() if data.on_bad_record == "skip" else None),
            columns=list_number_columns(data),
            renamed=list_renamed_fields(data),
            format="text" if self.task != CAUSAL else None if kind == "auto" else kind,
            roles=frozenset(data.roles_to_train or ANSWERING),
        )

    def with_format(self, kind: Format) -> SourceSettings:
        """The same, once the format of the records is known."""
        return replace(self, data=self.data.model_copy(update={"format": kind}))

    @property
    def has_conversations(self) -> bool:
        """Whether the records are conversations, or prompts with completions; asked once that is known."""
        return self.data.format not in ("auto", "text", FINISHED)

    @property
    def packing(self) -> bool | Literal["documents"]:
        return self.data.packing if self.task in (CAUSAL, MASKED) else False

    @property
    def split(self) -> str:
        return self.data.split or "train"

    @property
    def cache(self) -> Path:
        """The folder of the cache; a stream has its own in it."""
        folder = get_default_cache_dir() if self.data.cache_dir is None else Path(self.data.cache_dir)
        return folder / STREAMS if self.data.stream else folder

    @property
    def languages(self) -> dict[str, Any]:
        """Arguments of the tokenizer."""
        if self.task != SEQ2SEQ:
            return {}
        return {"source_language": self.data.source_language, "target_language": self.data.target_language}

    @contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Within this context, errors about a setting of ``data`` name the same setting of ``key``."""
        try:
            yield
        except UserError as error:
            if self.key == "data":
                raise
            if isinstance(error, MistakesError):
                raise MistakesError(list(map(self._with_key, error.lines))) from error
            kind = MissingDataError if isinstance(error, MissingDataError) else UserError
            raise kind(self._with_key(str(error))) from error

    def _with_key(self, message: str) -> str:
        """Name the settings of this source instead of the settings of ``data``."""
        settings = "|".join(SourceConfig.model_fields)
        message = re.sub(rf"\bdata\.(?=({settings})\b)", f"{self.key}.", message)
        return message if self.key in message else f"{self.key}: {message}"


@dataclass(frozen=True)
class SourceShard:
    """One shard of a stream: a file, a part of one, or tokens made ahead of time.

    Attributes:
        open: its source, as it is now, so that a change is seen.
        identity: what tells, without reading it, that it is the same on another machine.
        bytes: its length.
        tokens, fingerprint: of its tokens, where they are known beforehand.
    """

    open: Callable[[SourceSettings], DataSource]
    identity: str
    bytes: int
    tokens: int | None = None
    fingerprint: str = ""


class DataSource(ABC):
    """Documents that can be read repeatedly, in a fixed order.

    Args:
        name: for messages, such as the path as given by the user.
        settings: of this source.

    Raises:
        UserError: if the kind of source has not what the settings ask for.
    """

    remote = False
    """Whether opening it may download it."""
    downloads = False
    """Whether reading its records may download them."""
    tokenized = False
    """Whether it has tokens in place of text."""
    only_text = ""
    """What it is, if it has neither columns nor records, for messages."""
    alone = False
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
        self._key: str | None = None

    @property
    def fields(self) -> Fields:
        return self.settings.fields

    @property
    def description(self) -> str:
        """The name, with what else is known without reading it."""
        return self.name

    @property
    def key(self) -> str:
        """The digest when it was first asked for."""
        if self._key is None:
            self._key = self.digest()
        return self._key

    @abstractmethod
    def digest(self) -> str:
        """A digest of the content as it is now, and of the settings for reading it."""

    def detect_format(self) -> Format:
        """Learn the format of the records by the first one, if the settings leave it open.

        Raises:
            UserError: if several formats fit it, or it cannot be read.
        """
        try:
            kind = self._detect_format()
        except RecordError as error:
            raise self.collect_errors(error) from error
        if kind != self.settings.data.format:
            self._apply_settings(self.settings.with_format(kind))
        return kind

    def _detect_format(self) -> Format:
        if self.fields.format is not None:
            return self.fields.format
        if (first := next(self.iter_rows(), None)) is None:
            return "text"
        from portable.data.sources.conversations import detect_format

        return detect_format(rename_fields(first[1], self.fields, first[0]), self.fields.text, first[0])

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
            raise self.collect_errors(error) from error

    def _read_documents(self) -> Iterator[Document]:
        for location, row in islice(self.iter_rows(), self.settings.data.max_samples):
            yield from read_record(row, self.fields, location)

    def collect_errors(self, first: RecordError) -> UserError:
        """Read the source from its start and build the error that names all bad records.

        Args:
            first: Error of the first bad record.
        """
        collected = CollectedErrors()
        reader = copy.copy(self)
        reader.settings = replace(self.settings, bad=collected)
        # Until the format of the records is known, only their lines are checked.
        records = reader._read_documents() if self.fields.format is not None else reader.iter_rows()
        has_read_record = False
        try:
            for _ in records:
                has_read_record = True
                collected.check()
        except EnoughErrors:
            pass
        except (UserError, RunError) as error:  # an error of the source itself
            return error if isinstance(error, UserError) else first
        if not collected.errors:  # the source has changed
            return first
        if not has_read_record and len(collected.kinds) == 1:  # a setting is wrong, but not the records
            return first
        return collected.to_error(self.name)

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """Read it within this context, which checks at the end that it is what ``key`` says.

        Raises:
            UserError: at the end, if another program has changed it. Results must not be cached then.
        """
        before, refusal = self.key, None
        try:
            yield
        except (UserError, RunError) as error:  # may come from a file that is being written
            refusal = error
        if self._has_changed(before):
            raise build_changed_error(self.name) from refusal
        if refusal is not None:
            raise refusal

    def _has_changed(self, before: str) -> bool:
        try:
            return self.digest() != before
        except UserError:
            return False

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Class names, if the source has them. Its labels are then indices of these."""
        return None

    @property
    def contents(self) -> frozenset[bytes]:
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

    def release(self) -> None:
        """Remove local copies, which are made again when they are needed."""
        return

    def check(self) -> None:
        """Read the first document without writing anything. Raises ``UserError`` if reading fails."""
        if not self.downloads and next(self.iter_documents(), None) is None:
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

    def find_token_cache(self, cache: Path, digest: str) -> Path | None:
        """The folder with its tokens, if they were made ahead of time; a copy in ``cache`` of one elsewhere.

        Args:
            digest: a digest of what the run's tokens are made with.

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

    tokenized = True
    only_text = "files of tokens"
    alone = True

    def iter_documents(self) -> Iterator[Document]:
        raise UserError(
            f"data.tokenizer: {self.name} has tokens and no text; set it to the tokenizer that made them"
        )

    def iter_tokens(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """Yield tokens, and how many of them there are up to each end of a document from the end before.

        The tokens beyond the last end belong to a document that goes on in the next part.

        Args:
            vocab_size: of the tokenizer, which all tokens must be below.
            end: the token after which a document ends, where the files do not tell.
        """
        with convert_read_errors(self.name):
            yield from self._read_tokens(vocab_size, end)

    @abstractmethod
    def _read_tokens(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]: ...
