"""Read files from untrusted folders: only regular files, and no links that leave the folder.

A checkpoint from an unpacked archive may contain a link such as `vocab.txt -> /etc/shadow`, and
copying it would disclose the linked file. The archive may also contain a named pipe, and reading
the pipe would block forever. Links to files in the same folder are followed. In the Hugging Face
Hub cache, links from a snapshot to the blobs of its repository are also followed.
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
from portable.converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import AnyPath

# Maximum size in bytes of configurations, JSON states, and logs.
MAX_SMALL_FILE_BYTES = 64 << 20
_REPOSITORIES = ("models--", "datasets--", "spaces--")
# Some systems do not have these flags. On them, only the path is checked.
_OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class LinkError(CheckpointError):
    """Error for a link that points outside its folder."""


def resolve_local_path_inside(path: Path, within: Path) -> str:
    """Resolve the links in a local path, and check that the result is inside a folder.

    Args:
        path: Path to resolve.
        within: Folder that must contain the result. For a snapshot in the Hugging Face Hub cache,
            the result may also be a blob of the same repository.

    Returns:
        The absolute path without links, which may not exist.

    Raises:
        LinkError: If the result is neither inside `within` nor such a blob.
    """
    real, root = os.path.realpath(path), os.path.realpath(within)
    if not (_is_below(real, root) or any(_is_below(real, blobs) for blobs in _list_blob_folders(root))):
        raise LinkError(
            f"{path}: a link points outside of {within} and is not followed; put the file itself into "
            "this folder, or specify the folder that contains the file"
        )
    return real


def is_safe_relative_path(name: str) -> bool:
    """Return whether a file name from a checkpoint is a relative path that does not leave its folder.

    Returns False for a name that is empty or contains a backslash, a NUL character, or a surrogate.
    Links are not checked.
    """
    path = PurePosixPath(name)
    # Names with surrogates (U+D800 to U+DFFF) are invalid, because a surrogate is only half of a character.
    has_invalid_character = any(c in "\0\\" or "\ud800" <= c <= "\udfff" for c in name)
    return bool(name) and not (has_invalid_character or path.is_absolute() or ".." in path.parts)


def get_child_inside(folder: AnyPath, name: str) -> AnyPath:
    """Return the path of a folder entry, and check that it does not lead out of the folder.

    Links in the returned path are not resolved, and the entry need not exist.

    Raises:
        LinkError: If the name or a link leads to a path outside the folder.
        RemoteError: If the folder is in an object store, and the name is not a valid object name.
    """
    path = folder / name
    if not is_in_store(path) and not is_in_store(folder):
        resolve_local_path_inside(path, folder)
    return path


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _list_blob_folders(root: str) -> list[str]:
    """List the folders of the Hub cache that store the files of a snapshot.

    The files in a snapshot are links to blobs in such a folder. For example, the snapshot
    `models--org--name/snapshots/<revision>` belongs to the folder `models--org--name/blobs`.

    Args:
        root: Resolved path of the snapshot, or of a folder in it.

    Returns:
        Paths of the folders, which may not exist. Empty if `root` is not in a snapshot of the Hub
        cache.
    """
    return [
        str(folder.parent / "blobs")
        for folder in Path(root).parents
        if folder.name == "snapshots" and folder.parent.name.startswith(_REPOSITORIES)
    ]


def open_regular_file(path: str | Path) -> int:
    """Open a regular file for reading, without following a link or blocking on a named pipe.

    Links to parent folders are followed. See `resolve_local_path_inside`, which checks them.

    Returns:
        File descriptor. The caller must close it.

    Raises:
        OSError: If the file cannot be opened, or if the path is a link or not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return fd


def open_new_file(path: Path) -> int:
    """Create a new file, open it for writing, and return its descriptor, which the caller must close.

    Raises:
        OSError: If the path exists, even as a broken link, or if the file cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def open_for_writing(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file for writing, creating it if necessary. A link is not followed.

    The content of an existing file is kept unless `flags` contains `os.O_TRUNC`.

    Args:
        path: Path of the file.
        flags: Flags of `os.open`, such as `os.O_WRONLY`.
        mode: Permissions of a new file.

    Returns:
        File descriptor. The caller must close it.

    Raises:
        OSError: If the file cannot be opened, or if the path is a link or not a regular file.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | _OPEN_FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, but links are not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return fd


def read_small_file(
    path: AnyPath,
    within: AnyPath | None = None,
    *,
    max_bytes: int = MAX_SMALL_FILE_BYTES,
    truncate: bool = False,
) -> bytes:
    """Read a small regular file.

    Args:
        path: Path of the file.
        within: Folder that must contain the targets of links. By default, this is the parent folder of
            the file. Ignored in an object store, which has no links.
        max_bytes: Maximum size of the file in bytes.
        truncate: Whether to return the first `max_bytes` bytes of a larger file instead of raising an
            error.

    Raises:
        LinkError: If a link points outside `within`.
        OSError: If the file does not exist, is not a regular file, or is too large.
        RemoteError: If the file is in an object store that cannot be accessed.
    """
    if is_in_store(path):
        size = path.get_file_size()
        if size > max_bytes and not truncate:
            raise _build_too_large_error(path, size, max_bytes)
        return path.read_range(0, max_bytes) if size > max_bytes else path.read_bytes()
    folder = path.parent if within is None or is_in_store(within) else within
    with os.fdopen(open_regular_file(resolve_local_path_inside(path, folder)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes and not truncate:
            raise _build_too_large_error(path, size, max_bytes)
        return file.read(min(size, max_bytes))


def _build_too_large_error(path: AnyPath, size: int, max_bytes: int) -> OSError:
    return OSError(
        errno.EFBIG,
        f"has {size:,} bytes, more than the maximum of {max_bytes:,} for this kind of file; check that this "
        "is the right file",
        str(path),
    )


def header_contains(path: AnyPath, content: bytes) -> bool:
    """Return whether the first 4,096 bytes of a file contain `content`.

    Returns False if the file does not exist or cannot be read.

    Raises:
        RemoteError: If the file is in an object store that cannot be accessed.
    """
    try:
        return content in read_small_file(path, max_bytes=4096, truncate=True)
    except RemoteError:  # the store failed, so the error does not describe the file
        raise
    except (OSError, CheckpointError):
        return False


def read_small_text_file(path: AnyPath, within: AnyPath | None = None) -> str:
    """Read a small text file. See `read_small_file`.

    Raises:
        ValueError: If the file is not valid UTF-8.
    """
    return read_small_file(path, within).decode("utf-8")


def read_json_object_or_empty(path: AnyPath | None) -> dict[str, Any]:
    """Read a JSON object from a small file, if possible.

    Returns:
        The object. Empty if `path` is None, or if the file does not exist, cannot be read, is larger
            than `MAX_SMALL_FILE_BYTES`, or does not contain a JSON object.

    Raises:
        LinkError: If `path` is a link to a file outside its folder.
        RemoteError: If the file is in an object store that cannot be accessed.
    """
    try:
        values = json.loads(read_small_text_file(path)) if path is not None else None
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
