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
from typing import TYPE_CHECKING, Any

from portable.converters.storage.path_or_url import in_store, is_url
from portable.data.sources.compression import format_of, is_compressed
from portable.data.sources.documents import Document, changed_meanwhile, digest_of
from portable.data.sources.file_parts import PARTS
from portable.data.sources.hub_files import files_of_folder
from portable.data.sources.listing import local_files, remote_files
from portable.data.sources.reading import reading, unreadable
from portable.data.sources.records import read_rows
from portable.data.sources.rows import records_of, texts_of
from portable.data.sources.source import Shard, Source, SourceSettings
from portable.errors import MissingDataError, UserError
from portable.paths import open_file, storage_errors
from portable.temporary_folder import made_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.config.sections import DataConfig
    from portable.converters.storage.listed import Object
    from portable.converters.storage.path_or_url import Place

_DIGEST = "digest"
"""The name of the digest beside a copy. Copies always have a suffix."""
_DIGEST_MEMO_FROM = 16 << 20  # bytes; smaller files are hashed at every start


class Files(Source):
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
    def of(cls, names: Sequence[str], settings: SourceSettings) -> Files | None:
        found: dict[Place, Object | None] = {}
        if any(map(is_url, names)):
            if not all(map(is_url, names)):
                raise UserError(
                    "data.source: a list may contain URLs or local files, not both; copy one kind to the "
                    "other"
                )
            _without_splits(settings.data, "files")
            for name in names:
                found |= remote_files(name)
            return cls(", ".join(names), found, settings)
        for name in names:
            files = files_of_folder(name, settings.data.config_name, settings.split)
            if files is None and (files := local_files(name)) is not None:
                _without_splits(settings.data, "local files")
            if files is None and len(names) > 1:
                raise MissingDataError(
                    f"data.source: {name}: no such file or folder (a list may only name local files)"
                )
            if files is None:
                return None
            found |= dict.fromkeys(files)
        return cls(", ".join(names), found, settings)

    def digest(self) -> str:
        """Of the files, and of what decides their documents besides; of objects, of their versions alone."""
        asked = self.fields.key, self.settings.data.max_samples
        if self.downloads:
            versions = [
                (str(path), found.size, found.version) for path, found in self._files.items() if found
            ]
            return digest_of(repr((asked, versions)))
        digest = hashlib.blake2b(repr(asked).encode(), digest_size=16)
        self._contents = [file_digest(path, self.settings) for path in self._files if isinstance(path, Path)]
        for path, found in zip(self._files, self._contents, strict=True):
            packed = PurePosixPath(path.name).suffix.lower() if is_compressed(path) else ""
            digest.update(f"{format_of(path)}{packed}\0".encode() + found)
        return digest.hexdigest()

    def _changed(self, before: str) -> bool:
        """Copies are stored by version with a digest, and nothing else writes to them."""
        return not self.downloads and super()._changed(before)

    @property
    def contents(self) -> frozenset[bytes]:
        self.key  # noqa: B018  (computes the digests)
        return frozenset(self._contents)

    @property
    def stored_bytes(self) -> int:
        with reading(self.name):
            return sum(map(self._size, self._files))

    def _size(self, path: Place) -> int:
        found = self._files[path]
        return found.size if found is not None else Path(str(path)).stat().st_size

    @property
    def size_bytes(self) -> int | None:
        unknown = self.settings.data.max_samples is not None or any(map(_unknown_length, self._files))
        return None if unknown else self.stored_bytes

    def _read_documents(self) -> Iterator[Document]:
        left = self.settings.data.max_samples or math.inf
        for path in self._files:
            if _is_text(path):
                for text in texts_of(self._local(path), str(path), self.fields.text_split):
                    yield text
                    left -= text.ends
                    if not left:
                        return
                continue
            for where, row in records_of(self._local(path), str(path), self.fields):
                yield from read_rows(row, self.fields, where)
                left -= 1
                if not left:
                    return

    def _read_rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self._files:
            if _is_text(path):
                return
            yield from records_of(self._local(path), str(path), self.fields)

    def shards(self, part_bytes: int) -> Iterator[Shard]:
        """A compressed file cannot be read from the middle, nor can .txt, .json and .csv files."""
        for path, found in self._files.items():
            size = self._size(path)
            kind = None if is_compressed(path) else PARTS.get(format_of(path))
            if kind is None:
                yield Shard(partial(Files, str(path), {path: found}), f"{path.name} {size}", size)
                continue
            parts = max(1, -(-size // part_bytes))
            for number in range(parts):
                start, stop = size * number // parts, size * (number + 1) // parts
                opened = partial(kind, path, found, start, stop)
                yield Shard(opened, f"{path.name} {size} {start}", stop - start)

    def release(self) -> None:
        for path in self._files:
            if in_store(path):
                shutil.rmtree(self._folder(path), ignore_errors=True)
        self._checked.clear()

    def _folder(self, path: Place) -> Path:
        """The folder of an object's copy, which its URL and version name."""
        return self.settings.cache / "downloads" / digest_of(repr((str(path), self._files[path])))

    def _local(self, path: Place) -> Path:
        """The path of a file, or of its copy, which is downloaded if needed while other processes wait."""
        if not in_store(path):
            return path
        folder = self._folder(path)
        copy = folder / path.name
        if copy in self._checked and copy.exists():
            return copy
        listed_object = self._files[path]
        assert listed_object is not None

        def write(draft: Path) -> None:
            fetched = draft / path.name
            with fetched.open("xb") as file:
                now = path.download(file.write)
            # A file of the hub has no version: its URL has the revision.
            if listed_object.version not in ("", now.version) or now.size != listed_object.size:
                raise changed_meanwhile(path)
            (draft / _DIGEST).write_bytes(_content_digest(fetched))

        with storage_errors("data.source"):
            made_once(folder, lambda _: copy if _is_intact(copy) else None, write)
        self._checked.add(copy)
        return copy


def _without_splits(data: DataConfig, what: str) -> None:
    """Refuse what says which part of a hub data set is read."""
    for key, given in (("config_name", data.config_name), ("split", data.split)):
        if given is not None and (key, given) != ("split", "train"):
            raise UserError(
                f"data.{key}: {given!r} is for a hub data set, but data.source names {what}; remove it"
            )


def _is_text(path: Place) -> bool:
    return format_of(path) == ".txt"


def _unknown_length(path: Place) -> bool:
    """Whether the length of a file does not tell that of its text."""
    return format_of(path) == ".parquet" or is_compressed(path)


def _is_intact(copy: Path) -> bool:
    """Whether a copy exists and matches its digest."""
    try:
        return (copy.parent / _DIGEST).read_bytes() == _content_digest(copy)
    except OSError:
        return False


def file_digest(path: Path, settings: SourceSettings) -> bytes:
    """The digest of a file's contents. That of a large file is kept in the cache, by its state."""
    try:
        stat = path.stat()
        kept = None
        # A recently modified file may change again within one tick of the file system's clock.
        if stat.st_size >= _DIGEST_MEMO_FROM and time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
            state = (path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            kept = settings.cache / "digests" / digest_of("\0".join(map(str, state)))
            if kept.is_file() and len(digest := kept.read_bytes()) == 16:
                return digest
        found = _content_digest(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if kept is not None and not settings.offline:
        with suppress(OSError):  # the cache only saves time
            kept.parent.mkdir(parents=True, exist_ok=True)
            draft = kept.with_name(f"{kept.name}.{os.getpid()}")
            draft.write_bytes(found)
            draft.replace(kept)
    return found


def _content_digest(path: Path) -> bytes:
    """The digest of a file's contents, as they are now."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
