"""Open the files of a checkpoint folder, and reject names and links that lead outside the folder."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError, DamagedCheckpointError, format_os_error
from portable.converters.storage.byte_sources import CheckpointFile, FileDescriptor
from portable.converters.storage.path_or_url import is_in_store
from portable.converters.storage.safe_open import is_safe_relative_path, resolve_local_path_inside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath


def _compute_max_open_files() -> int:
    """Compute how many files of a checkpoint may be open at the same time.

    This is a quarter of the process's limit on open files, because the program also needs open files
    for other purposes. The result is between 16 and 4096. On Windows, it is 64.
    """
    try:
        import resource
    except ImportError:  # `resource` is not available on Windows.
        return 64
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // 4))


_MAX_OPEN_FILES = _compute_max_open_files()


class CheckpointFolder:
    """Folder of a checkpoint, on a disk or in an object store.

    File names come from untrusted checkpoints, so this class only opens files inside the folder. A
    link is only followed if its target is also inside the folder, or if it is a link from a
    snapshot in the Hugging Face Hub cache to a blob of the same repository. See
    `portable.converters.storage.safe_open`. The folder itself may be a link, because the user has
    specified it.

    Args:
        path: Path of the folder.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        # Files refer to this cache and not to the folder, which would be a reference cycle. Therefore, the
        # files are closed as soon as the checkpoint is dropped.
        self._open_cached = lru_cache(_MAX_OPEN_FILES)(FileDescriptor)
        self._files: dict[str, CheckpointFile] = {}

    def get_file(self, name: str) -> CheckpointFile:
        """Return a file in the folder. Repeated calls with the same name return the same object.

        Args:
            name: Path of the file, relative to the folder.

        Raises:
            CheckpointError: If the file does not exist, is not a regular file, or is outside the folder.
        """
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = self._create_file(name)
        return file

    def _create_file(self, name: str) -> CheckpointFile:
        """Create a `CheckpointFile`. The file is only opened on the first read.

        Raises:
            CheckpointError: If the name refers to a path outside the folder, if the file is missing, or if
                it is not a regular file.
        """
        if not is_safe_relative_path(name):
            raise DamagedCheckpointError(
                f"{self.path}: the file name {name!r} points outside of the checkpoint folder, "
                "contains a backslash or a null character, or is not valid Unicode"
            )
        if is_in_store(self.path):
            from portable.converters.storage.range_reader import RemoteFile

            remote = self.path / name
            try:
                return RemoteFile(name, remote, remote.get_file_size())
            except OSError as error:
                raise CheckpointError(f"{remote}: {format_os_error(error)}") from None
        path = self.path / name
        resolved_path = resolve_local_path_inside(path, self.path)
        return _LocalFile(name, path, resolved_path, _get_regular_file_size(path), self._open_cached)


def _get_regular_file_size(path: Path) -> int:
    """Check that a file is a regular file, and return its size in bytes.

    Raises:
        CheckpointError: If the file does not exist, cannot be accessed, or is not a regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {format_os_error(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{path}: is not a regular file; copy the checkpoint to a folder of regular files"
        )
    return status.st_size


class _LocalFile(CheckpointFile):
    """File on a local disk.

    Args:
        name: Name of the file, relative to the folder of the checkpoint.
        path: Path of the file, which may contain symbolic links.
        resolved_path: Path after all symbolic links are resolved. This path is opened.
        nbytes: Size of the file in bytes.
        open_cached: Cached function that opens a path. While the file is open, each call returns
            the same object.
    """

    path: Path

    def __init__(
        self,
        name: str,
        path: Path,
        resolved_path: str,
        nbytes: int,
        open_cached: Callable[[str], FileDescriptor],
    ) -> None:
        super().__init__(name, path, nbytes)
        self._resolved_path = resolved_path
        self._open_cached = open_cached

    def get_file_identity(self) -> object:
        status = os.stat(self._resolved_path)  # noqa: PTH116
        return status.st_dev, status.st_ino

    def open_descriptor(self) -> FileDescriptor:
        try:
            return self._open_cached(self._resolved_path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {format_os_error(error)}") from None

    def read_into(self, buffer: memoryview, at: int, certain_end: int = 0, possible_end: int = 0) -> None:
        descriptor = self.open_descriptor()
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor.fd, [buffer[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {format_os_error(error)}") from None
            if count == 0:
                raise DamagedCheckpointError(f"{self.path}: the file ends early, at byte {at + done}")
            done += count
