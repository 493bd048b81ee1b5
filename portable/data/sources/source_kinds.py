"""Which kind of source ``data.source`` names, and the sources of a run."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from portable.config.sources import (
    format_eval_source_key,
    format_training_source_key,
    get_evaluation_sources,
    get_training_sources,
)
from portable.converters.storage.path_or_url import strip_file_scheme
from portable.data.sources.documents import Document, RecordFormat, compute_text_digest
from portable.data.sources.source import CUSTOM_SAMPLES, PREFERENCE, TASKS, DataSource, SourceSettings
from portable.errors import UserError
from portable.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.config.sections import DataConfig
    from portable.data.sources.records import LocatedRow

PART_BYTES = 16 << 20
"""Longer .jsonl and .parquet files are read in parts of this length, so that the first is soon there."""
_MAX_PARTS = 1 << 17
"""Parts of so large a stream are longer, up to four times, so that there are not many more than this."""


def open_source(settings: SourceSettings) -> DataSource:
    """Open the source that ``data.source`` names, without reading its contents.

    Raises:
        UserError: if it does not exist or cannot be used.
    """
    data = settings.data
    if settings.task not in TASKS:
        raise UserError(f"model.task: {settings.task!r} is not one of {', '.join(TASKS)}")
    if data.seq_len < 1:
        raise UserError(f"data.seq_len: {data.seq_len} is less than 1; give a positive number")
    if data.eval_fraction is not None and not 0 <= data.eval_fraction < 1:
        raise UserError(f"data.eval_fraction: {data.eval_fraction} is not in [0, 1); lower it")
    if data.max_samples is not None and data.max_samples < 1:
        raise UserError(
            f"data.max_samples: {data.max_samples} is less than 1; give a positive number or null"
        )
    if data.source is None and not data.stream:
        return StandardLibrarySource(settings)
    sources = [data.source] if isinstance(data.source, str) else data.source or ()
    names = list(map(strip_file_scheme, sources))
    if data.stream:
        return StreamSource(names, settings)
    if not names or not all(names):
        raise UserError("data.source: it is empty; set it to a hub data set, files or null")
    return _open_named_source(names, settings)


def _open_named_source(names: Sequence[str], settings: SourceSettings) -> DataSource:
    candidates = (kind.from_names(names, settings) for kind in list_source_classes())
    return next(source for source in candidates if source is not None)


def list_source_classes() -> tuple[type[DataSource], ...]:
    """The kinds of sources that have a name; the first that knows a name has it."""
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
    """Files that are read one at a time, and of which only the list is known beforehand."""

    def __init__(self, names: Sequence[str], settings: SourceSettings) -> None:
        sources = [_open_named_source([name], settings) for name in names]
        if len({source.must_stream_alone for source in sources}) > 1:
            raise UserError(f"data.source: {names[0]}: shards of tokens cannot be mixed with other files")
        total = sum(source.stored_bytes for source in sources)
        part = min(max(PART_BYTES, total // _MAX_PARTS), 4 * PART_BYTES)
        self.shards = tuple(chain.from_iterable(source.iter_shards(part) for source in sources))
        self._standalone_sources = [source for source in sources if source.must_stream_alone]
        super().__init__(", ".join(names), settings)
        if not self.shards:
            raise UserError("data.stream: data.source names no files; set it to files, a pattern or a URL")
        self.downloads_to_read = self._first_source.downloads_to_read

    @property
    def _first_source(self) -> DataSource:
        return self.shards[0].open_source(self.settings)

    @cached_property
    def _shard_identities(self) -> list[str]:
        return [shard.identity for shard in self.shards]

    def compute_digest(self) -> str:
        """A digest of the names, lengths and versions of the files: nothing is read."""
        return compute_text_digest(repr((self.fields.cache_key, self._shard_identities)))

    @property
    def description(self) -> str:
        size = format_bytes(self.size_bytes)
        return f"{self.name} (a stream of {format_count(len(self.shards), 'part')}, {size})"

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    def _detect_format(self) -> RecordFormat:
        first = self._first_source
        return first.detect_and_set_format() if first.has_tokens else super()._detect_format()

    def iter_documents(self) -> Iterator[Document]:
        for shard in self.shards:
            yield from shard.open_source(self.settings).iter_documents()

    def iter_rows(self) -> Iterator[LocatedRow]:
        for shard in self.shards:
            yield from shard.open_source(self.settings).iter_rows()

    def check_readable(self) -> None:
        if (first := self._first_source).has_tokens:
            first.check_readable()
        else:
            super().check_readable()

    def find_tokenizer_folder(self) -> Path | None:
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
    """What each source to train on is opened with, by name."""
    configs = get_training_sources(data).items()
    return {
        name: SourceSettings(config, task, format_training_source_key(name), offline)
        for name, config in configs
    }


def build_evaluation_settings(
    data: DataConfig, task: str, *, offline: bool = False
) -> dict[str, SourceSettings]:
    """The same of those to evaluate on."""
    configs = get_evaluation_sources(data).items()
    return {
        name: SourceSettings(config, task, format_eval_source_key(name), offline) for name, config in configs
    }


def detect_run_format(data: DataConfig, task: str, *, downloads: bool = True) -> str:
    """The format of the records that ``data.format`` auto means; auto if that needs a download.

    Args:
        data: the ``data`` section.
        task: one of ``TASKS``.
        downloads: whether a source may be downloaded.

    Raises:
        UserError: no format fits the first record, or several do; or only some sources have pairs.
    """
    training = build_training_settings(data, task, offline=True)
    evaluated = build_evaluation_settings(data, task, offline=True)
    formats: dict[str, str] = {}
    for settings in (*training.values(), *evaluated.values()):
        with settings.convert_errors():
            formats[settings.config_key] = _detect_source_format(settings, downloads=downloads)
    # A run with conversations packs whole documents, and may have texts beside them.
    kinds = [formats[settings.config_key] for settings in training.values()]
    (first, first_format), *others = formats.items()
    for key, other_format in others:
        if (first_format == PREFERENCE) != (other_format == PREFERENCE) and not {"auto", CUSTOM_SAMPLES} & {
            first_format,
            other_format,
        }:
            raise UserError(
                f"{key}.source: has records of data.format {other_format}, and {first}.source of "
                f"{first_format}; preferences mix only with preferences: name other files"
            )
    return next((kind for kind in kinds if kind not in ("auto", "text")), kinds[0])


def _detect_source_format(settings: SourceSettings, *, downloads: bool) -> str:
    """The format of one source."""
    data = settings.data
    if settings.fields.format is not None or data.source is None:
        return "text" if data.source is None else str(settings.fields.format)
    source = open_source(settings)
    if source.downloads_to_read and not downloads:
        return "auto"
    kind = source.detect_and_set_format()
    if kind == "text" and any((data.chat_template, data.train_on, data.roles_to_train, data.split_turns)):
        source.check_readable()  # what the records lack comes before a setting that texts have no use for
    return kind


_STDLIB_BYTES = 10_000_000
_STDLIB_LARGEST = 512_000
_STDLIB_SKIPS = re.compile(
    "tests?|idle_test|idlelib|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|.*-packages|__pycache__|config-.*"
)


class StandardLibrarySource(DataSource):
    """The Python files of the interpreter's standard library: real text without a download.

    One document per file, without tests and tables. Files are ordered by a hash of their names, so that every
    part, including the evaluation part at the end, is a fair sample.
    """

    only_text = "the standard library's sources"

    def __init__(self, settings: SourceSettings, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._size_bytes = 0
        super().__init__(self.only_text, settings)

    def compute_digest(self) -> str:
        digest, self._size_bytes = hashlib.blake2b(b"stdlib", digest_size=16), 0
        for document in self.iter_documents():
            content = document.text.encode()
            digest.update(hashlib.blake2b(content, digest_size=16).digest())
            self._size_bytes += len(content)
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int | None:
        return self._size_bytes if self.cache_key else None

    def iter_documents(self) -> Iterator[Document]:
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
                f"data.source: this Python has no standard library sources in {self._root}; "
                "name a file or data set"
            )

    def _list_files(self) -> list[Path]:
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
