"""One file being written: at the page cache's pace, with the disk kept busy while it grows."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from converters.storage import FileSpan

# Linux gives a larger write larger folios, which it must find or make first: writes of 1 MiB were seen to
# cost five times the processor time of these.
WRITE_BYTES = 256 << 10
# Written bytes that are handed to the disk together, so that the last fsync has little left to wait for.
_FLUSH_BYTES = 32 << 20
# Bytes the kernel copies in one call, so that the progress bar moves and Ctrl-C is heard.
_KERNEL_COPY = 32 << 20


class OutputFile:
    """A new file, written from start to end and durable once the `with` block has ended well.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._at = 0
        self._flushed = 0

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, data: memoryview | bytes) -> None:
        """Append `data`."""
        left = memoryview(data)
        while left:
            count = os.write(self._fd, left[:WRITE_BYTES])
            left = left[count:]
            self._advance(count)

    def copy(self, span: FileSpan, progress: Callable[[int], object]) -> bool:
        """Append the bytes of `span` unread; False, and nothing done, where that is not possible.

        Args:
            progress: called with the bytes of each step.
        """
        if not hasattr(os, "copy_file_range"):
            return False
        descriptor = span.file.folder.descriptor(span.file)
        start, done = self._at, 0
        while done < span.nbytes:
            want = min(span.nbytes - done, _KERNEL_COPY)
            try:
                count = os.copy_file_range(descriptor.fd, self._fd, want, offset_src=span.offset + done)
            except OSError:
                count = 0  # across filesystems, or an old kernel
            if count == 0:
                os.ftruncate(self._fd, start)
                os.lseek(self._fd, start, os.SEEK_SET)
                self._at, self._flushed = start, min(start, self._flushed)
                progress(-done)
                return False
            done += count
            self._advance(count)
            progress(count)
        return True

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at - self._flushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            # For pages that are dirty this starts their way to the disk and waits for nothing.
            os.posix_fadvise(self._fd, self._flushed, self._at - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._at


def copy_file(source: Path, target: Path) -> None:
    """Copy a small file into a new one, durably and in little memory; OSError where it cannot be done."""
    shutil.copyfile(source, target)
    fd = os.open(target, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
