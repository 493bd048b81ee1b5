"""A part of a file as a source: the lines of a .jsonl file, or the row groups of a .parquet file.

Where a part begins and ends follows from the file's length alone, so files are listed without reading them. A
part of an object is read by ranges, so that no copy of the object is made.
"""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from portable.converters.storage.path_or_url import in_store
from portable.data.sources.documents import digest_of
from portable.data.sources.parquet_rows import parquet_file, rows_of
from portable.data.sources.reading import reading
from portable.data.sources.rows import json_row
from portable.data.sources.source import Source, SourceSettings
from portable.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Buffer

    from portable.converters.storage.listed import Object
    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import Place

_BUFFER = 4 << 20  # bytes of a request for lines


class FilePart(Source):
    """The records that begin within the bytes ``[start, stop)`` of a file.

    Args:
        path: of the file, or its URL.
        found: the object as it was listed; None for a local file.
    """

    def __init__(
        self, path: Place, found: Object | None, start: int, stop: int, settings: SourceSettings
    ) -> None:
        self.downloads = found is not None
        self._path = path
        self._start = start
        self._stop = stop
        self._found = found
        super().__init__(str(path) if not start else f"{path} from byte {start}", settings)

    @property
    def size_bytes(self) -> int:
        return self._stop - self._start

    def digest(self) -> str:
        """Of the bytes; of an object, of its URL and version."""
        if self._found is not None:
            return digest_of(f"{self.fields.key}{self._path} {self._found} {self._start} {self._stop}")
        digest = hashlib.blake2b(self.fields.key.encode(), digest_size=16)
        with reading(self._path):
            for piece in self._pieces():
                digest.update(piece)
        return digest.hexdigest()

    def _changed(self, before: str) -> bool:
        if not in_store(self._path) or self._found is None:
            return super()._changed(before)
        with reading(self._path):  # the URL of a file of the hub has its revision
            return bool(self._found.version) and self._path.look_up() != self._found

    @abstractmethod
    def _pieces(self) -> Iterator[bytes]:
        """All bytes that decide what the records are."""

    def _open(self) -> io.RawIOBase:
        if not in_store(self._path):
            return open_file(self._path)
        assert self._found is not None
        return _Ranges(self._path, self._found.size)


class LinesBetween(FilePart):
    """The lines of a .jsonl file that begin within some bytes."""

    def _pieces(self) -> Iterator[bytes]:
        return (line for _, line in self._lines())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self._open() as raw, io.BufferedReader(raw, _BUFFER if self.downloads else 1 << 20) as file:
            if self._start:
                file.seek(self._start - 1)
                file.readline()  # began in the part before, or is the end of its last line
            at = file.tell()
            while at < self._stop and (line := file.readline()):
                yield at, line
                at += len(line)

    def _read_rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, (at, line) in enumerate(self._lines(), start=1):
            where = f"{self._path}, byte {at}" if self._start else f"{self._path}:{number}"
            if (row := json_row(line, where, self.fields)) is not None:
                yield where, row


class RowGroupsBetween(FilePart):
    """The rows of a .parquet file whose row groups begin within some bytes."""

    @contextmanager
    def _parquet(self) -> Iterator[tuple[Any, list[int]]]:
        with self._open() as raw, parquet_file(raw, self._path, pre_buffer=self.downloads) as file:
            # Without columns there is nowhere to begin, and nothing to read.
            groups = range(file.metadata.num_row_groups if file.metadata.num_columns else 0)
            begins = ((number, _begin(file.metadata, number)) for number in groups)
            yield file, [number for number, at in begins if self._start <= at < self._stop]

    def _pieces(self) -> Iterator[bytes]:
        with self._parquet() as (file, groups), self._open() as raw:
            yield str(file.schema_arrow).encode()
            for number in groups:
                group = file.metadata.row_group(number)
                for column in map(group.column, range(group.num_columns)):
                    raw.seek(_begin_of(column))
                    left = column.total_compressed_size
                    while left and (piece := raw.read(min(left, _BUFFER))):
                        yield piece
                        left -= len(piece)

    def _read_rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with self._parquet() as (file, groups):
            yield from rows_of(file, groups, self._path, self.fields)


def _begin(metadata: Any, number: int) -> int:
    """The first byte of a row group."""
    return _begin_of(metadata.row_group(number).column(0))


def _begin_of(column: Any) -> int:
    at = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset is not None:
        at = min(at, column.dictionary_page_offset)
    return int(at)


PARTS: dict[str, type[LinesBetween | RowGroupsBetween]] = {
    ".jsonl": LinesBetween,
    ".parquet": RowGroupsBetween,
}
"""What reads parts of a file, by its format."""


class _Ranges(io.RawIOBase):
    """An object as a file; each read is one request."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path = path
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self._size)
        if stop <= self._at:
            return 0
        found = self._path.read_range(self._at, stop)
        view[: len(found)] = found
        self._at += len(found)
        return len(found)
