"""Compressed bytes with random access: each run is decompressed whole, at its first use.

Zarr compresses chunks of any size, and a stack of layers is read from one chunk layer by layer. What was
decompressed stays in memory while it is little, else in an unnamed file of the temporary folder (`TMPDIR`),
which the kernel may write out; both are dropped as soon as every byte has been read once.
"""

from __future__ import annotations

import io
import mmap
import tempfile
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError
from converters.storage.bytes import Held, Source, Touched

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow

# Runs up to this size are always kept in memory; others as long as all together are not more than that.
MEMORY_BYTES, CACHE_BYTES = 1 << 20, 512 << 20
# Bytes that are decompressed at once.
_STEP = 4 << 20
CODECS = ("zstd", "gzip")


class Compressed(Held):
    """A run of compressed bytes, seen decompressed.

    Args:
        locate: the compressed bytes; called at each decompression.
        codec: one of `CODECS`.
        nbytes: of the content; another size is refused.
        used: how many of them a reader of everything reads; the rest is padding.
        where: the file, for error messages.
    """

    def __init__(self, locate: Callable[[], Source], codec: str, nbytes: int, used: int, where: str) -> None:
        self.nbytes = nbytes
        self._locate = locate
        self._codec = codec
        self._used = used
        self._where = where
        self._lock = threading.Lock()
        self._content: memoryview | None = None
        self._served = 0

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        if at < 0 or at + len(buffer) > self.nbytes:
            raise CheckpointError(f"{self._where}: a chunk is shorter than its tensor")
        buffer[:] = self.held(len(buffer), touched)[at : at + len(buffer)]

    def held(self, count: int, touched: Touched) -> memoryview:
        with self._lock:
            content = self._content
            if content is None:
                content = self._content = self._decompressed(touched)
                self._served = 0
                if not isinstance(content.obj, mmap.mmap):
                    _kept.use(self)
            self._served += count
            if self._served >= self._used:
                self._content = None
                _kept.drop(self)
            else:
                _kept.touch(self)
        return content

    def forget(self) -> None:
        """Free the content; the next read decompresses it again."""
        self._content = None

    def _decompressed(self, touched: Touched) -> memoryview:
        import pyarrow  # not at the top: slow to import

        raw = pyarrow.PythonFile(_Reader(self._locate(), touched), mode="r")
        stream = pyarrow.CompressedInputStream(raw, self._codec)
        if self.nbytes > MEMORY_BYTES and not _kept.has_room(self.nbytes):
            return self._spooled(stream)
        target = bytearray(self.nbytes)
        done = 0
        while part := self._next(stream, done):
            target[done : done + len(part)] = part
            done += len(part)
        return memoryview(target)

    def _spooled(self, stream: pyarrow.NativeFile) -> memoryview:
        """The content as a mapping of an unnamed file, which grows no further than the content."""
        done = 0
        try:
            with tempfile.TemporaryFile() as file:
                while part := self._next(stream, done):
                    file.write(part)
                    done += len(part)
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ))
        except OSError as error:
            raise CheckpointError(
                f"{tempfile.gettempdir()}: {error.strerror or error}; a chunk of {self.nbytes:,} bytes is "
                "decompressed there: name a folder with more room in TMPDIR"
            ) from None

    def _next(self, stream: pyarrow.NativeFile, done: int) -> bytes:
        """The bytes after `done` of them; none at the end of the content."""
        try:
            part: bytes = stream.read(min(_STEP, self.nbytes - done) or 1)
        except OSError as error:
            raise CheckpointError(
                f"{self._where}: damaged, a chunk is no {self._codec} data "
                f"({' '.join(str(error).split())[:120]})"
            ) from None
        if done < self.nbytes and not part:
            raise CheckpointError(
                f"{self._where}: damaged, a chunk ends after {done:,} of {self.nbytes:,} bytes"
            )
        if done == self.nbytes and part:
            raise CheckpointError(f"{self._where}: damaged, a chunk has more than its {self.nbytes:,} bytes")
        return part


class _Reader(io.RawIOBase):
    """A source as the file object that pyarrow reads."""

    def __init__(self, source: Source, touched: Touched) -> None:
        super().__init__()
        self._source = source
        self._touched = touched
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: self._source.nbytes - self._at]
        self._source.read_into(part, self._at, self._touched)
        self._at += len(part)
        return len(part)


class _Kept:
    """The runs that are kept in memory, least recently used first; a run that nobody else holds is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[int, tuple[weakref.ref[Compressed], int]] = OrderedDict()
        self._nbytes = 0

    def use(self, run: Compressed) -> None:
        with self._lock:
            self._remove(run)
            self._runs[id(run)] = weakref.ref(run), run.nbytes
            self._nbytes += run.nbytes
            while self._nbytes > CACHE_BYTES and len(self._runs) > 1:
                _, (oldest, nbytes) = self._runs.popitem(last=False)
                self._nbytes -= nbytes
                if (found := oldest()) is not None:
                    found.forget()

    def has_room(self, nbytes: int) -> bool:
        with self._lock:
            while self._runs and next(iter(self._runs.values()))[0]() is None:
                self._nbytes -= self._runs.popitem(last=False)[1][1]
            return self._nbytes + nbytes <= CACHE_BYTES

    def touch(self, run: Compressed) -> None:
        with self._lock:
            if id(run) in self._runs:
                self._runs.move_to_end(id(run))

    def drop(self, run: Compressed) -> None:
        with self._lock:
            self._remove(run)

    def _remove(self, run: Compressed) -> None:
        _, nbytes = self._runs.pop(id(run), (None, 0))
        self._nbytes -= nbytes


_kept = _Kept()
