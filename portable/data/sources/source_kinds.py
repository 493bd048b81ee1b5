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
    from portable.data.sources.source import SourceShard

PART_BYTES = 16 << 20
"""Size in bytes of the parts into which a stream divides long .jsonl and .parquet files.

Parts are small, so that training does not wait long for the first part to be tokenized.
"""
_MAX_PARTS = 1 << 17
"""Approximate maximum number of parts. Streams that would exceed it have larger parts, up to four times
:data:`PART_BYTES`.
"""


def open_source(settings: SourceSettings) -> DataSource:
    """Open the source that ``data.source`` describes, without reading its records.

    Depending on the kind of source, this function lists files or URLs, reads the index file of
    tokenized data, or imports and calls user-defined code.

    Returns:
        The source. A :class:`StreamSource` if ``data.stream`` is set and the source is not
        evaluation data. Otherwise, a :class:`StandardLibrarySource` if ``data.source`` is not set.

    Raises:
        UserError: If the source does not exist or cannot be used, or if the task,
            ``data.seq_len``, ``data.eval_fraction`` or ``data.max_samples`` is not valid.
        MissingDataError: If local files do not exist.
        RunError: If an object store cannot be reached after all retries.
    """
    data = settings.data
    if settings.task not in TASKS:
        raise UserError(f"model.task: {settings.task!r} is not supported; use one of {', '.join(TASKS)}")
    if data.seq_len < 1:
        raise UserError(f"data.seq_len: {data.seq_len} is less than 1; use a positive number")
    if data.eval_fraction is not None and not 0 <= data.eval_fraction < 1:
        raise UserError(
            f"data.eval_fraction: {data.eval_fraction} is negative or not less than 1; use a number of at "
            "least 0 and less than 1"
        )
    if data.max_samples is not None and data.max_samples < 1:
        raise UserError(f"data.max_samples: {data.max_samples} is less than 1; use a positive number or null")
    if data.source is None and not settings.is_stream:
        return StandardLibrarySource(settings)
    sources = [data.source] if isinstance(data.source, str) else data.source or ()
    names = list(map(strip_file_scheme, sources))
    if settings.is_stream:
        return StreamSource(names, settings)
    if not names or not all(names):
        raise UserError("data.source: is empty; set data.source to a hub dataset, files or null")
    return _open_named_source(names, settings)


def _open_named_source(names: Sequence[str], settings: SourceSettings) -> DataSource:
    """Open a source with the first source class that accepts its names.

    The names are entries of ``data.source``, such as file paths or the name of a Hub dataset. The
    last class, :class:`HubDataset`, accepts all names.
    """
    candidates = (kind.from_names(names, settings) for kind in list_source_classes())
    return next(source for source in candidates if source is not None)


def list_source_classes() -> tuple[type[DataSource], ...]:
    """List the source classes in the order in which they are tried for ``data.source``.

    The first class that accepts the names in ``data.source`` is used. The last one,
    :class:`HubDataset`, accepts all names.
    """
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
    """Source for a stream, whose files are read and tokenized one at a time during training.

    Opening the source only lists the files.

    Args:
        names: Entries of ``data.source``.
        settings: Settings of the source.

    Raises:
        UserError: If there are no files, if an entry cannot be opened or streamed, or if some
            entries contain tokens and other entries contain text.
    """

    def __init__(self, names: Sequence[str], settings: SourceSettings) -> None:
        sources = [_open_named_source([name], settings) for name in names]
        if len({source.has_tokens for source in sources}) > 1:
            raise UserError(
                f"data.source: {names[0]}: files with tokens cannot be mixed with other files; specify only "
                "files with tokens or only other files"
            )
        self.shards = _divide_into_shards(sources)
        self._sources = sources
        super().__init__(", ".join(names), settings)
        if not self.shards:
            raise UserError(
                "data.stream: data.source names no files; set data.source to files, a pattern or a URL, or "
                "set data.stream: false"
            )
        self.downloads_to_read = self._first_source.downloads_to_read

    @property
    def _first_source(self) -> DataSource:
        """Source of the first shard. It is opened again on each access."""
        return self.shards[0].open_source(self.settings)

    @cached_property
    def _shard_identities(self) -> list[str]:
        """``identity`` of each shard, in shard order."""
        return [shard.identity for shard in self.shards]

    def compute_digest(self) -> str:
        """Compute a digest of the shards' identities, without reading the files.

        For most files, the identity consists of name and size. The digest is therefore unchanged if
        a file is replaced by a file with the same name and size. The settings for reading records
        are included.
        """
        return compute_text_digest(repr((self.fields.cache_key, self._shard_identities)))

    def has_same_data(self, other: DataSource) -> bool:
        """Return whether another source consists of the same files, read with the same settings.

        The files are compared by name and size first. Files in different folders whose names and
        sizes are equal are read until a difference is found.

        Returns:
            Whether the data is the same. False if ``other`` is not a stream and cannot be divided
            into shards without a download.
        """
        if self.fields.cache_key != other.fields.cache_key:
            return False
        if isinstance(other, StreamSource):
            other_shards = other.shards
        elif other.downloads_to_open:
            return False
        else:
            try:
                other_shards = _divide_into_shards([other])
            except UserError:  # this kind of source cannot be streamed
                return False
        if self._shard_identities != [shard.identity for shard in other_shards]:
            return False
        return all(
            _have_same_content(shard.open_source(self.settings), other_shard.open_source(other.settings))
            for shard, other_shard in zip(self.shards, other_shards, strict=True)
        )

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

        This method reads the complete stream, for example to train a tokenizer on it.
        """
        for shard in self.shards:
            yield from shard.open_source(self.settings).iter_documents()

    def iter_rows(self) -> Iterator[LocatedRow]:
        """Yield the records of all shards, in file order."""
        for shard in self.shards:
            yield from shard.open_source(self.settings).iter_rows()

    def check_readable(self) -> None:
        """Check that the first document of the stream can be read.

        If the stream is already tokenized, checks the first shard instead. Does nothing if reading
        would download data.

        Raises:
            UserError: If the source cannot be read or contains no text.
        """
        if (first := self._first_source).has_tokens:
            first.check_readable()
        else:
            super().check_readable()

    def find_tokenizer_folder(self) -> Path | None:
        """Return the folder of the tokenizer that ``portable-data`` saved with the tokens.

        A tokenizer at a URL is copied to the cache first.

        Returns:
            The folder. None if ``portable-data`` has tokenized none of the stream's sources.
        """
        return next(
            (folder for source in self._sources if (folder := source.find_tokenizer_folder()) is not None),
            None,
        )


def _divide_into_shards(sources: Sequence[DataSource]) -> tuple[SourceShard, ...]:
    """List the shards of all sources, in order. Long files are divided into parts.

    Raises:
        UserError: If a source cannot be streamed.
    """
    total = sum(source.stored_bytes for source in sources)
    part = min(max(PART_BYTES, total // _MAX_PARTS), 4 * PART_BYTES)
    return tuple(chain.from_iterable(source.iter_shards(part) for source in sources))


def _have_same_content(shard: DataSource, other: DataSource) -> bool:
    """Return whether two opened shards are the same file or have the same content."""
    return shard.name == other.name or shard.cache_key == other.cache_key


# -- sources of a run ---------------------------------------------------------------------------------------


def build_training_settings(
    data: DataConfig, task: str, *, offline: bool = False
) -> dict[str, SourceSettings]:
    """Build the settings of all training sources, keyed by source name.

    Without ``data.sources``, the only key is the empty string. If ``offline`` is True, the sources
    must neither write nor download anything.
    """
    configs = get_training_sources(data).items()
    return {
        name: SourceSettings(config, task, format_training_source_key(name), offline)
        for name, config in configs
    }


def build_evaluation_settings(
    data: DataConfig, task: str, *, offline: bool = False
) -> dict[str, SourceSettings]:
    """Build the settings of all evaluation sources, keyed by source name.

    If ``data.eval`` is a single source, the only key is the empty string. The result is empty if
    ``data.eval`` is not set, because samples held out by ``data.eval_fraction`` are not included.
    If ``offline`` is True, the sources must neither write nor download anything.
    """
    configs = get_evaluation_sources(data).items()
    return {
        name: SourceSettings(config, task, format_eval_source_key(name), offline, is_evaluation=True)
        for name, config in configs
    }


def detect_run_format(data: DataConfig, task: str, *, downloads: bool = True) -> str:
    """Determine the format of a run's training records.

    Each source is checked separately. If its format is ``auto``, the source is opened, and its
    first records are read. If the formats of the training sources differ, the result is the first
    format that is neither ``text`` nor ``auto``. If there is no such format, the result is the
    format of the first source.

    Args:
        data: The ``data`` section of the config.
        task: Task of the model, one of ``TASKS``.
        downloads: Whether sources may be downloaded. If not, the format of a source that would have
            to be downloaded first remains ``auto``.

    Returns:
        The format. For tasks other than causal language modeling, it is always ``text``.

    Raises:
        UserError: If several formats fit the first record of a source, if its fields look like a
            known format with different names, or if a source cannot be read. The error is also
            raised if some training or evaluation sources contain preference pairs and others do
            not. Sources with the format ``auto`` or ``samples`` are not compared.
        MissingDataError: If local files of a source do not exist.
    """
    training = build_training_settings(data, task, offline=True)
    evaluated = build_evaluation_settings(data, task, offline=True)
    formats: dict[str, str] = {}
    for settings in (*training.values(), *evaluated.values()):
        with settings.convert_errors():
            formats[settings.config_key] = _detect_source_format(settings, downloads=downloads)
    # A run with conversations may also have sources of plain text, because it packs complete documents.
    kinds = [formats[settings.config_key] for settings in training.values()]
    (first, first_format), *others = formats.items()
    for key, other_format in others:
        if (first_format == PREFERENCE) != (other_format == PREFERENCE) and not {"auto", CUSTOM_SAMPLES} & {
            first_format,
            other_format,
        }:
            raise UserError(
                f"{key}.source: has records of data.format {other_format}, but {first}.source has records "
                f"of {first_format}; mix preference data only with other preference data"
            )
    return next((kind for kind in kinds if kind not in ("auto", "text")), kinds[0])


def _detect_source_format(settings: SourceSettings, *, downloads: bool) -> str:
    """Detect the format of the records of one source.

    If the records are plain text, settings for conversations, such as ``data.train_on``, cause an
    error later. If such a setting is set, this function therefore also checks that the first
    document is readable. For a damaged record, the user then gets the error about the record, and
    not the error about the setting.

    Args:
        settings: Settings of the source.
        downloads: Whether the source may be downloaded.

    Returns:
        The format. ``auto`` if detecting it requires a download that is not allowed.

    Raises:
        UserError: If the format cannot be detected, or if the first document must be read and is
            not readable.
    """
    data = settings.data
    if settings.fields.format is not None or data.source is None:
        return "text" if data.source is None else str(settings.fields.format)
    source = open_source(settings)
    if source.downloads_to_read and not downloads:
        return "auto"
    kind = source.detect_and_set_format()
    if kind == "text" and any((data.chat_template, data.train_on, data.roles_to_train, data.split_turns)):
        # Report invalid records before reporting settings that have no effect on plain text.
        source.check_readable()
    return kind


_MAX_RECORDS_WITHOUT_IMAGES = 1000
"""Number of documents per source in which :func:`resolve_images` searches for an image."""


def resolve_images(config: RunConfig, *, downloads: bool) -> RunConfig:
    """Set ``data.images`` to true if it is null and the data contains images.

    The first 1,000 documents of every source, including evaluation sources, are searched for
    images. Bad records are skipped. Nothing is changed if the task is not causal language modeling,
    or if the records are not conversations.

    Args:
        config: Config of the run. Its ``data.format`` must already be detected.
        downloads: Whether a source may be downloaded. If not, sources that need a download are not
            searched.

    Returns:
        The changed config, or ``config`` itself if nothing changes.

    Raises:
        UserError: If a source cannot be read.
    """
    if config.data.images is not None or config.data.format not in CONVERSATION_FORMATS:
        return config
    if not _detect_images(config.data, config.model.task, downloads=downloads):
        return config
    return config.replaced({"data.images": True})


def _detect_images(data: DataConfig, task: str, *, downloads: bool) -> bool:
    """Return whether at least one source has a conversation with images among its first records.

    Args:
        data: The ``data`` section of the config. Its training and evaluation sources are checked.
        task: Task of the model, one of ``TASKS``. The result is False unless it is causal language
            modeling.
        downloads: Whether a source may be downloaded. If not, sources that need a download are
            ignored.

    Raises:
        UserError: If a source cannot be read.
    """
    if task != CAUSAL:
        return False
    sources = (
        build(data, task, offline=True) for build in (build_training_settings, build_evaluation_settings)
    )
    for settings in chain.from_iterable(part.values() for part in sources):
        # Bad records are skipped silently here, because they are reported when all records are read.
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
"""Maximum total number of characters in the files that :class:`StandardLibrarySource` reads."""
_STDLIB_LARGEST = 512_000
"""Maximum size in bytes of a file that :class:`StandardLibrarySource` reads. Larger files, which usually
contain tables, are skipped.
"""
_STDLIB_SKIPS = re.compile(
    "tests?|idle_test|idlelib|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|.*-packages|__pycache__|config-.*"
)


class StandardLibrarySource(DataSource):
    """Source for the Python files of the interpreter's standard library: real text without a download.

    Each file is one document. Tests are excluded, and so are large files and codecs, which mainly
    contain tables of data. The files are sorted by a hash of their paths, so every part of the
    data, including the evaluation part at the end, is a representative sample.

    Args:
        settings: Settings of the source.
        root: Folder of the library. Defaults to the standard library of this interpreter.
    """

    only_text = "the standard library's sources"

    def __init__(self, settings: SourceSettings, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._size_bytes = 0
        super().__init__(self.only_text, settings)

    def compute_digest(self) -> str:
        """Read all documents completely, and compute their digest."""
        digest, self._size_bytes = hashlib.blake2b(b"stdlib", digest_size=16), 0
        for document in self.iter_documents():
            content = document.text.encode()
            digest.update(hashlib.blake2b(content, digest_size=16).digest())
            self._size_bytes += len(content)
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int | None:
        """Total size of the documents in bytes.

        The first access reads all documents, because the size is computed together with their digest.
        """
        return self._size_bytes if self.cache_key else None

    def iter_documents(self) -> Iterator[Document]:
        """Yield up to ``data.max_samples`` files, with a total size of at most about 10 MB.

        Skips blank files, and files that are not UTF-8 or cannot be read.

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
        """List the Python files of the standard library, without tests, large files and broken links.

        The files are sorted by a hash of their paths relative to the library folder. The order
        therefore looks random, but it is the same on all machines.
        """
        files = []
        for folder, subfolders, names in os.walk(self._root):
            subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPS.fullmatch(name)]
            # The _sysconfigdata files describe the build of this Python, so they differ between machines.
            wanted = (
                name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
            )
            for path in (Path(folder, name) for name in wanted):
                with suppress(OSError):  # a distribution may install links to files that do not exist
                    if path.stat().st_size <= _STDLIB_LARGEST:
                        files.append(path)

        def compute_sort_key(path: Path) -> bytes:
            name = path.relative_to(self._root).as_posix()
            return hashlib.blake2b(name.encode(), digest_size=8).digest()

        return sorted(files, key=compute_sort_key)
