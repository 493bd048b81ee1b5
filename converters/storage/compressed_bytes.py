"""Provide random access to compressed bytes, which are decompressed completely on the first read.

A Zarr chunk can be large. For example, it can contain a complete stack of layers that is read
one layer at a time. Decompressing the chunk again for each layer would be slow, so the
decompressed content is kept until every byte has been read once. It is kept in memory if the
memory budget `CACHE_BYTES` allows it. Otherwise, it is kept in an unnamed file in the temporary
folder (`TMPDIR`), which the kernel can write to disk. Small content (at most `MEMORY_BYTES`) is
an exception: if the budget is used up, it is not kept, and each read decompresses it again.
"""

from __future__ import annotations

import io
import mmap
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError, DamagedCheckpointError

if TYPE_CHECKING:
    import pyarrow

    from portable.converters.storage.byte_sources import ByteSource, UnverifiedSpans

# Content up to MEMORY_BYTES is always decompressed into memory. All larger content that is kept in memory has
# at most CACHE_BYTES in total.
MEMORY_BYTES, CACHE_BYTES = 1 << 20, 512 << 20
# Number of bytes to decompress per call. Content for a temporary file needs only this much memory.
_STEP_BYTES = 4 << 20
CODECS = ("zstd", "gzip")


class DecompressedSource:
    """Byte source that decompresses another source on the first read.

    The content is kept in memory if the memory budget allows it, and otherwise in a temporary file.
    However, if content of at most `MEMORY_BYTES` does not fit into the budget, it is not kept, and
    each read decompresses it again.

    Args:
        source: Compressed bytes.
        codec: Compression format, one of `CODECS`.
        nbytes: Size of the decompressed content in bytes. Content of a different size raises an
            error.
        used_bytes: Number of decompressed bytes that belong to the tensor. The remaining bytes are
            padding. The decompressed content is freed at the latest when this many bytes have been
            read.
        location: File that contains the bytes, used in error messages.
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
        # Whether to keep the content until all of it has been read. Otherwise, it is dropped after each read.
        self._keep_until_read = False

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        """Read decompressed bytes into a buffer. See `ByteSource.read_into`."""
        if offset < 0 or offset + len(buffer) > self.nbytes:
            raise DamagedCheckpointError(
                f"{self._location}: a chunk has only {self.nbytes:,} bytes, fewer than the tensor needs"
            )
        buffer[:] = self.load_content(len(buffer), unverified_spans)[offset : offset + len(buffer)]

    def load_content(self, num_bytes: int, unverified_spans: UnverifiedSpans) -> memoryview:
        """Return the complete content. Decompress it if necessary.

        The caller can copy strided regions directly out of the returned view. The view stays valid
        after the source has dropped its own reference to the content to free memory.

        Args:
            num_bytes: Number of bytes that the caller will read. The source adds up these numbers
                to decide when to drop the content.
            unverified_spans: Set of file spans to verify. See `ByteSource.read_into`.

        Raises:
            CheckpointError: If the compressed data is damaged or its content has a different size,
                or if the disk is full.
        """
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
        """Drop the content and release its memory budget. The next read decompresses it again."""
        self._content = None
        _memory_budget.release_bytes(self._reserved_bytes)
        self._reserved_bytes = 0

    def __del__(self) -> None:
        _memory_budget.release_bytes(self._reserved_bytes)

    def _decompress(self, unverified_spans: UnverifiedSpans) -> memoryview:
        """Decompress the content into memory or a temporary file.

        A temporary file is used if the content is larger than `MEMORY_BYTES` and does not fit into
        the rest of the memory budget. Reserves memory in the budget, and sets `_keep_until_read`.

        Raises:
            CheckpointError: If the data is damaged or has the wrong size, or if the temporary file
                cannot be written.
        """
        import pyarrow  # Imported here because the import is slow.

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
        """Decompress into an unnamed temporary file, and return a memory map of the file.

        Raises:
            CheckpointError: If the file cannot be written, or if the data is damaged or has the wrong size.
        """
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
                f"{tempfile.gettempdir()}: a chunk of {self.nbytes:,} bytes cannot be decompressed into "
                f"this folder: {error.strerror or error}; set TMPDIR to a folder with more space"
            ) from None

    def _read_decompressed(self, stream: pyarrow.NativeFile, num_bytes_read: int) -> bytes:
        """Read and return the next decompressed bytes. Empty at the end of the content.

        Args:
            stream: Decompressing stream.
            num_bytes_read: Number of bytes that have been read from the stream so far.

        Raises:
            CheckpointError: If the data is damaged, or if the content is shorter or longer than `nbytes`.
        """
        try:
            part: bytes = stream.read(min(_STEP_BYTES, self.nbytes - num_bytes_read) or 1)
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self._location}: damaged: a chunk is not valid {self._codec} data "
                f"({' '.join(str(error).split())[:120]})"
            ) from None
        if num_bytes_read < self.nbytes and not part:
            raise DamagedCheckpointError(
                f"{self._location}: damaged: a chunk ends after {num_bytes_read:,} of {self.nbytes:,} bytes"
            )
        if num_bytes_read == self.nbytes and part:
            raise DamagedCheckpointError(
                f"{self._location}: damaged: a chunk has more than the expected {self.nbytes:,} bytes"
            )
        return part


class _SourceAsFileObject(io.RawIOBase):
    """File object for pyarrow that reads a byte source from start to end."""

    def __init__(self, source: ByteSource, unverified_spans: UnverifiedSpans) -> None:
        super().__init__()
        self._source = source
        self._touched = unverified_spans
        self._offset = 0

    def readable(self) -> bool:
        """Return True, as `io.RawIOBase` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer, and return their number."""
        part = memoryview(buffer)[: self._source.nbytes - self._offset]
        self._source.read_into(part, self._offset, self._touched)
        self._offset += len(part)
        return len(part)


class _MemoryBudget:
    """Thread-safe budget of `CACHE_BYTES` for decompressed content in memory."""

    def __init__(self) -> None:
        # Reentrant, because `DecompressedSource.__del__` may run in a thread that holds the lock.
        self._lock = threading.RLock()
        self._reserved_bytes = 0

    def reserve_bytes(self, nbytes: int) -> int:
        """Reserve memory in the budget.

        Returns:
            `nbytes`, or 0 if the budget does not allow it. Pass the result to `release_bytes`.
        """
        with self._lock:
            reserved_bytes = nbytes if self._reserved_bytes + nbytes <= CACHE_BYTES else 0
            self._reserved_bytes += reserved_bytes
            return reserved_bytes

    def release_bytes(self, nbytes: int) -> None:
        """Release memory that `reserve_bytes` has reserved."""
        with self._lock:
            self._reserved_bytes -= nbytes


_memory_budget = _MemoryBudget()
