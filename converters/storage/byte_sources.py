"""Define byte sources with random access, and parse JSON files.

A byte source is, for example, a span of a file, a slice of another source, several sources joined
end to end, or bytes in memory. Readers of checkpoint formats request bytes from a `ByteSource`.
Outside of `portable.converters.storage`, no module of the converters reads tensors directly from a
file.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections import Counter
from operator import itemgetter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from isal import isal_zlib

from portable.converters.errors import CheckpointError, DamagedCheckpointError, to_printable
from portable.converters.storage.safe_open import open_regular_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.converters.storage.path_or_url import AnyPath

UnverifiedSpans = set["FileSpan"]

# Bytes per read. This is small enough that the data is still in the processor's cache when its CRC is
# computed, and large enough to amortize the system call.
CRC_CHUNK_BYTES = 1 << 20


class ByteSource(Protocol):
    """Sequence of bytes that supports random access.

    Attributes:
        nbytes: Number of bytes.
    """

    nbytes: int

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Read bytes into a buffer.

        Args:
            buffer: Buffer to fill completely.
            offset: Offset of the first byte in this source.
            unverified_spans: Set to which the source adds each file span that it reads, unless the span has
                no CRC or the CRC has already been verified. Call `FileSpan.verify_crc` on each span in the
                set before using the data.

        Raises:
            CheckpointError: If the source ends before the buffer is full, or if a file is missing or
                damaged.
        """
        ...


class FileDescriptor:
    """Handle that closes its file when the last reference to the handle is dropped.

    A thread that is still reading has a reference. If the file is evicted from the cache of open
    files at this time, it therefore stays open.

    Args:
        path: Path of a regular file. Links are not followed.

    Attributes:
        fd: File descriptor, open for reading.

    Raises:
        OSError: If the file cannot be opened or is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self.fd = -1  # Set this first, because __del__ also runs if the file cannot be opened.
        self.fd = open_regular_file(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            # Do not use `os.close` here, because `os` may not exist anymore when the interpreter exits.
            close(self.fd)


class CheckpointFile:
    """File of a checkpoint, which is opened on the first read.

    Base class of local files and of objects in a store. Subclasses must implement `read_into`.

    Args:
        name: Name of the file, relative to the folder of the checkpoint.
        path: Path of the file.
        nbytes: Size of the file in bytes.

    Attributes:
        lock: Lock that protects the recorded CRCs of the file's spans.
    """

    def __init__(self, name: str, path: AnyPath, nbytes: int) -> None:
        self.name = name
        self.path = path
        self.nbytes = nbytes
        self.lock = threading.Lock()

    def read_into(self, buffer: memoryview, at: int, certain_end: int = 0, possible_end: int = 0) -> None:
        """Read bytes of the file into a buffer.

        The last two arguments are hints. A file in an object store uses them to fetch bytes in
        advance.

        Args:
            buffer: Buffer to fill completely.
            at: Offset of the first byte in the file.
            certain_end: End of the bytes that the caller will certainly read, as an offset in the
                file. 0 if it is unknown.
            possible_end: End of the bytes that the caller may read next, such as the end of the
                tensor. 0 if it is unknown.

        Raises:
            CheckpointError: If the file ends before the buffer is full, or cannot be read.
        """
        raise NotImplementedError

    def open_descriptor(self) -> FileDescriptor | None:
        """Return the open file for `os.copy_file_range`, or None if the file is an object in a store."""
        return None

    def get_file_identity(self) -> object:
        """Return a key that identifies the file in its folder. Two names of the same file have equal keys.

        Objects with the same name in different folders of a store also have equal keys.

        Raises:
            OSError: If a local file no longer exists.
        """
        return str(PurePosixPath(self.name))

    def read_bytes(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes of the file into memory.

        Args:
            offset: Offset of the first byte.
            num_bytes: Number of bytes to read.

        Raises:
            CheckpointError: If the range extends beyond `nbytes`, or if the file cannot be read. In the
                first case, no memory is allocated before the error is raised.
        """
        self.get_span(offset, num_bytes)
        buffer = bytearray(num_bytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def get_span(
        self, offset: int, nbytes: int, *, crc32: int | None = None, description: str = ""
    ) -> FileSpan:
        """Return a span of the file as a byte source, without reading it.

        Args:
            offset: Offset of the first byte.
            nbytes: Number of bytes.
            crc32: CRC32 of the bytes of the span, if the file contains it.
            description: Description of the content, used in error messages. If empty, a general term such
                as "the data" is used.

        Raises:
            CheckpointError: If the span extends beyond the file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise DamagedCheckpointError(
                f"{self.path}: truncated or damaged: {description or 'the data'} would end at byte "
                f"{offset + nbytes:,}, but the file has {self.nbytes:,} bytes"
            )
        return FileSpan(self, offset, nbytes, crc32, description)


class ByteRange(NamedTuple):
    """Byte range [start, stop), relative to the start of a `FileSpan`."""

    start: int
    stop: int


class _ReadPart(NamedTuple):
    """Byte range [start, stop) of a file span that has been read, and its CRC32."""

    start: int
    stop: int
    crc32: int


class FileSpan:
    """Span of a file, and its CRC32 if the writer of the file stored it.

    The parts of a span may be read in any order. The CRC of each part is computed when the part is
    read, and the CRCs of adjacent parts are combined. `verify_crc` therefore reads only the bytes
    that have not been read yet. Create spans with `CheckpointFile.get_span`.

    Args:
        file: File that contains the span.
        offset: Offset of the first byte in the file.
        nbytes: Number of bytes.
        crc32: Expected CRC32 of the span, or None if there is nothing to verify.
        description: Description of the content, used in error messages.

    Attributes:
        is_verified: Whether the CRC has been verified. Also true if `crc32` is None.
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
        # Parts that have been read so far. They are sorted and do not overlap or touch.
        self._read_parts: list[_ReadPart] = []

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Read bytes of the span into a buffer, and add the span to `unverified_spans` unless it is verified.

        See `ByteSource.read_into`.
        """
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise DamagedCheckpointError(
                f"{self.file.path}: {self.description or 'the data'} has only {self.nbytes:,} bytes, fewer "
                "than the tensor needs"
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
        """Verify the stored CRC of this span, which is a range of bytes in the file.

        Reads the bytes that have not been read yet. Does nothing if the span is already verified or
        has no CRC.

        Raises:
            CheckpointError: If the CRC does not match, or if the file cannot be read.
        """
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
                raise DamagedCheckpointError(
                    f"{self.file.path}: damaged: the checksum of {description} does not match"
                )
            self.is_verified = True
            self._read_parts = []

    def find_unread_range(self) -> ByteRange | None:
        """Find the first range of bytes that has not been read yet.

        Returns:
            The range, or None if all bytes have been read, or if there is no CRC left to verify.
        """
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
        """Record the CRC of a byte range that was just read.

        Adjacent ranges are merged into one. A range that overlaps with a recorded range is not
        recorded. Bytes that are not in any recorded range are read again by `verify_crc`.

        Args:
            start: Offset of the first byte in the span.
            data: Bytes that were read.
        """
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
    """Slice [offset, offset + nbytes) of another byte source.

    Args:
        source: Source that contains the slice.
        offset: Offset of the first byte in `source`.
        nbytes: Number of bytes.

    Raises:
        CheckpointError: If the slice extends beyond the source.
    """

    __slots__ = ("nbytes", "offset", "source")

    def __init__(self, source: ByteSource, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > source.nbytes:
            raise DamagedCheckpointError(
                f"damaged: a part of a tensor would end at byte {offset + nbytes:,}, but the data has "
                f"only {source.nbytes:,} bytes"
            )
        self.source = source
        self.offset = offset
        self.nbytes = nbytes

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Read bytes of the slice into a buffer. See `ByteSource.read_into`."""
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise DamagedCheckpointError(
                f"damaged: a part of a tensor has only {self.nbytes:,} bytes, fewer than the tensor needs"
            )
        self.source.read_into(buffer, self.offset + offset, unverified_spans)


class ConcatenatedSources:
    """Byte sources joined end to end, such as the shards of a flat tensor that is split across ranks.

    Args:
        parts: Sources to join, in order. Empty sources are ignored.
    """

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
        """Read bytes, possibly from several parts, into a buffer. See `ByteSource.read_into`."""
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise DamagedCheckpointError(
                f"damaged: the parts of a tensor have only {self.nbytes:,} bytes, fewer than the tensor needs"
            )
        index = bisect_right(self.starts, offset) - 1
        done = 0
        while done < len(buffer):
            part, local = self.parts[index], offset + done - self.starts[index]
            count = min(len(buffer) - done, part.nbytes - local)
            part.read_into(buffer[done : done + count], local, unverified_spans)
            done += count
            index += 1


class InMemorySource:
    """Byte source in memory, for small constants and for scalars that a format stores in a header.

    Args:
        data: Bytes of the source.
    """

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.nbytes = len(data)

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Copy bytes into a buffer. See `ByteSource.read_into`."""
        buffer[:] = self.data[offset : offset + len(buffer)]


def read_json_object(file: CheckpointFile) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, does not contain an object, or has a
            duplicate key.
    """
    value = parse_json(file.path, file.read_bytes(0, file.nbytes))
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{file.path}: damaged: the JSON value is not an object")
    return value


def parse_json(location: object, data: bytes) -> Any:
    """Parse JSON from a checkpoint.

    Args:
        location: File that contains the JSON, used in error messages.
        data: JSON text in UTF-8.

    Raises:
        CheckpointError: If the data is not valid JSON, or if an object in it has a duplicate key.
    """

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(
                f"{location}: contains the key {to_printable(ascii(key[:80]))} twice; export the model "
                "again, or copy the checkpoint again if the original is intact"
            )
        return values

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError):
        raise DamagedCheckpointError(f"{location}: is not valid JSON") from None
