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
from portable.converters.storage.path_or_url import in_store

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import Place

# No configuration, JSON state or log is larger.
SMALL = 64 << 20
_REPOSITORIES = ("models--", "datasets--", "spaces--")
# Missing on some systems, where only the check of the path remains.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class LinkError(CheckpointError):
    """A link leaves the folder that it lies in."""


def real_path(path: Path, within: Path) -> str:
    """The path with links resolved.

    Raises:
        LinkError: outside `within`, and no blob of the hub repository that `within` is a snapshot of.
    """
    real, root = os.path.realpath(path), os.path.realpath(within)
    if not (_below(real, root) or any(_below(real, blobs) for blobs in _blobs(root))):
        raise LinkError(
            f"{path}: a link here leaves {within} and is not followed; "
            "put the file itself there, or give the folder that holds it"
        )
    return real


def stays_inside(name: str) -> bool:
    """Whether the name of a file, as another file gives it, is a relative path that stays in its folder."""
    path = PurePosixPath(name)
    odd = any(c in "\0\\" or "\ud800" <= c <= "\udfff" for c in name)  # the last are halves of characters
    return bool(name) and not (odd or path.is_absolute() or ".." in path.parts)


def child(folder: Place, name: str) -> Place:
    """What is called `name` in `folder`; LinkError where it is a link that leaves `folder`."""
    path = folder / name
    if not in_store(path) and not in_store(folder):
        real_path(path, folder)
    return path


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _blobs(root: str) -> list[str]:
    """The blob folders for a snapshot in the hub's cache: `<repository>/snapshots/<revision>/...`."""
    return [
        str(folder.parent / "blobs")
        for folder in Path(root).parents
        if folder.name == "snapshots" and folder.parent.name.startswith(_REPOSITORIES)
    ]


def open_regular(path: str | Path) -> int:
    """A descriptor for reading a regular file; refuses a link, and does not block on a pipe.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | _FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def open_new(path: Path) -> int:
    """A descriptor for writing a new file; OSError if the path exists, even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def open_without_links(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor for writing to a regular file, created if missing; a link is not followed.

    Raises:
        OSError: it cannot be opened, or the path is a link or not a regular file.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | _FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, and links are not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_small(path: Place, within: Place | None = None, *, limit: int = SMALL, head: bool = False) -> bytes:
    """The content of a small regular file.

    Args:
        within: the folder that links may not leave; by default the one that holds the file.
        limit: its maximum size in bytes.
        head: return the first `limit` bytes of a larger file instead of refusing it.

    Raises:
        LinkError: a link leaves `within`.
        OSError: missing, not a regular file, or too large.
    """
    if in_store(path):
        size = path.file_size()
        if size > limit and not head:
            raise OSError(errno.EFBIG, "is too large", str(path))
        return path.read_range(0, limit) if size > limit else path.read_bytes()
    folder = path.parent if within is None or in_store(within) else within
    with os.fdopen(open_regular(real_path(path, folder)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit and not head:
            raise OSError(errno.EFBIG, f"is too large ({size:,} bytes)", str(path))
        return file.read(min(size, limit))


def mentions(path: Place, content: bytes) -> bool:
    """Whether the first kilobytes of a file hold these bytes; False where it cannot be read."""
    try:
        return content in read_small(path, limit=4096, head=True)
    except (OSError, CheckpointError):
        return False


def read_small_text(path: Place, within: Place | None = None) -> str:
    """The text of a small regular file: see `read_small`; ValueError where it is not UTF-8."""
    return read_small(path, within).decode("utf-8")


def read_small_table(path: Place | None) -> dict[str, Any]:
    """The table in a small JSON file; empty where there is no such file, or it is damaged."""
    try:
        values = json.loads(read_small_text(path)) if path is not None else None
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
