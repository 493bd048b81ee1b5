"""Compressed bytes with random access: each run is decompressed whole, at its first use.

Zarr compresses chunks of any size, and a stack of layers is read from one chunk layer by layer. What was
decompressed stays in memory while it is little, else in an unnamed file of the temporary folder (`TMPDIR`),
which the kernel may write out; both are dropped as soon as every byte has been read once.
"""

from __future__ import annotations

import io
import mmap
import os
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

        small = self.nbytes <= MEMORY_BYTES or _kept.has_room(self.nbytes)
        target = memoryview(bytearray(self.nbytes)) if small else self._spooled()
        raw = pyarrow.PythonFile(_Reader(self._locate(), touched), mode="r")
        try:
            self._fill(target, pyarrow.CompressedInputStream(raw, self._codec))
        except OSError as error:
            raise CheckpointError(
                f"{self._where}: damaged, a chunk is no {self._codec} data "
                f"({' '.join(str(error).split())[:120]})"
            ) from None
        if isinstance(target.obj, mmap.mmap):
            target.obj.madvise(mmap.MADV_DONTNEED)  # the pages stay in the page cache
        else:
            _kept.use(self)
        return target

    def _fill(self, target: memoryview, stream: pyarrow.NativeFile) -> None:
        done = 0
        while done < self.nbytes:
            count = stream.readinto(target[done : done + _STEP])
            if not count:
                raise CheckpointError(
                    f"{self._where}: damaged, a chunk ends after {done:,} of {self.nbytes:,} bytes"
                )
            done += count
        if stream.read(1):
            raise CheckpointError(f"{self._where}: damaged, a chunk has more than its {self.nbytes:,} bytes")

    def _spooled(self) -> memoryview:
        """A mapping of an unnamed file. Its blocks are allocated first: a full disk must be an error here."""
        try:
            with tempfile.TemporaryFile() as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
                return memoryview(mmap.mmap(file.fileno(), self.nbytes))
        except OSError as error:
            raise CheckpointError(
                f"{tempfile.gettempdir()}: {error.strerror or error}; a chunk of {self.nbytes:,} bytes is "
                "decompressed there: name a folder with more room in TMPDIR"
            ) from None


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
