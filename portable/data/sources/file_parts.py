"""Sources that read part of a file: lines of a .jsonl file, or row groups of a .parquet file.

The boundaries of the parts depend only on the file size, so a file can be divided without reading
it. Parts of remote files are read with range requests, without a local copy.
"""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.storage.path_or_url import is_in_store
from portable.data.sources.documents import compute_text_digest
from portable.data.sources.parquet_rows import iter_parquet_rows, open_parquet
from portable.data.sources.read_errors import convert_read_errors
from portable.data.sources.records import LocatedRow
from portable.data.sources.rows import parse_json_row
from portable.data.sources.source import DataSource, SourceSettings
from portable.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from portable.converters.storage.listed_file import ListedFile
    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import AnyPath

_BUFFER = 4 << 20  # bytes per request when reading lines of a remote file


class FileRangeSource(DataSource):
    """Base class of sources that read the lines or row groups that start in a range of bytes.

    Args:
        path: Path or URL of the file.
        stored_object: Size and version of a remote file. None if the file is local.
        start: First byte of the range.
        stop: Exclusive end of the range.
        settings: Settings of the source.
    """

    def __init__(
        self, path: AnyPath, stored_object: ListedFile | None, start: int, stop: int, settings: SourceSettings
    ) -> None:
        self.downloads_to_read = stored_object is not None
        self._path = path
        self._start = start
        self._stop = stop
        self._object = stored_object
        super().__init__(str(path) if not start else f"{path} from byte {start}", settings)

    @property
    def size_bytes(self) -> int:
        """Size of the range in bytes."""
        return self._stop - self._start

    def compute_digest(self) -> str:
        """Compute a digest of the records in the range and of the settings for reading them.

        For a remote file, uses the URL, size and version instead of the records, so nothing is downloaded.
        """
        if self._object is not None:
            return compute_text_digest(
                f"{self.fields.cache_key}{self._path} {self._object} {self._start} {self._stop}"
            )
        digest = hashlib.blake2b(self.fields.cache_key.encode(), digest_size=16)
        with convert_read_errors(self._path):
            for piece in self._iter_digested_bytes():
                digest.update(piece)
        return digest.hexdigest()

    def _has_changed(self, old_digest: str) -> bool:
        """Return whether the file has changed. See :meth:`DataSource._has_changed`.

        For a remote file, compares only the size and version, without reading it. A file on the Hub
        cannot change, because its URL contains the revision.

        Raises:
            UserError: If the remote file no longer exists, or if the store reports an error.
            RunError: If the store cannot be reached after all retries.
        """
        if not is_in_store(self._path) or self._object is None:
            return super()._has_changed(old_digest)
        # A file on the Hub has no version. It cannot change, because its URL contains the revision.
        with convert_read_errors(self._path):
            return bool(self._object.version) and self._path.fetch_status() != self._object

    @abstractmethod
    def _iter_digested_bytes(self) -> Iterator[bytes]:
        """Yield all bytes of the file that can affect the records in the byte range of this source."""

    def _open_file(self) -> io.RawIOBase:
        """Open the file as a seekable binary file. Each read of a remote file is a range request."""
        if not is_in_store(self._path):
            return open_file(self._path)
        assert self._object is not None
        return _StoredObjectFile(self._path, self._object.size_bytes)


class JsonlRangeSource(FileRangeSource):
    """Source of those lines of a .jsonl file that start within a byte range."""

    def _iter_digested_bytes(self) -> Iterator[bytes]:
        return (line for _, line in self._iter_lines())

    def _iter_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the byte offset and the content of each line that starts within the range."""
        with (
            self._open_file() as raw,
            io.BufferedReader(raw, _BUFFER if self.downloads_to_read else 1 << 20) as file,
        ):
            if self._start:
                file.seek(self._start - 1)
                file.readline()  # skip the rest of a line that begins in the previous part
            offset = file.tell()
            while offset < self._stop and (line := file.readline()):
                yield offset, line
                offset += len(line)

    def _read_rows(self) -> Iterator[LocatedRow]:
        for number, (offset, line) in enumerate(self._iter_lines(), start=1):
            location = f"{self._path}, byte {offset}" if self._start else f"{self._path}:{number}"
            if (row := parse_json_row(line, location, self.fields)) is not None:
                yield LocatedRow(location, row)


class _OpenRowGroups(NamedTuple):
    """An open ``ParquetFile``, and the row groups to read from it.

    Attributes:
        file: The open file.
        row_groups: Indices of the row groups in the file.
    """

    file: Any
    row_groups: list[int]


class ParquetRangeSource(FileRangeSource):
    """Source of a part of a .parquet file: all row groups that start within a byte range."""

    @contextmanager
    def _open_parquet(self) -> Iterator[_OpenRowGroups]:
        """Open the file, and select the row groups that start within the byte range of this source."""
        with (
            self._open_file() as raw,
            open_parquet(raw, self._path, pre_buffer=self.downloads_to_read) as file,
        ):
            # A row group without columns has no byte offset and contains nothing to read.
            groups = range(file.metadata.num_row_groups if file.metadata.num_columns else 0)
            begins = ((number, _get_row_group_start(file.metadata, number)) for number in groups)
            yield _OpenRowGroups(
                file, [number for number, begin in begins if self._start <= begin < self._stop]
            )

    def _iter_digested_bytes(self) -> Iterator[bytes]:
        with self._open_parquet() as (file, groups), self._open_file() as raw:
            yield str(file.schema_arrow).encode()
            for number in groups:
                group = file.metadata.row_group(number)
                for column in map(group.column, range(group.num_columns)):
                    raw.seek(_get_column_start(column))
                    remaining = column.total_compressed_size
                    while remaining and (piece := raw.read(min(remaining, _BUFFER))):
                        yield piece
                        remaining -= len(piece)

    def _read_rows(self) -> Iterator[LocatedRow]:
        with self._open_parquet() as (file, groups):
            yield from iter_parquet_rows(file, groups, self._path, self.fields)


def _get_row_group_start(metadata: Any, number: int) -> int:
    """Return the byte offset of a row group."""
    return _get_column_start(metadata.row_group(number).column(0))


def _get_column_start(column: Any) -> int:
    start = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        start = min(start, column.dictionary_page_offset)
    return int(start)


RANGE_SOURCES: dict[str, type[JsonlRangeSource | ParquetRangeSource]] = {
    ".jsonl": JsonlRangeSource,
    ".parquet": ParquetRangeSource,
}
"""Class that reads part of a file, keyed by the file's suffix."""


class _StoredObjectFile(io.RawIOBase):
    """Seekable binary file that reads a remote file, with one range request per read."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path = path
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._size)
        if stop <= self._position:
            return 0
        data = self._path.read_range(self._position, stop)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
