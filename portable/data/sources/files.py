"""Data source that reads local and remote .txt, .jsonl, .json, .csv and .parquet files.

The first three formats may be compressed.
"""

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

from portable.converters.storage.path_or_url import is_in_store, is_url
from portable.data.sources.compression import get_file_format, is_compressed
from portable.data.sources.documents import Document, build_data_changed_error, compute_text_digest
from portable.data.sources.file_parts import RANGE_SOURCES
from portable.data.sources.hub_files import find_split_files_of_folder
from portable.data.sources.listing import list_local_files, list_remote_files
from portable.data.sources.read_errors import (
    build_unreadable_error,
    convert_deleted_errors,
    convert_read_errors,
)
from portable.data.sources.records import parse_record
from portable.data.sources.rows import iter_file_rows, iter_text_documents
from portable.data.sources.source import DataSource, SourceSettings, SourceShard
from portable.errors import MissingDataError, UserError
from portable.paths import convert_storage_errors, open_file
from portable.temporary_folder import open_or_build_cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.config.sections import DataConfig
    from portable.converters.storage.listed_file import ListedFile
    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.sources.records import LocatedRow

_DIGEST_FILE = "digest"
"""Name of the file that contains the digest of a downloaded copy. It is in the same folder as the copy.

The names cannot collide, because the name of a copy always has a suffix.
"""
_MIN_MEMOIZED_BYTES = 16 << 20
"""Minimum size in bytes of a file whose digest is cached. Digests of smaller files are computed each time."""


class RecordFiles(DataSource):
    """Source that reads the records of several files, one file after the other.

    Files in an object store are downloaded to the cache once. A ``.txt`` file is split according to
    ``Fields.text_split``. Other formats have one record per row.

    Args:
        name: Name of the source, used in error messages.
        files: Mapping from the path or URL of each file to its size and version in an object store,
            or to None if the file is local.
        settings: Settings of the source.
    """

    def __init__(
        self, name: str, files: Mapping[AnyPath, ListedFile | None], settings: SourceSettings
    ) -> None:
        self._files = dict(files)
        self.downloads_to_read = any(map(is_in_store, files))
        self.only_text = next((f"{path} and other .txt files" for path in files if _is_text_file(path)), "")
        self._content_digests: list[bytes] = []
        self._verified_copies: set[Path] = set()
        super().__init__(name, settings)

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> RecordFiles | None:
        """Open the source if the names are all URLs, or all local files, folders or patterns.

        If a local folder has splits, only the files of one split are read: ``data.split``, or
        ``train`` by default. See
        :func:`portable.data.sources.hub_files.find_split_files_of_folder`.

        Returns:
            The source. None if the only name is neither a URL nor a local path, so it may be a Hub
            dataset.

        Raises:
            UserError: If URLs and local files are mixed, if a file has an unsupported format, or if
                a folder or URL contains no data files. Also raised if ``data.config_name``, or a
                split other than ``train``, is set for URLs, or for local files without splits.
            MissingDataError: If a pattern matches no file, or if a local path does not exist. If
                there are several names, all of them must be local paths. For a single name, see
                :func:`portable.data.sources.listing.list_local_files`.
            RunError: If the object store cannot be reached after all retries.
        """
        files_by_path: dict[AnyPath, ListedFile | None] = {}
        if any(map(is_url, names)):
            if not all(map(is_url, names)):
                raise UserError(
                    "data.source: the list contains both URLs and local files; use only URLs or only local "
                    "files"
                )
            _refuse_hub_settings(settings.data, "files")
            for name in names:
                files_by_path |= list_remote_files(name)
            return cls(", ".join(names), files_by_path, settings)
        for name in names:
            files = find_split_files_of_folder(name, settings.data.config_name, settings.split)
            if files is None and (files := list_local_files(name)) is not None:
                _refuse_hub_settings(settings.data, "local files")
            if files is None and len(names) > 1:
                raise MissingDataError(
                    f"data.source: {name}: no such file or folder; correct the path (a list may contain "
                    "only local files and folders)"
                )
            if files is None:
                return None
            files_by_path |= dict.fromkeys(files)
        return cls(", ".join(names), files_by_path, settings)

    def compute_digest(self) -> str:
        """Compute a digest of the contents of the files and of the settings for reading them.

        The paths of local files do not affect the digest, but their order and formats do. For
        remote files, uses the URLs, sizes and versions instead of the contents, so nothing is
        downloaded.
        """
        read_settings = self.fields.cache_key, self.settings.data.max_samples
        if self.downloads_to_read:
            versions = [
                (str(path), stored_object.size_bytes, stored_object.version)
                for path, stored_object in self._files.items()
                if stored_object
            ]
            return compute_text_digest(repr((read_settings, versions)))
        digest = hashlib.blake2b(repr(read_settings).encode(), digest_size=16)
        self._content_digests = [
            compute_file_digest(path, self.settings) for path in self._files if isinstance(path, Path)
        ]
        for path, content_digest in zip(self._files, self._content_digests, strict=True):
            packed = PurePosixPath(path.name).suffix.lower() if is_compressed(path) else ""
            digest.update(f"{get_file_format(path)}{packed}\0".encode() + content_digest)
        return digest.hexdigest()

    def _has_changed(self, old_digest: str) -> bool:
        """Return whether the files have changed. See :meth:`DataSource._has_changed`.

        Always False for remote files: their downloaded copies are verified against a version and a digest,
        and no other program writes to the copies.
        """
        return not self.downloads_to_read and super()._has_changed(old_digest)

    @property
    def content_digests(self) -> frozenset[bytes]:
        """Digests of the contents of the local files. Empty if the files are remote.

        The first access may read all files, because the digests are computed together with the
        cache key.
        """
        self.cache_key  # noqa: B018  (computes the digests)
        return frozenset(self._content_digests)

    @property
    def stored_bytes(self) -> int:
        """Total size of the files in bytes."""
        with convert_read_errors(self.name):
            return sum(map(self._get_size, self._files))

    def _get_size(self, path: AnyPath) -> int:
        """Return the size of a file in bytes, without downloading it."""
        stored_object = self._files[path]
        return stored_object.size_bytes if stored_object is not None else Path(str(path)).stat().st_size

    @property
    def size_bytes(self) -> int | None:
        """Total size of the files in bytes, as an estimate of the size of the text.

        None if the size of the text cannot be estimated: a file is compressed or has the Parquet
        format, or ``data.max_samples`` is set.
        """
        unknown = self.settings.data.max_samples is not None or any(
            map(_has_unknown_text_length, self._files)
        )
        return None if unknown else self.stored_bytes

    def _read_documents(self) -> Iterator[Document]:
        """Yield the documents of all files. Stops after ``data.max_samples`` records or texts.

        A text is one unit of a ``.txt`` file, according to ``Fields.text_split``. A record also
        counts if its text is blank.
        """
        remaining = self.settings.data.max_samples or math.inf
        for path in self._files:
            if _is_text_file(path):
                for document in iter_text_documents(
                    self._get_local_path(path), str(path), self.fields.text_split
                ):
                    yield document
                    remaining -= document.is_last_piece
                    if not remaining:
                        return
                continue
            for location, row in iter_file_rows(self._get_local_path(path), str(path), self.fields):
                yield from parse_record(row, self.fields, location)
                remaining -= 1
                if not remaining:
                    return

    def _read_rows(self) -> Iterator[LocatedRow]:
        for path in self._files:
            if _is_text_file(path):
                return
            yield from iter_file_rows(self._get_local_path(path), str(path), self.fields)

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield the files as shards of a stream. See :meth:`DataSource.iter_shards`.

        Only .parquet files and uncompressed .jsonl files are divided into parts. If such a file is
        remote, it is read with range requests, even if it has only one part. Other remote files are
        downloaded when they are read.
        """
        for path, stored_object in self._files.items():
            size = self._get_size(path)
            kind = None if is_compressed(path) else RANGE_SOURCES.get(get_file_format(path))
            if kind is None:
                yield SourceShard(
                    partial(RecordFiles, str(path), {path: stored_object}), f"{path.name} {size}", size
                )
                continue
            parts = max(1, -(-size // part_bytes))
            for number in range(parts):
                start, stop = size * number // parts, size * (number + 1) // parts
                opened = partial(kind, path, stored_object, start, stop)
                yield SourceShard(opened, f"{path.name} {size} {start}", stop - start)

    def remove_local_copies(self) -> None:
        """Remove the local copies of remote files from the cache."""
        for path in self._files:
            if is_in_store(path):
                shutil.rmtree(self._get_copy_folder(path), ignore_errors=True)
        self._verified_copies.clear()

    def _get_copy_folder(self, path: AnyPath) -> Path:
        """Return the folder for the local copy of a remote file. Its name depends on the URL and version."""
        return (
            self.settings.cache_folder
            / "downloads"
            / compute_text_digest(repr((str(path), self._files[path])))
        )

    def _get_local_path(self, path: AnyPath) -> Path:
        """Return the path of a local file, or of the local copy of a remote file.

        A remote file is downloaded to the cache if the cache has no intact copy. Other processes
        that need the same copy wait for the download.

        Raises:
            UserError: If the remote file has changed since it was listed or no longer exists, if
                the store reports an error, or if the cache folder is not writable.
            RunError: If the store cannot be reached after all retries.
        """
        if not is_in_store(path):
            return path
        folder = self._get_copy_folder(path)
        copy = folder / path.name
        if copy in self._verified_copies and copy.exists():
            return copy
        listed_object = self._files[path]
        assert listed_object is not None

        def write(draft: Path) -> None:
            copy_path = draft / path.name
            with copy_path.open("xb") as file, convert_deleted_errors(path):
                downloaded = path.download_to(file.write)
            # A file on the Hub has no version, because its URL contains the revision.
            if (
                listed_object.version not in ("", downloaded.version)
                or downloaded.size_bytes != listed_object.size_bytes
            ):
                raise build_data_changed_error(path)
            (draft / _DIGEST_FILE).write_bytes(_compute_content_digest(copy_path))

        with convert_storage_errors("data.source"):
            open_or_build_cache_folder(folder, lambda _: copy if _is_copy_intact(copy) else None, write)
        self._verified_copies.add(copy)
        return copy


def _refuse_hub_settings(data: DataConfig, subject: str) -> None:
    """Reject settings that select part of a Hub dataset, for a source that is not a Hub dataset.

    Args:
        data: The ``data`` section of the config.
        subject: Description of the source, such as ``local files``, used in the error message.

    Raises:
        UserError: If ``data.config_name`` is set, or if ``data.split`` is set to a split other than
            ``train``.
    """
    for key, value in (("config_name", data.config_name), ("split", data.split)):
        if value is not None and (key, value) != ("split", "train"):
            raise UserError(
                f"data.{key}: {value!r} applies only to hub datasets, but data.source refers to {subject}; "
                f"remove data.{key}"
            )


def _is_text_file(path: AnyPath) -> bool:
    return get_file_format(path) == ".txt"


def _has_unknown_text_length(path: AnyPath) -> bool:
    """Return whether the length of a file's text cannot be estimated from the file size.

    This is the case for compressed files and for .parquet files.
    """
    return get_file_format(path) == ".parquet" or is_compressed(path)


def _is_copy_intact(copy: Path) -> bool:
    """Return whether a downloaded copy exists and matches the digest stored with it."""
    try:
        return (copy.parent / _DIGEST_FILE).read_bytes() == _compute_content_digest(copy)
    except OSError:
        return False


def compute_file_digest(path: Path, settings: SourceSettings) -> bytes:
    """Return the digest of a file's contents, from the cache if possible.

    Digests of files of at least 16 MiB are cached in ``settings.cache_folder``, keyed by path,
    size, timestamps and inode number. The cache is not used for a file that was modified within the
    last two seconds. If ``settings.offline`` is set, cached digests are read, but no digest is
    added.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        stat = path.stat()
        memo = None
        # A recently modified file may change again without a change of its timestamps.
        if stat.st_size >= _MIN_MEMOIZED_BYTES and time.time_ns() - stat.st_mtime_ns > 2_000_000_000:
            state = (path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            memo = settings.cache_folder / "digests" / compute_text_digest("\0".join(map(str, state)))
            if memo.is_file() and len(digest := memo.read_bytes()) == 16:
                return digest
        content_digest = _compute_content_digest(path)
    except OSError as error:
        raise build_unreadable_error(path, error) from error
    if memo is not None and not settings.offline:
        with suppress(OSError):  # caching the digest only saves time
            memo.parent.mkdir(parents=True, exist_ok=True)
            draft = memo.with_name(f"{memo.name}.{os.getpid()}")
            draft.write_bytes(content_digest)
            draft.replace(memo)
    return content_digest


def _compute_content_digest(path: Path) -> bytes:
    """Read a file, and compute the digest of its contents."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
