"""Files here or in an object store: .txt, .jsonl and .json, also compressed, .csv and .parquet."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from portable.converters.storage.path_or_url import in_store, is_url
from portable.data.sources.compression import get_format, is_compressed
from portable.data.sources.documents import Document, build_changed_error, compute_digest
from portable.data.sources.file_parts import PARTS
from portable.data.sources.hub_files import find_folder_files
from portable.data.sources.listing import list_local_files, list_remote_files
from portable.data.sources.read_errors import build_unreadable_error, convert_read_errors
from portable.data.sources.records import read_record
from portable.data.sources.rows import iter_records, iter_texts
from portable.data.sources.source import DataSource, SourceSettings, SourceShard
from portable.errors import MissingDataError, UserError
from portable.paths import convert_storage_errors, open_file
from portable.temporary_folder import open_or_build

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.config.sections import DataConfig
    from portable.converters.storage.listed_file import Object
    from portable.converters.storage.path_or_url import Place
    from portable.data.sources.records import LocatedRow

_DIGEST = "digest"
"""The name of the digest beside a copy. Copies always have a suffix."""
_DIGEST_MEMO_FROM = 16 << 20  # bytes; smaller files are hashed at every start


class Files(DataSource):
    """Files, read in order; those in an object store from copies, which are made once.

    ``Fields.text_split`` splits a ``.txt`` file; other formats have a record per row.

    Args:
        files: with their versions, if they are in an object store.
    """

    def __init__(self, name: str, files: Mapping[Place, Object | None], settings: SourceSettings) -> None:
        self._files = dict(files)
        self.downloads = any(map(in_store, files))
        self.only_text = next((f"{path} and other .txt files" for path in files if _is_text(path)), "")
        self._contents: list[bytes] = []
        self._checked: set[Path] = set()
        super().__init__(name, settings)

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> Files | None:
        files_by_path: dict[Place, Object | None] = {}
        if any(map(is_url, names)):
            if not all(map(is_url, names)):
                raise UserError(
                    "data.source: a list may contain URLs or local files, not both; copy one kind to the "
                    "other"
                )
            _refuse_splits(settings.data, "files")
            for name in names:
                files_by_path |= list_remote_files(name)
            return cls(", ".join(names), files_by_path, settings)
        for name in names:
            files = find_folder_files(name, settings.data.config_name, settings.split)
            if files is None and (files := list_local_files(name)) is not None:
                _refuse_splits(settings.data, "local files")
            if files is None and len(names) > 1:
                raise MissingDataError(
                    f"data.source: {name}: no such file or folder (a list may only name local files)"
                )
            if files is None:
                return None
            files_by_path |= dict.fromkeys(files)
        return cls(", ".join(names), files_by_path, settings)

    def digest(self) -> str:
        """Of the files, and of what decides their documents besides; of objects, of their versions alone."""
        read_settings = self.fields.key, self.settings.data.max_samples
        if self.downloads:
            versions = [
                (str(path), stored_object.size, stored_object.version)
                for path, stored_object in self._files.items()
                if stored_object
            ]
            return compute_digest(repr((read_settings, versions)))
        digest = hashlib.blake2b(repr(read_settings).encode(), digest_size=16)
        self._contents = [
            compute_file_digest(path, self.settings) for path in self._files if isinstance(path, Path)
        ]
        for path, content_digest in zip(self._files, self._contents, strict=True):
            packed = PurePosixPath(path.name).suffix.lower() if is_compressed(path) else ""
            digest.update(f"{get_format(path)}{packed}\0".encode() + content_digest)
        return digest.hexdigest()

    def _has_changed(self, before: str) -> bool:
        """Copies are stored by version with a digest, and nothing else writes to them."""
        return not self.downloads and super()._has_changed(before)

    @property
    def contents(self) -> frozenset[bytes]:
        self.key  # noqa: B018  (computes the digests)
        return frozenset(self._contents)

    @property
    def stored_bytes(self) -> int:
        with convert_read_errors(self.name):
            return sum(map(self._get_size, self._files))

    def _get_size(self, path: Place) -> int:
        stored_object = self._files[path]
        return stored_object.size if stored_object is not None else Path(str(path)).stat().st_size

    @property
    def size_bytes(self) -> int | None:
        unknown = self.settings.data.max_samples is not None or any(map(_has_unknown_length, self._files))
        return None if unknown else self.stored_bytes

    def _read_documents(self) -> Iterator[Document]:
        remaining = self.settings.data.max_samples or math.inf
        for path in self._files:
            if _is_text(path):
                for document in iter_texts(self._fetch_local(path), str(path), self.fields.text_split):
                    yield document
                    remaining -= document.ends
                    if not remaining:
                        return
                continue
            for location, row in iter_records(self._fetch_local(path), str(path), self.fields):
                yield from read_record(row, self.fields, location)
                remaining -= 1
                if not remaining:
                    return

    def _read_rows(self) -> Iterator[LocatedRow]:
        for path in self._files:
            if _is_text(path):
                return
            yield from iter_records(self._fetch_local(path), str(path), self.fields)

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """A compressed file cannot be read from the middle, nor can .txt, .json and .csv files."""
        for path, stored_object in self._files.items():
            size = self._get_size(path)
            kind = None if is_compressed(path) else PARTS.get(get_format(path))
            if kind is None:
                yield SourceShard(
                    partial(Files, str(path), {path: stored_object}), f"{path.name} {size}", size
                )
                continue
            parts = max(1, -(-size // part_bytes))
            for number in range(parts):
                start, stop = size * number // parts, size * (number + 1) // parts
                opened = partial(kind, path, stored_object, start, stop)
                yield SourceShard(opened, f"{path.name} {size} {start}", stop - start)

    def release(self) -> None:
        for path in self._files:
            if in_store(path):
                shutil.rmtree(self._get_copy_folder(path), ignore_errors=True)
        self._checked.clear()

    def _get_copy_folder(self, path: Place) -> Path:
        """The folder of an object's copy, which its URL and version name."""
        return self.settings.cache / "downloads" / compute_digest(repr((str(path), self._files[path])))

    def _fetch_local(self, path: Place) -> Path:
        """The path of a file, or of its copy, which is downloaded if needed while other processes wait."""
        if not in_store(path):
            return path
        folder = self._get_copy_folder(path)
        copy = folder / path.name
        if copy in self._checked and copy.exists():
            return copy
        listed_object = self._files[path]
        assert listed_object is not None

        def write(draft: Path) -> None:
            copy_path = draft / path.name
            with copy_path.open("xb") as file:
                downloaded = path.download(file.write)
            # A file of the hub has no version: its URL has the revision.
            if listed_object.version not in ("", downloaded.version) or downloaded.size != listed_object.size:
                raise build_changed_error(path)
            (draft / _DIGEST).write_bytes(_compute_content_digest(copy_path))

        with convert_storage_errors("data.source"):
            open_or_build(folder, lambda _: copy if _is_intact(copy) else None, write)
        self._checked.add(copy)
        return copy


def _refuse_splits(data: DataConfig, subject: str) -> None:
    """Refuse what says which part of a hub data set is read."""
    for key, value in (("config_name", data.config_name), ("split", data.split)):
        if value is not None and (key, value) != ("split", "train"):
            raise UserError(
                f"data.{key}: {value!r} is for a hub data set, but data.source names {subject}; remove it"
            )


def _is_text(path: Place) -> bool:
    return get_format(path) == ".txt"


def _has_unknown_length(path: Place) -> bool:
    """Whether the length of a file does not tell that of its text."""
    return get_format(path) == ".parquet" or is_compressed(path)


def _is_intact(copy: Path) -> bool:
    """Whether a copy exists and matches its digest."""
    try:
        return (copy.parent / _DIGEST).read_bytes() == _compute_content_digest(copy)
    except OSError:
        return False


def compute_file_digest(path: Path, settings: SourceSettings) -> bytes:
    """The digest of a file's contents. That of a large file is kept in the cache, by its state."""
    try:
        stat = path.stat()
        memo = None
        # A recently modified file may change again within one tick of the file system's clock.
        if stat.st_size >= _DIGEST_MEMO_FROM and time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
            state = (path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            memo = settings.cache / "digests" / compute_digest("\0".join(map(str, state)))
            if memo.is_file() and len(digest := memo.read_bytes()) == 16:
                return digest
        content_digest = _compute_content_digest(path)
    except OSError as error:
        raise build_unreadable_error(path, error) from error
    if memo is not None and not settings.offline:
        with suppress(OSError):  # the cache only saves time
            memo.parent.mkdir(parents=True, exist_ok=True)
            draft = memo.with_name(f"{memo.name}.{os.getpid()}")
            draft.write_bytes(content_digest)
            draft.replace(memo)
    return content_digest


def _compute_content_digest(path: Path) -> bytes:
    """The digest of a file's contents, as they are now."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
