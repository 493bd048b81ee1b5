"""Open the sources in ``data.source``, and detect the format of a run's records."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from portable.config.derived_defaults import CONVERSATION_FORMATS
from portable.config.sources import (
    format_eval_source_key,
    format_training_source_key,
    get_evaluation_sources,
    get_training_sources,
)
from portable.converters.storage.path_or_url import strip_file_scheme
from portable.data.sources.documents import Document, RecordFormat, compute_text_digest
from portable.data.sources.records import CollectedErrors, EnoughErrors
from portable.data.sources.source import CAUSAL, CUSTOM_SAMPLES, PREFERENCE, TASKS, DataSource, SourceSettings
from portable.errors import UserError
from portable.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.config import RunConfig
    from portable.config.sections import DataConfig
    from portable.data.sources.records import LocatedRow

PART_BYTES = 16 << 20
"""Size in bytes of the parts into which a stream divides long .jsonl and .parquet files.

Parts are small, so that the first part is tokenized soon.
"""
_MAX_PARTS = 1 << 17
"""Approximate maximum number of parts. A larger stream has larger parts, up to four times
:data:`PART_BYTES`.
"""


def open_source(settings: SourceSettings) -> DataSource:
    """Open the source in ``data.source``, without reading its contents.

    Returns:
        The source. A :class:`StandardLibrarySource` if ``data.source`` is not set, and a
        :class:`StreamSource` if ``data.stream`` is set.

    Raises:
        UserError: If the source does not exist or cannot be used.
    """
    data = settings.data
    if settings.task not in TASKS:
        raise UserError(f"model.task: {settings.task!r} is not supported; use one of {', '.join(TASKS)}")
    if data.seq_len < 1:
        raise UserError(f"data.seq_len: {data.seq_len} is less than 1; use a positive number")
    if data.eval_fraction is not None and not 0 <= data.eval_fraction < 1:
        raise UserError(
            f"data.eval_fraction: {data.eval_fraction} is outside the range 0 to 1; set a number of at "
            "least 0 and less than 1"
        )
    if data.max_samples is not None and data.max_samples < 1:
        raise UserError(f"data.max_samples: {data.max_samples} is less than 1; use a positive number or null")
    if data.source is None and not data.stream:
        return StandardLibrarySource(settings)
    sources = [data.source] if isinstance(data.source, str) else data.source or ()
    names = list(map(strip_file_scheme, sources))
    if data.stream:
        return StreamSource(names, settings)
    if not names or not all(names):
        raise UserError("data.source: is empty; set data.source to a hub dataset, files or null")
    return _open_named_source(names, settings)


def _open_named_source(names: Sequence[str], settings: SourceSettings) -> DataSource:
    """Open a source with the first source class that accepts the names.

    The last class, :class:`HubDataset`, accepts all names.
    """
    candidates = (kind.from_names(names, settings) for kind in list_source_classes())
    return next(source for source in candidates if source is not None)


def list_source_classes() -> tuple[type[DataSource], ...]:
    """List the source classes that can open the names in ``data.source``, in the order they are tried."""
    from portable.data.sources.custom_records import CustomRecords
    from portable.data.sources.files import RecordFiles
    from portable.data.sources.hub_dataset import HubDataset
    from portable.data.sources.pretokenized import PretokenizedSource
    from portable.data.sources.sharded_tokens import SavedDataset, ShardedTokens
    from portable.data.sources.token_files import TokenFilesSource

    return (
        CustomRecords,
        SavedDataset,
        ShardedTokens,
        TokenFilesSource,
        PretokenizedSource,
        RecordFiles,
        HubDataset,
    )


class StreamSource(DataSource):
    """Source for a stream: its files are read and tokenized one at a time during training.

    Opening the source only lists the files.

    Args:
        names: Entries of ``data.source``.
        settings: Settings of the source.

    Raises:
        UserError: If there are no files, or if token files are mixed with other files.
    """

    def __init__(self, names: Sequence[str], settings: SourceSettings) -> None:
        sources = [_open_named_source([name], settings) for name in names]
        if len({source.must_stream_alone for source in sources}) > 1:
            raise UserError(
                f"data.source: {names[0]}: shards of tokens cannot be mixed with other files; specify only "
                "shards of one kind"
            )
        total = sum(source.stored_bytes for source in sources)
        part = min(max(PART_BYTES, total // _MAX_PARTS), 4 * PART_BYTES)
        self.shards = tuple(chain.from_iterable(source.iter_shards(part) for source in sources))
        self._standalone_sources = [source for source in sources if source.must_stream_alone]
        super().__init__(", ".join(names), settings)
        if not self.shards:
            raise UserError(
                "data.stream: data.source names no files; set data.source to files, a pattern or a URL"
            )
        self.downloads_to_read = self._first_source.downloads_to_read

    @property
    def _first_source(self) -> DataSource:
        """Source of the first shard. It is opened again on each access."""
        return self.shards[0].open_source(self.settings)

    @cached_property
    def _shard_identities(self) -> list[str]:
        """The ``identity`` of each shard, in order."""
        return [shard.identity for shard in self.shards]

    def compute_digest(self) -> str:
        """Compute a digest of the names, sizes and versions of the files, without reading their contents."""
        return compute_text_digest(repr((self.fields.cache_key, self._shard_identities)))

    @property
    def description(self) -> str:
        """Name, number of shards and size of the stream."""
        size = format_bytes(self.size_bytes)
        return f"{self.name} (a stream of {format_count(len(self.shards), 'part')}, {size})"

    @property
    def size_bytes(self) -> int:
        """Total size of the shards in bytes."""
        return sum(shard.size_bytes for shard in self.shards)

    def _determine_record_format(self) -> RecordFormat:
        first = self._first_source
        return first.detect_and_set_format() if first.has_tokens else super()._determine_record_format()

    def iter_documents(self) -> Iterator[Document]:
        """Yield the documents of all shards, in file order.

        This reads the complete stream, for example to train a tokenizer.
        """
        for shard in self.shards:
            yield from shard.open_source(self.settings).iter_documents()

    def iter_rows(self) -> Iterator[LocatedRow]:
        """Yield the records of all shards, in file order."""
        for shard in self.shards:
            yield from shard.open_source(self.settings).iter_rows()

    def check_readable(self) -> None:
        """Check that the first document of the stream can be read, or the first shard if it contains tokens.

        Raises:
            UserError: If the source cannot be read or contains no text.
        """
        if (first := self._first_source).has_tokens:
            first.check_readable()
        else:
            super().check_readable()

    def find_tokenizer_folder(self) -> Path | None:
        """Return the folder of the tokenizer that ``portable-data`` saved with the tokens.

        Returns:
            The folder. None if ``portable-data`` has written none of the stream's sources.
        """
        return next(
            (
                folder
                for source in self._standalone_sources
                if (folder := source.find_tokenizer_folder()) is not None
            ),
            None,
        )


# -- the sources of a run -----------------------------------------------------------------------------------


def build_training_settings(
    data: DataConfig, task: str, *, offline: bool = False
) -> dict[str, SourceSettings]:
    """Build the settings of all training sources, keyed by source name."""
    configs = get_training_sources(data).items()
    return {
        name: SourceSettings(config, task, format_training_source_key(name), offline)
        for name, config in configs
    }


def build_evaluation_settings(
    data: DataConfig, task: str, *, offline: bool = False
) -> dict[str, SourceSettings]:
    """Build the settings of all evaluation sources, keyed by source name."""
    configs = get_evaluation_sources(data).items()
    return {
        name: SourceSettings(config, task, format_eval_source_key(name), offline) for name, config in configs
    }


def detect_run_format(data: DataConfig, task: str, *, downloads: bool = True) -> str:
    """Detect the common format of a run's records if ``data.format`` is ``auto``.

    If some training sources contain conversations and others texts, the result is the format of the
    conversations.

    Args:
        data: The ``data`` section of the config.
        task: Task of the model, one of ``TASKS``.
        downloads: Whether sources may be downloaded.

    Returns:
        The format, or ``auto`` if detecting it requires a download that is not allowed.

    Raises:
        UserError: If no format or several formats fit the first record of a source, or if only some
            sources contain preference pairs.
    """
    training = build_training_settings(data, task, offline=True)
    evaluated = build_evaluation_settings(data, task, offline=True)
    formats: dict[str, str] = {}
    for settings in (*training.values(), *evaluated.values()):
        with settings.convert_errors():
            formats[settings.config_key] = _detect_source_format(settings, downloads=downloads)
    # A run with conversations packs complete documents, and may also have sources of texts.
    kinds = [formats[settings.config_key] for settings in training.values()]
    (first, first_format), *others = formats.items()
    for key, other_format in others:
        if (first_format == PREFERENCE) != (other_format == PREFERENCE) and not {"auto", CUSTOM_SAMPLES} & {
            first_format,
            other_format,
        }:
            raise UserError(
                f"{key}.source: has records of data.format {other_format}, but {first}.source has records "
                f"of {first_format}; mix preferences only with preferences"
            )
    return next((kind for kind in kinds if kind not in ("auto", "text")), kinds[0])


def _detect_source_format(settings: SourceSettings, *, downloads: bool) -> str:
    """Detect the format of the records of one source.

    Args:
        settings: Settings of the source.
        downloads: Whether the source may be downloaded.

    Returns:
        The format. ``auto`` if the source would have to be downloaded, but ``downloads`` is False.

    Raises:
        UserError: If the format cannot be detected. If a setting for conversations is set, also if the
            first text cannot be read.
    """
    data = settings.data
    if settings.fields.format is not None or data.source is None:
        return "text" if data.source is None else str(settings.fields.format)
    source = open_source(settings)
    if source.downloads_to_read and not downloads:
        return "auto"
    kind = source.detect_and_set_format()
    if kind == "text" and any((data.chat_template, data.train_on, data.roles_to_train, data.split_turns)):
        source.check_readable()  # report invalid records before settings that have no effect on texts
    return kind


_MAX_RECORDS_WITHOUT_IMAGES = 1000
"""Number of records of a source in which :func:`resolve_images` searches for an image."""


def resolve_images(config: RunConfig, *, downloads: bool) -> RunConfig:
    """Set ``data.images`` if it is null and one of the first records of a source has images.

    Args:
        config: Config of the run, with the format of its records.
        downloads: Whether a source may be downloaded.
    """
    if config.data.images is not None or config.data.format not in CONVERSATION_FORMATS:
        return config
    if not _detect_images(config.data, config.model.task, downloads=downloads):
        return config
    return config.replaced({"data.images": True})


def _detect_images(data: DataConfig, task: str, *, downloads: bool) -> bool:
    """Return whether one of the first records of a source is a conversation with images.

    Args:
        data: The ``data`` section of the config.
        task: Task of the model, one of ``TASKS``.
        downloads: Whether a source may be downloaded. Sources that need a download then count as texts.

    Raises:
        UserError: If the record cannot be read.
    """
    if task != CAUSAL:
        return False
    sources = (
        build(data, task, offline=True) for build in (build_training_settings, build_evaluation_settings)
    )
    for settings in chain.from_iterable(part.values() for part in sources):
        # Bad records are skipped without a message, because the code that reads all records reports them.
        settings = replace(settings, bad_records=CollectedErrors())
        with settings.convert_errors(), suppress(EnoughErrors):
            if settings.data.source is None:
                continue
            source = open_source(settings)
            if source.downloads_to_read and not downloads:
                continue
            source.detect_and_set_format()
            if not source.settings.has_conversations:
                continue
            documents = islice(source.iter_documents(), _MAX_RECORDS_WITHOUT_IMAGES)
            if any(document.conversation and document.conversation.images for document in documents):
                return True
    return False


_STDLIB_BYTES = 10_000_000
"""Maximum total number of characters of the files that :class:`StandardLibrarySource` reads."""
_STDLIB_LARGEST = 512_000
"""Maximum size of one of these files in bytes. Larger files, such as tables, are skipped."""
_STDLIB_SKIPS = re.compile(
    "tests?|idle_test|idlelib|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|.*-packages|__pycache__|config-.*"
)


class StandardLibrarySource(DataSource):
    """Source for the Python files of the interpreter's standard library: real text without a download.

    Each file is one document. Tests and tables are excluded. The files are sorted by a hash of their
    names, so every part of the data, including the evaluation part at the end, is a representative
    sample.

    Args:
        settings: Settings of the source.
        root: Folder of the library. None uses the folder of this interpreter.
    """

    only_text = "the standard library's sources"

    def __init__(self, settings: SourceSettings, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._size_bytes = 0
        super().__init__(self.only_text, settings)

    def compute_digest(self) -> str:
        """Compute a digest of all documents, after reading them completely."""
        digest, self._size_bytes = hashlib.blake2b(b"stdlib", digest_size=16), 0
        for document in self.iter_documents():
            content = document.text.encode()
            digest.update(hashlib.blake2b(content, digest_size=16).digest())
            self._size_bytes += len(content)
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int | None:
        """Total size of the documents in bytes. The first access reads them to compute the digest."""
        return self._size_bytes if self.cache_key else None

    def iter_documents(self) -> Iterator[Document]:
        """Yield up to ``data.max_samples`` files, with a total size of at most about 10 MB.

        Skips blank files and files that are not UTF-8.

        Raises:
            UserError: If no file could be read.
        """
        count = total = 0
        for path in self._list_files():
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if not text.strip():
                continue
            if count == self.settings.data.max_samples or total + len(text) > _STDLIB_BYTES:
                break
            count, total = count + 1, total + len(text)
            yield Document(text)
        if not count:
            raise UserError(
                "data.source: is not set, and the default, Python's standard library, has no source files "
                f"in {self._root}; set data.source to a file or a dataset"
            )

    def _list_files(self) -> list[Path]:
        """List the Python files of the library, without tests and large files.

        They are sorted by a hash of their paths relative to the library folder.
        """
        files = []
        for folder, subfolders, names in os.walk(self._root):
            subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPS.fullmatch(name)]
            # _sysconfigdata describes the build of this Python and differs between machines.
            wanted = (
                name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
            )
            paths = (Path(folder, name) for name in wanted)
            files += [path for path in paths if path.stat().st_size <= _STDLIB_LARGEST]

        def compute_sort_key(path: Path) -> bytes:
            name = path.relative_to(self._root).as_posix()
            return hashlib.blake2b(name.encode(), digest_size=8).digest()

        return sorted(files, key=compute_sort_key)
