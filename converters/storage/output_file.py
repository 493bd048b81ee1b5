"""Output files, written by several threads and flushed to the disk while they grow."""

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

# Linux allocates larger folios for larger writes: writes of 1 MiB took five times the CPU time of these.
WRITE_BYTES = 256 << 10
# Written bytes between two flushes, so that the final fsync has little left to write.
FLUSH_BYTES = 32 << 20
# Bytes the kernel copies per call, so that the progress bar moves and Ctrl-C is handled.
_KERNEL_COPY = 8 << 20
# Of a file system. XFS and btrfs share whole blocks of two files.
BLOCK_BYTES = 4096
# Linux's ioctl: source file, its offset, length, offset in the target.
_FICLONERANGE = 0x4020940D


class OutputFile:
    """A new file, written in pieces by any thread, and fsynced after the last piece.

    Args:
        piece_lengths: of its pieces.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, piece_lengths: Sequence[int] = (0,)) -> None:
        self._fd = -1  # set first: __del__ runs even when open fails
        self._fd = open_new_file(path)
        self._num_unfinished = len(piece_lengths)
        self._piece_offsets = [0, *accumulate(piece_lengths)]
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def get_piece(self, index: int) -> OutputPiece:
        """Piece `index`, of the lengths given."""
        return OutputPiece(self, self._fd, self._piece_offsets[index])

    def finish_piece(self) -> None:
        """End one piece; after the last, fsync and close the file."""
        with self._lock:
            self._num_unfinished -= 1
            last = not self._num_unfinished
        if last:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


class OutputPiece:
    """A run of bytes of an `OutputFile`, written from its start to its end by one thread."""

    def __init__(self, file: OutputFile, fd: int, offset: int) -> None:
        self.file = file  # keeps the descriptor open
        self._fd = fd
        self._offset = self._flushed_offset = offset

    def write(self, data: memoryview | bytes) -> None:
        """Append `data`."""
        remaining = memoryview(data)
        while remaining:
            count = os.pwrite(self._fd, remaining[:WRITE_BYTES], self._offset)
            remaining = remaining[count:]
            self._advance_offset(count)

    def copy(self, span: FileSpan, progress: Callable[[int], object]) -> bool:
        """Let the kernel append the bytes of `span`; False, with nothing written, where it cannot.

        Args:
            progress: called with the number of bytes of each step.
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
                count = 0  # across file systems, or an old kernel
            if count == 0:
                # The caller writes all bytes itself, over those copied so far.
                self._offset, self._flushed_offset = start, min(start, self._flushed_offset)
                progress(-done)
                return False
            done += count
            self._advance_offset(count)
            progress(count)
        return True

    def finish(self, progress: Callable[[int], object] = int) -> None:
        """Flush, and end this piece."""
        self._flush()
        self.file.finish_piece()

    def _advance_offset(self, count: int) -> None:
        self._offset += count
        if self._offset - self._flushed_offset >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        count = self._offset - self._flushed_offset
        if count and hasattr(os, "posix_fadvise"):  # not on macOS; a count of 0 would mean the whole file
            # For dirty pages this starts writeback without waiting for it.
            os.posix_fadvise(self._fd, self._flushed_offset, count, os.POSIX_FADV_DONTNEED)
        self._flushed_offset = self._offset


def can_share_blocks(path: Path, folder: Path) -> bool:
    """Whether a new file in `folder` may share a block of the file `path` (XFS, btrfs), by a trial."""
    try:
        import fcntl
    except ImportError:  # not on Windows
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
    """Write and fsync a small new file; OSError if it exists or writing fails."""
    if is_in_store(path):
        path.write_bytes(data)
        return
    piece = OutputFile(path).get_piece(0)
    piece.write(data)
    piece.finish()
