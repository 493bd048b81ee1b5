"""Local paths, URLs of object stores (``s3://bucket/run``), the cache folder; and writes that last.

Paths and URLs have the same interface for reading (``name``, ``/``, ``is_file``, ``iterdir``, ``read_text``).
What is written durably is on disk, contents and names, before a function returns.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError
from portable.converters.storage.folder_operations import sync
from portable.converters.storage.path_or_url import in_store, place
from portable.converters.storage.safe_open import (
    LinkError,
    open_new,
    open_regular,
    read_small,
    real_path,
    stays_inside,
)
from portable.converters.storage.store_errors import RemoteError, RetriesUsedUpError
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.storage.path_or_url import Place

CONFIG_FILE, FINAL, REPORT_FILE = "config.yaml", "final", "report.html"
"""In the folder of a run: its config, the folder of the exported model, and the report."""
__all__ = [
    "CONFIG_FILE",
    "FINAL",
    "REPORT_FILE",
    "check_folder",
    "check_link",
    "convert_storage_errors",
    "get_default_cache_dir",
    "iter_regular_files",
    "name_inside",
    "open_file",
    "place_of",
    "read_json",
]
_MOST_JSON = 1 << 30
_FLUSHES = 16
"""Files that are flushed at a time."""


def place_of(key: str, text: str) -> Place:
    """Return the path or URL that a setting names.

    Args:
        key: the setting, for error messages.
        text: its value.

    Raises:
        UserError: if the URL is invalid, contains credentials or needs a package that is not installed.
    """
    with convert_storage_errors(key):
        try:
            return place(text)
        except RemoteError:
            raise
        except CheckpointError as error:
            raise UserError(f"{key}: {error}") from error


def get_default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/portable-trainer``, or ``~/.cache/portable-trainer``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "portable-trainer"


@contextmanager
def convert_storage_errors(key: str) -> Iterator[None]:
    """Convert errors of an object store to errors of the setting ``key``.

    Raises:
        RunError: if all retries failed.
        UserError: for any other error of the store.
    """
    try:
        yield
    except RetriesUsedUpError as error:
        raise RunError(f"{key}: {error}") from error
    except RemoteError as error:
        raise UserError(f"{key}: {error}") from error


def path_exists(path: Place) -> bool:
    """Whether ``path`` exists. False for an invalid name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


# -- what a stranger may have written ------------------------------------------------------------------------


def open_file(path: Path, within: Path | None = None) -> io.FileIO:
    """Open a regular file for reading; a pipe or device is not waited for.

    Args:
        path: of the file.
        within: the folder that a link may not leave; None for a file that a person named, maybe by a link.

    Raises:
        OSError: it cannot be read, or is none.
    """
    try:
        real = os.path.realpath(path) if within is None else real_path(path, within)
    except LinkError as error:
        raise OSError(errno.ELOOP, str(error), str(path)) from None
    return io.FileIO(open_regular(real))


def read_json(path: Place) -> Any:
    """The values in a JSON file; a link may not leave its folder.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(read_small(path, limit=_MOST_JSON))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except LinkError as error:
        raise OSError(errno.ELOOP, str(error), str(path)) from None


def name_inside(name: object) -> str:
    """``name``, by which a file names another of its folder.

    Raises:
        ValueError: it is no relative path, leaves the folder or is a URL.
    """
    if not isinstance(name, str) or not name or "\0" in name or "://" in name or "::" in name:
        raise ValueError(f"{name!r} is no path inside the folder")
    if not stays_inside(name) or name.startswith("~"):
        raise ValueError(f"{name!r} leads out of the folder")
    return name


def iter_regular_files(key: str, folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, including linked subfolders, in no particular order.

    Args:
        key: Setting that names the folder, for messages.
        folder: Folder to search.
        hidden: Whether to include files and folders whose names begin with a dot.

    Raises:
        UserError: If a link leaves the folder, or if something is not a regular file.
    """
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:  # a link to where we were
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        files = [name for name in names if hidden or not name.startswith(".")]
        for path in (Path(here, name) for name in (*folders, *files)):
            if path.is_symlink():
                check_link(key, path, folder)
        for path in (Path(here, name) for name in files):
            if not path.exists():  # a link to nothing
                continue
            if not stat.S_ISREG(path.stat().st_mode):
                raise UserError(f"{key}: {path}: is not a regular file; remove it")
            yield path


MAX_FILES = 50_000
"""Most files of a model, tokenizer or adapter folder. More are a home folder, or a disk."""


def check_folder(key: str, folder: str, *, most: int | None = MAX_FILES) -> None:
    """Check that no link leaves a folder that other libraries read, and that all its files are regular.

    Hidden files are checked as well, because a library may open any name.

    Args:
        key: Setting that names the folder, for messages.
        folder: The folder. Nothing is checked if it does not exist.
        most: Number of files that the folder may have, or None if it may have any.

    Raises:
        UserError: If a link leaves the folder, if something is not a regular file, or if there are too many.
    """
    files = iter_regular_files(key, Path(folder), hidden=True) if path_exists(Path(folder)) else ()
    for number, _ in enumerate(files, start=1):
        if most is not None and number > most:
            raise UserError(
                f"{key}: {folder}: has more than {most} files; name the folder of the model alone"
            )


def check_link(key: str, path: Path, folder: Path) -> None:
    """Raise UserError, for the setting ``key``, if links on the way to ``path`` leave ``folder``."""
    try:
        real_path(path, folder)
    except LinkError as error:
        raise UserError(f"{key}: {error}") from error


_PARTIAL_SUFFIX = ".partial"


def write_durably(path: Place, text: str) -> None:
    """Replace the contents of ``path``, on a disk or in a store, by ``text``, atomically."""
    if in_store(path):
        path.write_bytes(text.encode())
        return
    partial = path.with_name(f".{path.name}{_PARTIAL_SUFFIX}")
    if os.path.lexists(partial):  # left by a killed process, or a link to another file
        partial.unlink()
    with os.fdopen(open_new(partial), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush all files below ``folder`` and their names. Cheap if they are on disk already."""
    # The files of thousands of ranks are flushed side by side, because a flush waits for the file system.
    with ThreadPoolExecutor(_FLUSHES) as pool:
        for path, _, names in os.walk(folder, topdown=False):
            for _ in pool.map(sync, [Path(path, name) for name in names]):
                pass
            sync_folder(Path(path))


def sync_folder(path: Path) -> None:
    """Flush the names in a folder. A no-op on Windows."""
    if os.name != "nt":
        sync(path)


def make_path_inside(root: Path, *names: str) -> Path:
    """The path ``names`` below ``root``, for a library that opens it by itself and follows links.

    Makes the folder around it and removes a link in its place.

    Raises:
        UserError: if a folder on the way is a link that leads out of ``root``.
    """
    path = root.joinpath(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        real_path(path.parent, root)
    except LinkError:
        raise UserError(f"output_dir: {path.parent} is a link that leads out of {root}; remove it") from None
    if path.is_symlink():
        path.unlink()
    return path
