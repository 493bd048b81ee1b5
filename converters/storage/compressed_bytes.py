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
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError

if TYPE_CHECKING:
    import pyarrow

    from portable.converters.storage.byte_sources import Source, Touched

# Runs up to this size are always in memory; others as long as all that is kept is not more than that.
MEMORY_BYTES, CACHE_BYTES = 1 << 20, 512 << 20
# Bytes that are decompressed at once.
_STEP = 4 << 20
CODECS = ("zstd", "gzip")


class Compressed:
    """A run of compressed bytes, seen decompressed.

    Args:
        source: the compressed bytes.
        codec: one of `CODECS`.
        nbytes: of the content; another size is refused.
        used: how many of them a reader of everything reads; the rest is padding.
        where: the file, for error messages.
    """

    def __init__(self, source: Source, codec: str, nbytes: int, used: int, where: str) -> None:
        self.nbytes = nbytes
        self._source = source
        self._codec = codec
        self._used = used
        self._where = where
        self._lock = threading.Lock()
        self._content: memoryview | None = None
        self._served = self._taken = 0
        self._stays = False  # whether the content is kept until all of it is read

    def read_into(self, buffer: memoryview, offset: int, touched: Touched) -> None:
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise CheckpointError(f"{self._where}: a chunk is shorter than its tensor")
        buffer[:] = self.load_content(len(buffer), touched)[offset : offset + len(buffer)]

    def load_content(self, count: int, touched: Touched) -> memoryview:
        """All bytes, of which the caller reads `count`: a strided region is copied out of them directly."""
        with self._lock:
            content = self._content
            if content is None:
                content = self._content = self._decompressed(touched)
                self._served = 0
            self._served += count
            if self._served >= self._used or not self._stays:
                self._forget()
        return content

    def _forget(self) -> None:
        """Free the content; the next read decompresses it again."""
        self._content = None
        _room.give(self._taken)
        self._taken = 0

    def __del__(self) -> None:
        _room.give(self._taken)

    def _decompressed(self, touched: Touched) -> memoryview:
        import pyarrow  # not at the top: slow to import

        raw = pyarrow.PythonFile(_Reader(self._source, touched), mode="r")
        stream = pyarrow.CompressedInputStream(raw, self._codec)
        self._taken = self._taken or _room.take(self.nbytes)
        self._stays = bool(self._taken) or self.nbytes > MEMORY_BYTES
        if not self._taken and self._stays:
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


class _Room:
    """How much is kept in memory."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an object may be deleted while this thread holds it
        self._taken = 0

    def take(self, nbytes: int) -> int:
        """`nbytes`, which are then taken; 0 where there is no room for them."""
        with self._lock:
            given = nbytes if self._taken + nbytes <= CACHE_BYTES else 0
            self._taken += given
            return given

    def give(self, nbytes: int) -> None:
        """Give back what `take` returned."""
        with self._lock:
            self._taken -= nbytes


_room = _Room()
