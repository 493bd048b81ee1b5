"""Operate on folders that may be on a local disk or in an object store.

Most functions accept a `Path` or a `RemotePath`, so callers need not distinguish them. A folder on
a disk becomes complete when it is renamed to its final path. A folder in an object store becomes
complete through the markers of `portable.converters.storage.completion_markers`, or through its
last file (see `move_into_place`).
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from portable.converters.storage.completion_markers import (
    COMPLETE_MARKER,
    INCOMPLETE_MARKER,
    mark_folder_incomplete,
)
from portable.converters.storage.listed_file import ListedFile
from portable.converters.storage.path_or_url import is_in_store
from portable.converters.storage.safe_open import (
    LinkError,
    open_new_file,
    open_regular_file,
    resolve_local_path_inside,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import AnyPath

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P", Path, "RemotePath")
"""Type variable for paths that are either all local or all in an object store."""

PARTIAL_SUFFIX = ".partial"
"""Suffix of the name of a hidden folder on a disk that is being written or deleted."""
DAMAGED_MARKER = "_DAMAGED"
"""Name of the object that marks a quarantined folder in an object store."""


def list_files_below(folder: AnyPath) -> dict[str, ListedFile]:
    """List all regular files below a folder, without following links to folders.

    A link to a regular file is listed with the size of its target. Hidden files are included. Local
    folders that cannot be listed are ignored.

    Returns:
        Size and version of each file, keyed by its path relative to the folder. Empty if the folder
        does not exist.

    Raises:
        RemoteError: If a folder in an object store cannot be listed.
    """
    if is_in_store(folder):
        return folder.list_objects()
    files = {}
    for parent_path, _, names in os.walk(folder):
        prefix = (
            ""
            if parent_path == str(folder)
            else os.path.relpath(parent_path, folder).replace(os.sep, "/") + "/"
        )
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(parent_path, name))  # noqa: PTH116, PTH118 - a Path for each is slow
                if stat.S_ISREG(status.st_mode):
                    files[prefix + name] = ListedFile(status.st_size, str(status.st_mtime_ns))
    return files


def list_names_below(folder: AnyPath) -> set[str]:
    """List the paths of all files below a folder, relative to the folder.

    Does not call `stat` for local files, so the result also contains broken links and special files
    such as pipes. See `list_files_below`, which omits them.
    """
    if is_in_store(folder):
        return set(folder.list_objects())
    names: set[str] = set()
    for path, _, files in os.walk(folder):
        prefix = "" if path == str(folder) else os.path.relpath(path, folder).replace(os.sep, "/") + "/"
        names.update(prefix + file for file in files)
    return names


def list_subfolders(folder: P) -> list[P]:
    """List the folders directly in a folder, sorted by name.

    Hidden folders and links to folders are included. Returns an empty list if the folder does not
    exist. In an object store, cached listings are dropped first, so the result is up to date.
    """
    if is_in_store(folder):
        folder.clear_listings()
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return []


def list_entry_names(folder: AnyPath) -> list[str]:
    """List the names of the entries in a folder, sorted.

    Returns an empty list if the folder does not exist, or if a local folder cannot be listed.

    Raises:
        RemoteError: If a folder in an object store cannot be listed.
    """
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def list_subfolder_names(folder: AnyPath) -> list[str]:
    """List the names of the immediate subfolders of a folder.

    Symbolic links that point outside the folder are omitted.
    """
    names = []
    for name in list_entry_names(folder):
        with suppress(LinkError):
            if resolve_path_inside(folder / name, folder).is_dir():
                names.append(name)
    return names


def list_file_names(folder: AnyPath) -> list[str]:
    """List the names of the files directly in a folder.

    Returns an empty list if the folder does not exist, or if a local folder cannot be listed.

    Raises:
        RemoteError: If a folder in an object store cannot be listed.
    """
    return [name for name in list_entry_names(folder) if (folder / name).is_file()]


def resolve_path_inside(path: AnyPath, within: AnyPath) -> AnyPath:
    """Resolve a link, and check that its target is inside a folder.

    A path in an object store is returned unchanged, because object stores have no links.

    Args:
        path: Path of a file or a folder.
        within: Folder that must contain the target.

    Returns:
        The target if `path` is a link, otherwise `path`. The target may not exist.

    Raises:
        LinkError: If the target is outside `within`. A blob of the Hugging Face Hub cache is allowed
            if `within` is a snapshot of the same repository.
    """
    if is_in_store(path) or is_in_store(within):
        return path
    real = resolve_local_path_inside(path, within)
    return Path(real) if path.is_symlink() else path


def copy_file(source: AnyPath, target: AnyPath) -> None:
    """Copy a file to a new path. Each of the two paths is local or in an object store.

    A local copy is flushed with fsync.

    Args:
        source: File to copy. It must not be a link.
        target: Path of the copy. If it is local, it must not exist.

    Raises:
        OSError: If a local file cannot be read or written, or if `source` does not exist.
        RemoteError: If a request to an object store fails.
    """
    if is_in_store(target):
        if is_in_store(source):
            source.copy_to(target)
        else:
            target.upload_file(source)
        return
    with os.fdopen(open_new_file(target), "wb") as written:
        if is_in_store(source):
            source.download_to(written.write)
        else:
            with os.fdopen(open_regular_file(source), "rb") as read:
                shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())


def fsync_path(path: Path) -> None:
    """Flush a file or folder to the disk with fsync.

    For a folder, this makes new and renamed entries durable.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_folder(folder: AnyPath, target: Path) -> None:
    """Copy all files below a local or remote folder into a local folder.

    Missing folders are created, except that an empty folder is not copied. `folder` must not contain
    links to files, and `target` must not contain files with the same names. If copying fails, the
    files that have been copied remain.

    Raises:
        OSError: If a local file cannot be read or written, is a link, or already exists.
        RemoteError: If a request to an object store fails.
    """
    for name in list_files_below(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(folder / name, target / name)


def create_folder(folder: AnyPath) -> None:
    """Create a folder and its parents. Does nothing in an object store, which does not need folders."""
    if not is_in_store(folder):
        folder.mkdir(parents=True, exist_ok=True)


def move_into_place(local_folder: Path, target: AnyPath, *, last_file_name: str = "") -> None:
    """Move a local folder to its final path.

    If the target is on a disk, an existing folder is deleted, and the local folder is renamed. Both
    must be in the same file system. If the target is in an object store, the files are uploaded one by
    one, and the local folder is deleted. Existing objects in the store remain, unless an uploaded file
    has the same name.

    Args:
        local_folder: Folder to move.
        target: Final path of the folder.
        last_file_name: Name of the file to upload last. In an object store, the folder is complete if
            this file exists. If empty, the files are uploaded in alphabetical order.
    """
    if is_in_store(target):
        for name in sorted(list_files_below(local_folder), key=lambda name: (name == last_file_name, name)):
            (target / name).upload_file(local_folder / name)
        shutil.rmtree(local_folder, ignore_errors=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    local_folder.rename(target)


def get_read_concurrency(path: AnyPath) -> int | None:
    """Return the number of files to read at the same time.

    In an object store, this is the maximum number of connections. On a disk, the result is None, which
    means one thread per core, but at most 16.
    """
    if not is_in_store(path):
        return None
    from portable.converters.storage.object_store import get_max_connections

    return get_max_connections()


def map_with_prefetch(folder: AnyPath, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function that reads a file to each item, like `map`.

    In an object store, several calls run concurrently to hide the latency of the requests. The number
    of results in memory exceeds the number of connections by at most one.

    Args:
        folder: Folder that contains the files.
        function: Function to apply. It must be thread-safe.
        items: Arguments of the function.

    Yields:
        The results, in the order of the items. An error raised by the function is raised again when its
        result is due.
    """
    if not is_in_store(folder):
        yield from map(function, items)
        return
    from portable.converters.storage.object_store import get_max_connections, run_in_thread, wait_for_result

    waiting = iter(items)
    running = deque(run_in_thread(partial(function, item)) for item in islice(waiting, get_max_connections()))
    while running:
        result = wait_for_result(running.popleft())
        running.extend(run_in_thread(partial(function, item)) for item in islice(waiting, 1))
        yield result


# -- complete and incomplete folders -------------------------------------------------------------------------


def find_unused_path(path: P) -> P:
    """Return the first of `path`, `path-2`, `path-3`, ... that does not exist."""
    candidate, number = path, 1
    while is_taken(candidate):
        number += 1
        candidate = path.parent / f"{path.name}-{number}"
    return candidate


def is_taken(path: AnyPath) -> bool:
    """Return whether a path exists. A broken link also counts as existing."""
    return path.exists() if is_in_store(path) else os.path.lexists(path)


def is_incomplete_folder(folder: AnyPath) -> bool:
    """Return whether a folder contains the marker of an incomplete write but no completion marker.

    Only writes to object stores create the marker of an incomplete write. A folder on a disk can
    still be incomplete in this sense, if it was copied from an object store.
    """
    return (folder / INCOMPLETE_MARKER).is_file() and not (folder / COMPLETE_MARKER).is_file()


def is_abandoned_folder(folder: AnyPath) -> bool:
    """Return whether a folder may be left over from an interrupted write or deletion.

    Also returns True while a write or deletion is still running. On a disk, only the name of the
    folder is checked. In an object store, a quarantined folder is not abandoned.
    """
    if is_in_store(folder):
        return is_incomplete_folder(folder) and not (folder / DAMAGED_MARKER).is_file()
    return folder.name.startswith(".") and folder.name.endswith(PARTIAL_SUFFIX)


def quarantine_folder(folder: P) -> P:
    """Keep a damaged folder for inspection, but prevent it from being read as a checkpoint.

    On a disk, the folder is renamed to `<name>.damaged`, or to `<name>.damaged-2` and so on if this
    path exists. In an object store, markers are written to the folder, which then counts as incomplete.

    Returns:
        The new path of the folder on a disk, or the path of the marker `_DAMAGED` in an object store.
    """
    if not is_in_store(folder):
        return move_folder(folder, find_unused_path(folder.parent / f"{folder.name}.damaged"))
    aside = folder / DAMAGED_MARKER
    aside.write_bytes(b"")
    mark_folder_incomplete(folder)
    return aside


def move_folder(folder: P, target: P) -> P:
    """Rename a folder, and return its new path.

    An object store cannot rename folders, so each object is copied and then deleted. If this is
    interrupted, both folders contain a part of the objects. On a disk, `target` must be in the same
    file system, and must not exist.
    """
    if is_in_store(folder):
        for name in folder.list_objects():
            (folder / name).move_to(target / name)
        return target
    folder.rename(target)
    fsync_path(folder.parent)
    return target


def remove_folder(folder: AnyPath) -> None:
    """Delete a folder, and abort unfinished uploads to it if possible.

    Uploads can be aborted in S3 if boto3 is installed, but not in other stores. Before the first file
    is deleted, a folder on a disk is renamed to a hidden name that ends with `PARTIAL_SUFFIX`, and a
    folder in an object store is marked as incomplete. After an interrupted deletion,
    `is_abandoned_folder` detects the remaining files. If `folder` is a symbolic link, only the link is
    deleted. Does nothing if `folder` does not exist.
    """
    if is_in_store(folder):
        from portable.converters.storage.object_store import abort_open_uploads

        abort_open_uploads(folder)
        if names := folder.list_objects():
            # Mark the folder first, so that it is not read and can be found if the deletion is interrupted.
            mark_folder_incomplete(folder)
            folder.remove_objects(
                [name for name in names if name not in (COMPLETE_MARKER, INCOMPLETE_MARKER)]
            )
            folder.remove_objects([INCOMPLETE_MARKER])
        return
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.old{PARTIAL_SUFFIX}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
