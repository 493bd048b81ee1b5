"""Write output files with several threads, flushing them to the disk while they grow."""

from __future__ import annotations

import os
import struct
import tempfile
import threading
from itertools import accumulate
from typing import TYPE_CHECKING

from portable.converters.storage.path_or_url import is_in_store
from portable.converters.storage.safe_open import open_new_file, open_regular_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from portable.converters.storage.byte_sources import FileSpan
    from portable.converters.storage.path_or_url import AnyPath

# Maximum size of a write in bytes. Writes of 1 MiB took five times the CPU time, because Linux allocates
# larger folios for larger writes.
WRITE_BYTES = 256 << 10
# Number of written bytes between two flushes, so that the final fsync has little left to write.
FLUSH_BYTES = 32 << 20
# Number of bytes that the kernel copies per call, so that the progress bar moves and Ctrl-C is handled.
_KERNEL_COPY = 8 << 20
# Block size of file systems. On XFS and btrfs, two files can share complete blocks.
BLOCK_BYTES = 4096
# FICLONERANGE of Linux. The arguments are the source file, its offset, the length, and the offset in the
# target.
_FICLONERANGE = 0x4020940D


class OutputFile:
    """New file that several threads write in pieces. It is flushed with fsync after the last piece.

    Args:
        path: Path of the file. It must not exist.
        piece_lengths: Size of each piece in bytes. The pieces are contiguous in the file. The sizes
            determine only the offset of each piece, so data beyond the end of a piece would
            overwrite the next piece. By default, the file is a single piece of any size.

    Raises:
        OSError: If the file exists or cannot be written.
    """

    def __init__(self, path: Path, piece_lengths: Sequence[int] = (0,)) -> None:
        self._fd = -1  # Set this first, because __del__ also runs if the file cannot be opened.
        self._fd = open_new_file(path)
        self._num_unfinished = len(piece_lengths)
        self._piece_offsets = [0, *accumulate(piece_lengths)]
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def get_piece(self, index: int) -> OutputPiece:
        """Return the piece of the file with this index.

        The caller must write the piece from start to end, and then call `OutputPiece.finish`.
        """
        return OutputPiece(self, self._fd, self._piece_offsets[index])

    def finish_piece(self) -> None:
        """Mark a piece as finished. After the last piece, flush the file with fsync and close it.

        `OutputPiece.finish` calls this method exactly once per piece.
        """
        with self._lock:
            self._num_unfinished -= 1
            last = not self._num_unfinished
        if last:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


class OutputPiece:
    """Piece of an `OutputFile`, written from start to end by one thread.

    Args:
        file: File that contains the piece.
        fd: Descriptor of the file.
        offset: Offset of the piece in the file, in bytes.
    """

    def __init__(self, file: OutputFile, fd: int, offset: int) -> None:
        self.file = file  # Keeps the descriptor open
        self._fd = fd
        self._offset = self._flushed_offset = offset

    def write(self, data: memoryview | bytes) -> None:
        """Append data to the piece."""
        remaining = memoryview(data)
        while remaining:
            count = os.pwrite(self._fd, remaining[:WRITE_BYTES], self._offset)
            remaining = remaining[count:]
            self._advance_offset(count)

    def copy(self, span: FileSpan, progress: Callable[[int], object]) -> bool:
        """Append a span of another file with `os.copy_file_range`.

        If the kernel cannot copy the span, nothing is appended, and the caller must write the data
        itself. This includes spans in an object store. The CRC of the span is not verified.

        Args:
            span: Span to copy.
            progress: Callback that receives the number of bytes copied in each step. If the copy
                fails, the callback also receives the negative sum of these numbers, so that the
                total becomes 0.

        Returns:
            Whether the span has been copied.

        Raises:
            CheckpointError: If the file that contains the span cannot be opened.
        """
        if not hasattr(os, "copy_file_range"):
            return False
        descriptor = span.file.open_descriptor()
        if descriptor is None:
            return False
        start, done = self._offset, 0
        edge = -span.offset % BLOCK_BYTES if (span.offset - start) % BLOCK_BYTES == 0 else 0
        while done < span.nbytes:
            want = min(span.nbytes - done, edge if done < edge else _KERNEL_COPY)
            try:
                count = os.copy_file_range(
                    descriptor.fd, self._fd, want, offset_src=span.offset + done, offset_dst=self._offset
                )
            except OSError:
                count = 0  # The files are on different file systems, or the kernel is old.
            if count == 0:
                # The caller writes all bytes itself, which overwrites the copied bytes.
                self._offset, self._flushed_offset = start, min(start, self._flushed_offset)
                progress(-done)
                return False
            done += count
            self._advance_offset(count)
            progress(count)
        return True

    def finish(self, progress: Callable[[int], object] = int) -> None:
        """Start to flush the rest of the piece, and mark the piece as finished.

        The data is durable only after all pieces of the file are finished.

        Args:
            progress: Ignored. Only pieces that are uploaded to a store use it.
        """
        self._flush()
        self.file.finish_piece()

    def _advance_offset(self, count: int) -> None:
        self._offset += count
        if self._offset - self._flushed_offset >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        count = self._offset - self._flushed_offset
        # posix_fadvise is not available on macOS, and a count of 0 would mean the complete file.
        if count and hasattr(os, "posix_fadvise"):
            # For dirty pages, this starts the writeback without waiting for it.
            os.posix_fadvise(self._fd, self._flushed_offset, count, os.POSIX_FADV_DONTNEED)
        self._flushed_offset = self._offset


def can_share_blocks(path: Path, folder: Path) -> bool:
    """Return whether a new file can share blocks with an existing file, as on XFS and btrfs.

    Tests this with a temporary file. Returns False if the test is impossible, for example because the
    existing file is a link or smaller than `BLOCK_BYTES`.

    Args:
        path: Existing file.
        folder: Folder of the new file.
    """
    try:
        import fcntl
    except ImportError:  # `fcntl` is not available on Windows.
        return False
    try:
        source = open_regular_file(path)
    except OSError:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.ioctl(file, _FICLONERANGE, struct.pack("=qQQQ", source, 0, BLOCK_BYTES, 0))
        return True
    except OSError:
        return False
    finally:
        os.close(source)


def write_new_file(path: AnyPath, data: bytes) -> None:
    """Write a small new file.

    A local file is flushed with fsync. In an object store, an existing object is replaced.

    Raises:
        OSError: If a local file already exists or cannot be written.
        RemoteError: If an object cannot be written.
    """
    if is_in_store(path):
        path.write_bytes(data)
        return
    piece = OutputFile(path).get_piece(0)
    piece.write(data)
    piece.finish()
