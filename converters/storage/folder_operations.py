"""What can be done with a folder of a disk and with one of an object store alike.

Each function takes a `Path` or a `RemotePath`, and nothing above this module asks which one a place is. A
place is read with the methods that both have (`iterdir`, `stat`, `read_bytes`, `/`). What is whole is told by
a rename on a disk, and by `portable.converters.storage.completion_markers` in a store.
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

from portable.converters.storage.completion_markers import COMPLETE, INCOMPLETE, begin
from portable.converters.storage.listed_file import Object
from portable.converters.storage.path_or_url import in_store
from portable.converters.storage.safe_open import LinkError, open_new, open_regular, real_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import Place

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P", Path, "RemotePath")
"""Both or neither of two places are in a store."""

PARTIAL = ".partial"
"""Ends the name of a hidden folder on a disk that is being written or deleted."""
DAMAGED = "_DAMAGED"
"""An object in a folder that was set aside."""


def files_below(folder: Place) -> dict[str, Object]:
    """Every regular file below a folder, by its name relative to it; links to folders are not followed."""
    if in_store(folder):
        return folder.objects()
    found = {}
    for where, _, names in os.walk(folder):
        inside = "" if where == str(folder) else os.path.relpath(where, folder).replace(os.sep, "/") + "/"
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(where, name))  # noqa: PTH116, PTH118 - a Path for each is slow
                if stat.S_ISREG(status.st_mode):
                    found[inside + name] = Object(status.st_size, str(status.st_mtime_ns))
    return found


def names_below(folder: Place) -> set[str]:
    """Return the names of the files below a folder, relative to it. On a disk, no file is looked at."""
    if in_store(folder):
        return set(folder.objects())
    names: set[str] = set()
    for path, _, files in os.walk(folder):
        prefix = "" if path == str(folder) else os.path.relpath(path, folder).replace(os.sep, "/") + "/"
        names.update(prefix + file for file in files)
    return names


def folders_in(folder: P) -> list[P]:
    """The folders directly in a folder as it is now, hidden ones too; none where it does not exist."""
    if in_store(folder):
        folder.refresh()
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return []


def names_in(folder: Place) -> list[str]:
    """What lies in a folder, by name; nothing where it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def folders_inside(folder: Place) -> list[str]:
    """Return the names of the folders directly in a folder, without links that leave it."""
    names = []
    for name in names_in(folder):
        with suppress(LinkError):
            if inside(folder / name, folder).is_dir():
                names.append(name)
    return names


def files_in(folder: Place) -> list[str]:
    """The files directly in a folder, by name; nothing where it cannot be listed."""
    return [name for name in names_in(folder) if (folder / name).is_file()]


def inside(path: Place, within: Place) -> Place:
    """`path`, or what it is a link to; LinkError where that is not in `within`. A store has no links."""
    if in_store(path) or in_store(within):
        return path
    real = real_path(path, within)
    return Path(real) if path.is_symlink() else path


def copy_file(source: Place, target: Place) -> None:
    """Copy a file into a new one in chunks, on a disk fsynced; OSError if that fails."""
    if in_store(target):
        if in_store(source):
            source.copy_to(target)
        else:
            target.upload_file(source)
        return
    with os.fdopen(open_new(target), "wb") as written:
        if in_store(source):
            source.download(written.write)
        else:
            with os.fdopen(open_regular(source), "rb") as read:
                shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())


def sync(path: Path) -> None:
    """Fsync a file, or a folder, which makes its entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_folder(folder: Place, target: Path) -> None:
    """Copy every file below a folder into a new folder of a disk."""
    for name in files_below(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(folder / name, target / name)


def make_folder(folder: Place) -> None:
    """Make a folder with those above it; a store needs none."""
    if not in_store(folder):
        folder.mkdir(parents=True, exist_ok=True)


def put_folder(written: Path, folder: Place, *, last: str = "") -> None:
    """Move a local folder to a place, replacing what is there: by a rename, or in a store file by file.

    Args:
        last: the file that goes last, by whose presence a folder of a store is known to be whole.
    """
    if in_store(folder):
        for name in sorted(files_below(written), key=lambda name: (name == last, name)):
            (folder / name).upload_file(written / name)
        shutil.rmtree(written, ignore_errors=True)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    written.rename(folder)


def side_by_side(place: Place) -> int | None:
    """How many files to read at a time; None for as many as there are cores."""
    if not in_store(place):
        return None
    from portable.converters.storage.object_store import connections

    return connections()


def map_ahead(folder: Place, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function that reads a file to each item, as `map` does.

    In an object store, the function runs for several items at a time, because each request takes long. The
    number of results in memory is at most the number of connections.

    Args:
        folder: Place of the files.
        function: Function to apply. It must be thread-safe.
        items: Arguments of the function.

    Yields:
        The results, in the order of the items. If the function raises an error, the error is raised when the
        result is due.
    """
    if not in_store(folder):
        yield from map(function, items)
        return
    from portable.converters.storage.object_store import connections, in_thread, wait_for

    waiting = iter(items)
    running = deque(in_thread(partial(function, item)) for item in islice(waiting, connections()))
    while running:
        result = wait_for(running.popleft())
        running.extend(in_thread(partial(function, item)) for item in islice(waiting, 1))
        yield result


# -- folders that are whole or not ---------------------------------------------------------------------------


def unused_name(path: P) -> P:
    """The first of `path`, `path-2`, `path-3` ... that does not exist."""
    found, number = path, 1
    while is_taken(found):
        number += 1
        found = path.parent / f"{path.name}-{number}"
    return found


def is_taken(path: Place) -> bool:
    """Whether something has this name, be it a link to nothing."""
    return path.exists() if in_store(path) else os.path.lexists(path)


def is_unfinished(folder: Place) -> bool:
    """Whether the folder, in a store or copied from one, was begun and is not complete (yet)."""
    return (folder / INCOMPLETE).is_file() and not (folder / COMPLETE).is_file()


def is_left_over(folder: Place) -> bool:
    """Whether an interrupted write or deletion left this folder behind."""
    if in_store(folder):
        return is_unfinished(folder) and not (folder / DAMAGED).is_file()
    return folder.name.startswith(".") and folder.name.endswith(PARTIAL)


def set_aside(folder: P) -> P:
    """Keep a damaged folder, but make sure that it is no longer used.

    On a disk, the folder is renamed. In an object store, a marker is written into it.

    Returns:
        The new path of the folder, or the path of the marker.
    """
    if not in_store(folder):
        return move_folder(folder, unused_name(folder.parent / f"{folder.name}.damaged"))
    aside = folder / DAMAGED
    aside.write_bytes(b"")
    begin(folder)
    return aside


def move_folder(folder: P, target: P) -> P:
    """Rename a folder durably, in a store object by object; the new place."""
    if in_store(folder):
        for name in folder.objects():
            (folder / name).move_to(target / name)
        return target
    folder.rename(target)
    sync(folder.parent)
    return target


def remove_folder(folder: Place) -> None:
    """Delete a folder, which no longer counts from the first deletion on, and abort uploads left open."""
    if in_store(folder):
        from portable.converters.storage.object_store import abort_uploads

        abort_uploads(folder)
        if names := folder.objects():
            begin(folder)  # so that it no longer counts, and is found if the deletion is interrupted
            folder.remove([name for name in names if name not in (COMPLETE, INCOMPLETE)])
            folder.remove([INCOMPLETE])
        return
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.old{PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
