"""Bytes at rest: files, spans of files with their CRC, and spans joined end to end.

Everything above this module asks a `Source` for bytes; nothing above it opens a shard file.
"""

from __future__ import annotations

import os
import stat
import threading
from bisect import bisect_right
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from isal import isal_zlib

from converters.errors import CheckpointError
from converters.storage.guarded import open_regular, real_path
from converters.storage.object_store import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.storage.path_or_url import Place

Touched = set["FileSpan"]

# Bytes per read: small enough that the CRC finds them in the cache, large enough to hide the call.
CHUNK = 1 << 20


def _handles() -> int:
    """How many files to keep open: a quarter of what this process may, for the rest is not ours."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 64
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // 4))


_MAX_OPEN_FILES = _handles()


class Source(Protocol):
    """A run of bytes that can be read at random."""

    nbytes: int

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        """Fill `buffer` from byte `at`; add every file span that took part to `touched`."""
        ...


class Descriptor:
    """An open file that closes with its last user, so that eviction never closes it under a reader."""

    def __init__(self, path: str) -> None:
        self.fd = -1  # set first: __del__ runs even when it cannot be opened
        self.fd = open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Descriptors:
    """A bounded set of open files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Descriptor] = OrderedDict()

    def get(self, real: str, path: Place) -> Descriptor:
        """The open file `real`, which errors call `path`."""
        with self._lock:
            descriptor = self._open.get(real)
            if descriptor is None:
                try:
                    descriptor = Descriptor(real)
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror or error}") from None
                self._open[real] = descriptor
                if len(self._open) > _MAX_OPEN_FILES:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(real)
            return descriptor


class _Common:
    """What the files of a folder have in common. They do not know the folder, which knows them: so whoever
    drops a checkpoint closes its files at once."""

    def __init__(self, *, verify: bool) -> None:
        self.verify = verify
        self.lock = threading.Lock()
        self.descriptors = _Descriptors()


class Folder:
    """The files of one checkpoint folder, on a disk or in an object store, by names that stay inside it.

    Links stay inside it too (`converters.storage.guarded`). The folder itself may be one: whoever named it
    meant so.
    """

    def __init__(self, path: Place, *, verify: bool = True) -> None:
        self.path = path
        self._common = _Common(verify=verify)
        self._files: dict[str, SourceFile] = {}

    def file(self, name: str) -> SourceFile:
        """The file `name`, a relative path; CheckpointError if it leaves the folder or is no plain file."""
        known = self._files.get(name)
        if known is None:
            pure = PurePosixPath(name)
            if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
                raise CheckpointError(f"{self.path}: the file name {name!r} leaves the checkpoint folder")
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:  # half of a surrogate pair
                raise CheckpointError(f"{self.path}: the file name {name!r} is no text") from None
            path = self.path / name
            local = not isinstance(path, RemotePath) and not isinstance(self.path, RemotePath)
            real = real_path(path, self.path) if local else str(path)  # type: ignore[arg-type]
            try:
                status = path.stat()
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror or error}") from None
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            known = self._files[name] = _source_file(self._common, name, path, real, status.st_size)
        return known


class SourceFile:
    """One file of a checkpoint, opened when it is first read. What differs by place is in its kinds."""

    def __init__(self, common: _Common, name: str, path: Place, nbytes: int) -> None:
        self.common = common
        self.name = name
        self.path = path
        self.nbytes = nbytes

    def read_into(self, buffer: memoryview, at: int, wanted: int = 0, end: int = 0) -> None:
        """Fill `buffer` from byte `at` of the file; CheckpointError where the file ends early.

        Args:
            wanted: up to which byte the caller will go on reading; 0 where it does not say.
            end: up to which byte it may go on, in order; 0 where it does not say.
        """
        raise NotImplementedError

    def descriptor(self) -> Descriptor | None:
        """The open file for the kernel to copy from, None where the kernel knows no such file."""
        return None

    def identity(self) -> object:
        """What tells the file from all others of its checkpoint, whatever it is called."""
        return str(PurePosixPath(self.name))

    def read(self, at: int, count: int) -> bytes:
        """`count` bytes from `at`; refused before allocating when the file is shorter."""
        if at < 0 or count < 0 or at + count > self.nbytes:
            raise CheckpointError(
                f"{self.path}: truncated or damaged, bytes {at} to {at + count} of {self.nbytes} are missing"
            )
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), at)
        return bytes(buffer)

    def span(self, offset: int, nbytes: int, *, crc32: int | None = None, what: str = "") -> FileSpan:
        """Bytes [offset, offset + nbytes) as a source; CheckpointError if they lie outside the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"{self.path}: truncated or damaged, {what or 'data'} would end at byte {offset + nbytes} "
                f"of {self.nbytes}"
            )
        return FileSpan(self, offset, nbytes, crc32, what)


class _LocalFile(SourceFile):
    """A file on a disk; the kernel reads ahead by itself."""

    def __init__(self, common: _Common, name: str, path: Place, real: str, nbytes: int) -> None:
        super().__init__(common, name, path, nbytes)
        self._real = real

    def identity(self) -> object:
        status = os.stat(self._real)  # noqa: PTH116
        return status.st_dev, status.st_ino

    def descriptor(self) -> Descriptor:
        return self.common.descriptors.get(self._real, self.path)

    def read_into(self, buffer: memoryview, at: int, wanted: int = 0, end: int = 0) -> None:
        descriptor = self.descriptor()
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor.fd, [buffer[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror or error}") from None
            if count == 0:
                raise CheckpointError(f"{self.path}: the file ends early, at byte {at + done}")
            done += count


def _source_file(common: _Common, name: str, path: Place, real: str, nbytes: int) -> SourceFile:
    if isinstance(path, RemotePath):
        from converters.storage.range_reader import RemoteFile  # not at the top: it builds on this module

        return RemoteFile(common, name, path, nbytes)
    return _LocalFile(common, name, path, real, nbytes)


class FileSpan:
    """A span of one file, with the CRC32 that the writer stored for the whole of it, if any.

    Whatever order the bytes are read in, each part's CRC is kept and the parts are combined, so that reading
    a span piece by piece costs no second pass. `verify` reads only what nobody has read so far.
    """

    __slots__ = ("_parts", "crc32", "file", "nbytes", "offset", "settled", "what")

    def __init__(self, file: SourceFile, offset: int, nbytes: int, crc32: int | None, what: str) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.what = what
        self.crc32 = crc32
        self.settled = crc32 is None or not file.common.verify
        # Disjoint parts read so far, sorted: (start, stop, crc32 of that part).
        self._parts: list[tuple[int, int, int]] = []

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        """Fill `buffer` from byte `at` of the span; adds itself to `touched` while its CRC is unchecked."""
        if at < 0 or at + len(buffer) > self.nbytes:
            raise CheckpointError(f"{self.file.path}: {self.what or 'data'} is shorter than its tensor")
        wanted, end = self.offset + at + len(buffer), self.offset + self.nbytes
        if self.settled:
            self.file.read_into(buffer, self.offset + at, wanted, end)
            return
        touched.add(self)
        for start in range(0, len(buffer), CHUNK):
            part = buffer[start : start + CHUNK]
            self.file.read_into(part, self.offset + at + start, wanted, end)
            self._record(at + start, part)

    @property
    def read_through(self) -> bool:
        """Whether every byte has been read, so that `verify` costs next to nothing."""
        return self._next_gap() is None

    def verify(self) -> None:
        """Check the stored CRC over the whole span; CheckpointError if the bytes are not those written."""
        scratch = memoryview(b"")
        while (gap := self._next_gap()) is not None:
            start, stop = gap
            scratch = scratch or memoryview(bytearray(min(CHUNK, self.nbytes)))
            part = scratch[: min(len(scratch), stop - start)]
            self.file.read_into(part, self.offset + start, self.offset + stop, self.offset + stop)
            self._record(start, part)
        with self.file.common.lock:
            if not self.settled and (self._parts[0][2] if self._parts else 0) != self.crc32:
                what = self.what or "a record"
                raise CheckpointError(f"{self.file.path}: damaged, the checksum of {what} does not match")
            self.settled = True
            self._parts = []

    def _next_gap(self) -> tuple[int, int] | None:
        """The first run of bytes that nobody has read, None when there is none or nothing to check."""
        with self.file.common.lock:
            if self.settled:
                return None
            start = 0
            for low, high, _ in self._parts:
                if start < low:
                    return start, low
                start = high
            return (start, self.nbytes) if start < self.nbytes else None

    def _record(self, start: int, data: memoryview) -> None:
        """Note the CRC of bytes just read, merged with its neighbours; bytes read before count once."""
        crc, stop = isal_zlib.crc32(data), start + len(data)
        with self.file.common.lock:
            parts = self._parts
            index = bisect_right(parts, start, key=_first)
            if (index > 0 and parts[index - 1][1] > start) or (index < len(parts) and parts[index][0] < stop):
                return
            if index > 0 and parts[index - 1][1] == start:
                index -= 1
                low, _, before = parts.pop(index)
                crc, start = isal_zlib.crc32_combine(before, crc, stop - start), low
            if index < len(parts) and parts[index][0] == stop:
                low, high, after = parts.pop(index)
                crc, stop = isal_zlib.crc32_combine(crc, after, high - low), high
            parts.insert(index, (start, stop, crc))


def _first(part: tuple[int, int, int]) -> int:
    return part[0]


class Slice:
    """Bytes [offset, offset + nbytes) of another source."""

    __slots__ = ("nbytes", "offset", "source")

    def __init__(self, source: Source, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > source.nbytes:
            raise CheckpointError(f"a piece would end at byte {offset + nbytes} of {source.nbytes}")
        self.source = source
        self.offset = offset
        self.nbytes = nbytes

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        if at < 0 or at + len(buffer) > self.nbytes:
            raise CheckpointError("a piece is shorter than its tensor")
        self.source.read_into(buffer, self.offset + at, touched)


class Joined:
    """Sources end to end: a flat tensor that was cut across ranks, wherever the cuts fell."""

    __slots__ = ("nbytes", "parts", "starts")

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = [part for part in parts if part.nbytes]
        self.starts: list[int] = []
        total = 0
        for part in self.parts:
            self.starts.append(total)
            total += part.nbytes
        self.nbytes = total

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        if at < 0 or at + len(buffer) > self.nbytes:
            raise CheckpointError("the pieces of a tensor are shorter than the tensor")
        index = bisect_right(self.starts, at) - 1
        done = 0
        while done < len(buffer):
            part, local = self.parts[index], at + done - self.starts[index]
            count = min(len(buffer) - done, part.nbytes - local)
            part.read_into(buffer[done : done + count], local, touched)
            done += count
            index += 1


class Memory:
    """Bytes already in memory: small constants, and scalars that a format keeps in its header."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.nbytes = len(data)

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        buffer[:] = self.data[at : at + len(buffer)]


class Deferred:
    """A source that is located at its first use, for formats whose per-item headers are many."""

    def __init__(self, nbytes: int, locate: Callable[[], Source]) -> None:
        self.nbytes = nbytes
        self._locate = locate
        self._source: Source | None = None

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        if self._source is None:
            self._source = self._locate()
        self._source.read_into(buffer, at, touched)
