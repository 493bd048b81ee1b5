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

    from portable.converters.storage.byte_sources import ByteSource, UnverifiedSpans

# Runs up to this size are always in memory; others as long as all that is kept is not more than that.
MEMORY_BYTES, CACHE_BYTES = 1 << 20, 512 << 20
# Bytes that are decompressed at once.
_STEP_BYTES = 4 << 20
CODECS = ("zstd", "gzip")


class DecompressedSource:
    """A run of compressed bytes, seen decompressed.

    Args:
        source: the compressed bytes.
        codec: one of `CODECS`.
        nbytes: of the content; another size is refused.
        used_bytes: how many of them a reader of everything reads; the rest is padding.
        location: the file, for error messages.
    """

    def __init__(self, source: ByteSource, codec: str, nbytes: int, used_bytes: int, location: str) -> None:
        self.nbytes = nbytes
        self._source = source
        self._codec = codec
        self._used_bytes = used_bytes
        self._location = location
        self._lock = threading.Lock()
        self._content: memoryview | None = None
        self._served_bytes = self._reserved_bytes = 0
        self._keep_until_read = False  # whether the content is kept until all of it is read

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise CheckpointError(f"{self._location}: a chunk is shorter than its tensor")
        buffer[:] = self.load_content(len(buffer), unverified_spans)[offset : offset + len(buffer)]

    def load_content(self, num_bytes: int, unverified_spans: UnverifiedSpans) -> memoryview:
        """All bytes, of which the caller reads `num_bytes`: a strided region is copied out of them directly."""
        with self._lock:
            content = self._content
            if content is None:
                content = self._content = self._decompress(unverified_spans)
                self._served_bytes = 0
            self._served_bytes += num_bytes
            if self._served_bytes >= self._used_bytes or not self._keep_until_read:
                self._free_content()
        return content

    def _free_content(self) -> None:
        """Free the content; the next read decompresses it again."""
        self._content = None
        _memory_budget.release_bytes(self._reserved_bytes)
        self._reserved_bytes = 0

    def __del__(self) -> None:
        _memory_budget.release_bytes(self._reserved_bytes)

    def _decompress(self, unverified_spans: UnverifiedSpans) -> memoryview:
        import pyarrow  # not at the top: slow to import

        raw = pyarrow.PythonFile(_SourceAsFileObject(self._source, unverified_spans), mode="r")
        stream = pyarrow.CompressedInputStream(raw, self._codec)
        self._reserved_bytes = self._reserved_bytes or _memory_budget.reserve_bytes(self.nbytes)
        self._keep_until_read = bool(self._reserved_bytes) or self.nbytes > MEMORY_BYTES
        if not self._reserved_bytes and self._keep_until_read:
            return self._decompress_to_temporary_file(stream)
        target = bytearray(self.nbytes)
        done = 0
        while part := self._read_decompressed(stream, done):
            target[done : done + len(part)] = part
            done += len(part)
        return memoryview(target)

    def _decompress_to_temporary_file(self, stream: pyarrow.NativeFile) -> memoryview:
        """The content as a mapping of an unnamed file, which grows no further than the content."""
        done = 0
        try:
            with tempfile.TemporaryFile() as file:
                while part := self._read_decompressed(stream, done):
                    file.write(part)
                    done += len(part)
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ))
        except OSError as error:
            raise CheckpointError(
                f"{tempfile.gettempdir()}: {error.strerror or error}; a chunk of {self.nbytes:,} bytes is "
                "decompressed there: name a folder with more room in TMPDIR"
            ) from None

    def _read_decompressed(self, stream: pyarrow.NativeFile, num_bytes_read: int) -> bytes:
        """The bytes after `num_bytes_read` of them; none at the end of the content."""
        try:
            part: bytes = stream.read(min(_STEP_BYTES, self.nbytes - num_bytes_read) or 1)
        except OSError as error:
            raise CheckpointError(
                f"{self._location}: damaged, a chunk is no {self._codec} data "
                f"({' '.join(str(error).split())[:120]})"
            ) from None
        if num_bytes_read < self.nbytes and not part:
            raise CheckpointError(
                f"{self._location}: damaged, a chunk ends after {num_bytes_read:,} of {self.nbytes:,} bytes"
            )
        if num_bytes_read == self.nbytes and part:
            raise CheckpointError(
                f"{self._location}: damaged, a chunk has more than its {self.nbytes:,} bytes"
            )
        return part


class _SourceAsFileObject(io.RawIOBase):
    """A source as the file object that pyarrow reads."""

    def __init__(self, source: ByteSource, unverified_spans: UnverifiedSpans) -> None:
        super().__init__()
        self._source = source
        self._touched = unverified_spans
        self._offset = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: self._source.nbytes - self._offset]
        self._source.read_into(part, self._offset, self._touched)
        self._offset += len(part)
        return len(part)


class _MemoryBudget:
    """How much is kept in memory."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an object may be deleted while this thread holds it
        self._reserved_bytes = 0

    def reserve_bytes(self, nbytes: int) -> int:
        """`nbytes`, which are then taken; 0 where there is no room for them."""
        with self._lock:
            reserved_bytes = nbytes if self._reserved_bytes + nbytes <= CACHE_BYTES else 0
            self._reserved_bytes += reserved_bytes
            return reserved_bytes

    def release_bytes(self, nbytes: int) -> None:
        """Give back what `reserve_bytes` returned."""
        with self._lock:
            self._reserved_bytes -= nbytes


_memory_budget = _MemoryBudget()
