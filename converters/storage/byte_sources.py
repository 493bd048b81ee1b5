"""Byte sources: whole files, spans of files with their CRC32, sources joined end to end; and JSON in them.

Readers ask a `ByteSource` for bytes; nothing above `portable.converters.storage` opens a shard file.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from operator import itemgetter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from isal import isal_zlib

from portable.converters.errors import CheckpointError
from portable.converters.storage.safe_open import open_regular_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.converters.storage.path_or_url import AnyPath

UnverifiedSpans = set["FileSpan"]

# Bytes per read: small enough to stay in the cache for the CRC, large enough to amortize the system call.
CRC_CHUNK_BYTES = 1 << 20


class ByteSource(Protocol):
    """A run of bytes with random access."""

    nbytes: int

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Fill `buffer` from byte `offset`; add every file span that was read to `unverified_spans`."""
        ...


class FileDescriptor:
    """An open file that closes with its last user, so that eviction never closes it under a reader."""

    def __init__(self, path: str) -> None:
        self.fd = -1  # set first: __del__ runs even when open fails
        self.fd = open_regular_file(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)  # at the interpreter's end, `os` may be gone


class CheckpointFile:
    """One file of a checkpoint, opened at its first read. Subclasses read a disk or an object store."""

    def __init__(self, name: str, path: AnyPath, nbytes: int) -> None:
        self.name = name
        self.path = path
        self.nbytes = nbytes
        self.lock = threading.Lock()

    def read_into(self, buffer: memoryview, at: int, certain_end: int = 0, possible_end: int = 0) -> None:
        """Fill `buffer` from byte `at` of the file; CheckpointError where the file ends early.

        Args:
            certain_end: the byte up to which the caller will certainly read on; 0 if unknown.
            possible_end: the byte up to which the caller may read on, in order; 0 if unknown.
        """
        raise NotImplementedError

    def open_descriptor(self) -> FileDescriptor | None:
        """The open file for `copy_file_range`; None for an object in a store."""
        return None

    def get_file_identity(self) -> object:
        """A key that is equal for two names of one file."""
        return str(PurePosixPath(self.name))

    def read_bytes(self, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` bytes from `offset`; refused before allocating when the file is shorter."""
        self.get_span(offset, num_bytes)
        buffer = bytearray(num_bytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def get_span(
        self, offset: int, nbytes: int, *, crc32: int | None = None, description: str = ""
    ) -> FileSpan:
        """Bytes [offset, offset + nbytes) as a source; CheckpointError if they lie outside the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.path}: truncated or damaged, {description or 'data'} would end at byte "
                f"{offset + nbytes} of {self.nbytes}"
            )
        return FileSpan(self, offset, nbytes, crc32, description)


class ByteRange(NamedTuple):
    """Bytes [start, stop) of a file span."""

    start: int
    stop: int


class _ReadPart(NamedTuple):
    """Bytes [start, stop) of a file span that have been read, and their CRC32."""

    start: int
    stop: int
    crc32: int


class FileSpan:
    """A span of one file, with the CRC32 that the writer stored for all of it, if any.

    The CRC of each part is recorded as it is read, in any order, and adjacent parts are combined. Reading a
    span piece by piece therefore needs no second pass; `verify_crc` reads only the bytes not read so far.
    """

    __slots__ = ("_read_parts", "crc32", "description", "file", "is_verified", "nbytes", "offset")

    def __init__(
        self, file: CheckpointFile, offset: int, nbytes: int, crc32: int | None, description: str
    ) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.description = description
        self.crc32 = crc32
        self.is_verified = crc32 is None
        # Disjoint parts read so far, sorted.
        self._read_parts: list[_ReadPart] = []

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Fill `buffer` from byte `offset` of the span; adds itself to `unverified_spans` until its CRC is checked."""
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise CheckpointError(
                f"{self.file.path}: {self.description or 'data'} is shorter than its tensor"
            )
        wanted, end = self.offset + offset + len(buffer), self.offset + self.nbytes
        if self.is_verified:
            self.file.read_into(buffer, self.offset + offset, wanted, end)
            return
        unverified_spans.add(self)
        for start in range(0, len(buffer), CRC_CHUNK_BYTES):
            part = buffer[start : start + CRC_CHUNK_BYTES]
            self.file.read_into(part, self.offset + offset + start, wanted, end)
            self._record_crc(offset + start, part)

    def verify_crc(self) -> None:
        """Check the stored CRC over the whole span; CheckpointError if the bytes are not those written."""
        scratch = memoryview(b"")
        while (gap := self.find_unread_range()) is not None:
            start, stop = gap
            scratch = scratch or memoryview(bytearray(min(CRC_CHUNK_BYTES, self.nbytes)))
            part = scratch[: min(len(scratch), stop - start)]
            self.file.read_into(part, self.offset + start, self.offset + stop, self.offset + stop)
            self._record_crc(start, part)
        with self.file.lock:
            if not self.is_verified and (self._read_parts[0].crc32 if self._read_parts else 0) != self.crc32:
                description = self.description or "a record"
                raise CheckpointError(
                    f"{self.file.path}: damaged, the checksum of {description} does not match"
                )
            self.is_verified = True
            self._read_parts = []

    def find_unread_range(self) -> ByteRange | None:
        """The first run of bytes not read so far; None when all are, or when there is no CRC to check."""
        with self.file.lock:
            if self.is_verified:
                return None
            start = 0
            for low, high, _ in self._read_parts:
                if start < low:
                    return ByteRange(start, low)
                start = high
            return ByteRange(start, self.nbytes) if start < self.nbytes else None

    def _record_crc(self, start: int, data: memoryview) -> None:
        """Record the CRC of bytes just read and merge it with its neighbors; a repeated read is ignored."""
        crc, stop = isal_zlib.crc32(data), start + len(data)
        with self.file.lock:
            parts = self._read_parts
            index = bisect_right(parts, start, key=itemgetter(0))
            if (index > 0 and parts[index - 1].stop > start) or (
                index < len(parts) and parts[index].start < stop
            ):
                return
            if index > 0 and parts[index - 1].stop == start:
                index -= 1
                low, _, before = parts.pop(index)
                crc, start = isal_zlib.crc32_combine(before, crc, stop - start), low
            if index < len(parts) and parts[index].start == stop:
                low, high, after = parts.pop(index)
                crc, stop = isal_zlib.crc32_combine(crc, after, high - low), high
            parts.insert(index, _ReadPart(start, stop, crc))


class SourceSlice:
    """Bytes [offset, offset + nbytes) of another source."""

    __slots__ = ("nbytes", "offset", "source")

    def __init__(self, source: ByteSource, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > source.nbytes:
            raise CheckpointError(f"a piece would end at byte {offset + nbytes} of {source.nbytes}")
        self.source = source
        self.offset = offset
        self.nbytes = nbytes

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise CheckpointError("a piece is shorter than its tensor")
        self.source.read_into(buffer, self.offset + offset, unverified_spans)


class ConcatenatedSources:
    """Sources end to end: a flat tensor that was cut across ranks at any positions."""

    __slots__ = ("nbytes", "parts", "starts")

    def __init__(self, parts: Sequence[ByteSource]) -> None:
        self.parts = [part for part in parts if part.nbytes]
        self.starts: list[int] = []
        total = 0
        for part in self.parts:
            self.starts.append(total)
            total += part.nbytes
        self.nbytes = total

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise CheckpointError("the pieces of a tensor are shorter than the tensor")
        index = bisect_right(self.starts, offset) - 1
        done = 0
        while done < len(buffer):
            part, local = self.parts[index], offset + done - self.starts[index]
            count = min(len(buffer) - done, part.nbytes - local)
            part.read_into(buffer[done : done + count], local, unverified_spans)
            done += count
            index += 1


class InMemorySource:
    """Bytes in memory: small constants, and scalars that a format stores in its header."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.nbytes = len(data)

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


def read_json_object(file: CheckpointFile) -> dict[str, Any]:
    """The table in a JSON file; CheckpointError where it is none, is damaged or repeats a key."""
    value = parse_json(file.path, file.read_bytes(0, file.nbytes))
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.path}: damaged, its JSON is no table")
    return value


def parse_json(location: object, data: bytes) -> Any:
    """The parsed JSON; CheckpointError, which names `location`, for text that is invalid or repeats a key."""

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise CheckpointError(f"{location}: holds a key twice")
        return values

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{location}: damaged, not readable as JSON") from None
