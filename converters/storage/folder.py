"""The files of one checkpoint folder, by names that cannot leave it."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError
from portable.converters.storage.byte_sources import Descriptor, SourceFile
from portable.converters.storage.path_or_url import in_store
from portable.converters.storage.safe_open import real_path, stays_inside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from portable.converters.storage.path_or_url import Place


def _max_open_files() -> int:
    """A quarter of this process's limit: the rest belongs to the caller."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 64
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // 4))


_MAX_OPEN_FILES = _max_open_files()


class Folder:
    """The files of one checkpoint folder, on a disk or in an object store, by names that stay inside it.

    Links must stay inside it too (`portable.converters.storage.safe_open`). The folder itself may be a link,
    because the user named it.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        # Files hold this and not their `Folder`, which would be a reference cycle: dropping a checkpoint
        # closes its files at once.
        self._opened = lru_cache(_MAX_OPEN_FILES)(Descriptor)
        self._files: dict[str, SourceFile] = {}

    def file(self, name: str) -> SourceFile:
        """The file `name`, a relative path; CheckpointError if it leaves the folder or is no regular file."""
        known = self._files.get(name)
        if known is None:
            known = self._files[name] = self._open(name)
        return known

    def _open(self, name: str) -> SourceFile:
        if not stays_inside(name):
            raise CheckpointError(
                f"{self.path}: the file name {name!r} leaves the checkpoint folder or is not valid Unicode"
            )
        if in_store(self.path):
            from portable.converters.storage.range_reader import RemoteFile

            remote = self.path / name
            try:
                return RemoteFile(name, remote, remote.file_size())
            except OSError as error:
                raise CheckpointError(f"{remote}: {error.strerror or error}") from None
        path = self.path / name
        real = real_path(path, self.path)
        return _LocalFile(name, path, real, _size(path), self._opened)


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size


class _LocalFile(SourceFile):
    """A file on a disk, where the kernel reads ahead."""

    path: Path

    def __init__(
        self, name: str, path: Path, real: str, nbytes: int, opened: Callable[[str], Descriptor]
    ) -> None:
        super().__init__(name, path, nbytes)
        self._real = real
        self._opened = opened

    def identity(self) -> object:
        status = os.stat(self._real)  # noqa: PTH116
        return status.st_dev, status.st_ino

    def descriptor(self) -> Descriptor:
        try:
            return self._opened(self._real)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}") from None

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
