"""Reading from untrusted folders: regular files only, and no link that leaves the folder.

A checkpoint unpacked from an archive may hold `vocab.txt -> /etc/shadow`, which a copy would leak, or a pipe,
which blocks a read for ever. Links to files of the same folder are followed, and so are links from a snapshot
in the Hugging Face hub's cache to the blobs of its own repository.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError
from portable.converters.storage.path_or_url import is_in_store

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import AnyPath

# No configuration, JSON state or log is larger.
MAX_SMALL_FILE_BYTES = 64 << 20
_REPOSITORIES = ("models--", "datasets--", "spaces--")
# Missing on some systems, where only the check of the path remains.
_OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class LinkError(CheckpointError):
    """A link leaves the folder that it lies in."""


def resolve_local_path_inside(path: Path, within: Path) -> str:
    """The path with links resolved.

    Raises:
        LinkError: outside `within`, and no blob of the hub repository that `within` is a snapshot of.
    """
    real, root = os.path.realpath(path), os.path.realpath(within)
    if not (_is_below(real, root) or any(_is_below(real, blobs) for blobs in _list_blob_folders(root))):
        raise LinkError(
            f"{path}: a link here leaves {within} and is not followed; "
            "put the file itself there, or give the folder that holds it"
        )
    return real


def is_safe_relative_path(name: str) -> bool:
    """Whether the name of a file, as another file gives it, is a relative path that stays in its folder."""
    path = PurePosixPath(name)
    has_invalid_character = any(
        c in "\0\\" or "\ud800" <= c <= "\udfff" for c in name
    )  # the last are halves of characters
    return bool(name) and not (has_invalid_character or path.is_absolute() or ".." in path.parts)


def get_child_inside(folder: AnyPath, name: str) -> AnyPath:
    """What is called `name` in `folder`; LinkError where it is a link that leaves `folder`."""
    path = folder / name
    if not is_in_store(path) and not is_in_store(folder):
        resolve_local_path_inside(path, folder)
    return path


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _list_blob_folders(root: str) -> list[str]:
    """The blob folders for a snapshot in the hub's cache: `<repository>/snapshots/<revision>/...`."""
    return [
        str(folder.parent / "blobs")
        for folder in Path(root).parents
        if folder.name == "snapshots" and folder.parent.name.startswith(_REPOSITORIES)
    ]


def open_regular_file(path: str | Path) -> int:
    """A descriptor for reading a regular file; refuses a link, and does not block on a pipe.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def open_new_file(path: Path) -> int:
    """A descriptor for writing a new file; OSError if the path exists, even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def open_for_writing(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor for writing to a regular file, created if missing; a link is not followed.

    Raises:
        OSError: it cannot be opened, or the path is a link or not a regular file.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | _OPEN_FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, and links are not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_small_file(
    path: AnyPath,
    within: AnyPath | None = None,
    *,
    max_bytes: int = MAX_SMALL_FILE_BYTES,
    truncate: bool = False,
) -> bytes:
    """The content of a small regular file.

    Args:
        within: the folder that links may not leave; by default the one that holds the file.
        max_bytes: its maximum size in bytes.
        truncate: return the first `max_bytes` bytes of a larger file instead of refusing it.

    Raises:
        LinkError: a link leaves `within`.
        OSError: missing, not a regular file, or too large.
    """
    if is_in_store(path):
        size = path.get_file_size()
        if size > max_bytes and not truncate:
            raise OSError(errno.EFBIG, "is too large", str(path))
        return path.read_range(0, max_bytes) if size > max_bytes else path.read_bytes()
    folder = path.parent if within is None or is_in_store(within) else within
    with os.fdopen(open_regular_file(resolve_local_path_inside(path, folder)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes and not truncate:
            raise OSError(errno.EFBIG, f"is too large ({size:,} bytes)", str(path))
        return file.read(min(size, max_bytes))


def header_contains(path: AnyPath, content: bytes) -> bool:
    """Whether the first kilobytes of a file hold these bytes; False where it cannot be read."""
    try:
        return content in read_small_file(path, max_bytes=4096, truncate=True)
    except (OSError, CheckpointError):
        return False


def read_small_text_file(path: AnyPath, within: AnyPath | None = None) -> str:
    """The text of a small regular file: see `read_small_file`; ValueError where it is not UTF-8."""
    return read_small_file(path, within).decode("utf-8")


def read_json_object_or_empty(path: AnyPath | None) -> dict[str, Any]:
    """The table in a small JSON file; empty where there is no such file, or it is damaged."""
    try:
        values = json.loads(read_small_text_file(path)) if path is not None else None
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
