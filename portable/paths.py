"""Handle local paths and URLs of object stores (``s3://bucket/run``), and write files durably.

Local paths and URLs have the same interface for reading (``name``, ``/``, ``is_file``, ``iterdir``,
``read_text``), so most functions accept both. A durable write returns only after the contents and
the file names are on disk.
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
from portable.converters.storage.folder_operations import fsync_path
from portable.converters.storage.path_or_url import is_in_store, parse_path_or_url
from portable.converters.storage.safe_open import (
    LinkError,
    is_safe_relative_path,
    open_new_file,
    open_regular_file,
    read_small_file,
    resolve_local_path_inside,
)
from portable.converters.storage.store_errors import RemoteError, RetriesExhaustedError
from portable.errors import RunError, UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.storage.path_or_url import AnyPath

CONFIG_FILE, FINAL_FOLDER, REPORT_FILE = "config.yaml", "final", "report.html"
"""Names inside the output folder of a run: its config, the folder of the exported model, and the report."""
__all__ = [
    "CONFIG_FILE",
    "FINAL_FOLDER",
    "REPORT_FILE",
    "check_folder_files",
    "check_link_stays_inside",
    "convert_checkpoint_errors",
    "convert_storage_errors",
    "get_default_cache_dir",
    "iter_regular_files",
    "open_file",
    "parse_place_setting",
    "read_json_file",
    "validate_relative_name",
]
_MAX_JSON_BYTES = 1 << 30
_NUM_FLUSH_THREADS = 16
"""Maximum number of files that :func:`sync_tree` flushes to disk in parallel."""


def parse_place_setting(key: str, text: str) -> AnyPath:
    """Convert the value of a setting to a local path or an object store URL.

    ``~`` and environment variables are expanded. ``file:///folder`` is a local path.

    Args:
        key: Name of the setting, used in error messages.
        text: Value of the setting.

    Raises:
        UserError: If the URL is not valid, contains credentials, or needs a package that is not
            installed. Also if the value contains an unknown environment variable or user name.
    """
    with convert_checkpoint_errors(key):
        return parse_path_or_url(text)


def get_default_cache_dir() -> Path:
    """Return the default cache folder, which may not exist yet.

    This is ``$XDG_CACHE_HOME/portable-trainer``, or ``~/.cache/portable-trainer`` if the variable is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "portable-trainer"


@contextmanager
def convert_storage_errors(key: str) -> Iterator[None]:
    """Convert errors of an object store within this context to a UserError or RunError.

    Args:
        key: Setting that contains the URL, used at the beginning of the error message.

    Raises:
        RunError: If all retries have failed.
        UserError: For any other error of the store.
    """
    try:
        yield
    except RetriesExhaustedError as error:
        raise RunError(f"{key}: {error}") from error
    except RemoteError as error:
        raise UserError(f"{key}: {error}") from error


@contextmanager
def convert_checkpoint_errors(key: str, error_type: type[UserError] = UserError) -> Iterator[None]:
    """Convert errors of a checkpoint, and errors of an object store, within this context.

    Use this context instead of ``except CheckpointError`` around any code that may read from an
    object store. RemoteError is a subclass of CheckpointError, but an error of the store says
    nothing about the checkpoint. :func:`convert_storage_errors` therefore converts it first.

    Args:
        key: Setting or flag that names the checkpoint, used at the beginning of the error message.
        error_type: Type of the exception for an error of the checkpoint.

    Raises:
        RunError: If all retries of a request to the object store have failed.
        UserError: For any other error of the store. For an error of the checkpoint, the exception
            has the type ``error_type``.
    """
    try:
        with convert_storage_errors(key):
            yield
    except CheckpointError as error:
        raise error_type(f"{key}: {to_one_line(error)}") from error


def path_exists(path: AnyPath) -> bool:
    """Return whether ``path`` exists.

    If the file system reports an error, returns False instead of raising an exception. For example,
    the path may be too long, contain a NUL character, or be in a folder that is not accessible.
    Errors of an object store are raised.
    """
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


# -- files that are not trusted ------------------------------------------------------------------------------


def open_file(path: Path, root_folder: Path | None = None) -> io.FileIO:
    """Open a regular file for reading. Does not block on pipes and devices.

    Args:
        path: Path of the file.
        root_folder: Folder that must contain the file after all symbolic links are followed. In a
            snapshot of the Hugging Face Hub cache, links to blobs of the same repository are also
            allowed. None to allow links to any folder. Pass None only if the user has specified the
            file.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or is not in an allowed folder.
    """
    try:
        real = os.path.realpath(path) if root_folder is None else resolve_local_path_inside(path, root_folder)
    except LinkError as error:
        raise OSError(errno.ELOOP, str(error), str(path)) from None
    return io.FileIO(open_regular_file(real))


def read_json_file(path: AnyPath) -> Any:
    """Read a JSON file of at most 1 GiB.

    If the file is a link, its target must be inside the file's folder. In a snapshot in the Hugging
    Face Hub cache, the target may also be a blob of the same repository.

    Raises:
        OSError: If the file cannot be read, is too large, or is not a regular file, or if it is a
            link to a target that is not allowed.
        ValueError: If the file is not JSON or is nested too deeply.
    """
    try:
        return json.loads(read_small_file(path, max_bytes=_MAX_JSON_BYTES))
    except RecursionError:
        raise ValueError("the JSON value is nested too deeply") from None
    except LinkError as error:
        raise OSError(errno.ELOOP, str(error), str(path)) from None


def validate_relative_name(name: object) -> str:
    """Check that ``name`` is a relative path that stays inside the folder to which it is appended.

    The name must not contain a component ``..``, ``://``, ``::``, a backslash, a NUL character or a
    surrogate, and must not begin with ``~``. Links are not checked.

    Returns:
        ``name``, unchanged.

    Raises:
        ValueError: If ``name`` is not a string, is empty, or is not an allowed relative path.
    """
    if not isinstance(name, str) or not name or "\0" in name or "://" in name or "::" in name:
        raise ValueError(f"{name!r} is not a path inside the folder")
    if not is_safe_relative_path(name) or name.startswith("~"):
        raise ValueError(f"{name!r} leads out of the folder, or contains a backslash or invalid character")
    return name


def iter_regular_files(key: str, folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, in no particular order.

    Linked subfolders are also searched. Broken links are skipped. Links must not leave the folder.
    In a snapshot in the Hugging Face Hub cache, however, they may point to blobs of the same
    repository.

    Args:
        key: Setting that specifies the folder, used in error messages.
        folder: Folder to search.
        hidden: Whether to include files and folders whose names begin with a dot.

    Raises:
        UserError: If a link has a target that is not allowed, or if an entry is neither a regular
            file nor a folder.
    """
    seen: set[str] = set()
    for folder_path, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(folder_path)
        if real in seen:  # a link to a folder that was already visited
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        files = [name for name in names if hidden or not name.startswith(".")]
        for path in (Path(folder_path, name) for name in (*folders, *files)):
            if path.is_symlink():
                check_link_stays_inside(key, path, folder)
        for path in (Path(folder_path, name) for name in files):
            if not path.exists():  # a broken link
                continue
            if not stat.S_ISREG(path.stat().st_mode):
                raise UserError(
                    f"{key}: {path}: is a pipe, socket or device, not a regular file; remove this entry from "
                    "the folder"
                )
            yield path


MAX_FILES = 50_000
"""Maximum number of files in the folder of a model, tokenizer or adapter.

A folder with more files was probably named by mistake, such as a home folder.
"""


def check_folder_files(key: str, folder: str, *, max_files: int | None = MAX_FILES) -> None:
    """Check that a folder contains only files and links that other libraries may read.

    Links must not point outside of the folder. In a snapshot in the Hugging Face Hub cache, they
    may also point to blobs of the same repository. Every entry must be a regular file or a folder.
    Hidden files are also checked, because a library may open files of any name.

    Args:
        key: Setting that specifies the folder, used in error messages.
        folder: The folder. Nothing is checked if it does not exist.
        max_files: Maximum number of files in the folder. None for no limit.

    Raises:
        UserError: If a link has a target that is not allowed, if an entry is neither a regular file
            nor a folder, or if there are too many files.
    """
    files = iter_regular_files(key, Path(folder), hidden=True) if path_exists(Path(folder)) else ()
    for number, _ in enumerate(files, start=1):
        if max_files is not None and number > max_files:
            raise UserError(
                f"{key}: {folder}: has more than {max_files:,} files; use a folder that contains only the "
                "files of the model, tokenizer or adapter"
            )


def check_link_stays_inside(key: str, path: Path, folder: Path) -> None:
    """Check that no link on the path to ``path`` leaves ``folder``.

    In a snapshot in the Hugging Face Hub cache, links to blobs of the same repository are also
    allowed.

    Args:
        key: Setting that specifies the folder, used in error messages.
        path: Path below ``folder``.
        folder: Folder that links must not leave.

    Raises:
        UserError: If a link has a target that is not allowed.
    """
    try:
        resolve_local_path_inside(path, folder)
    except LinkError as error:
        raise UserError(f"{key}: {error}") from error


_PARTIAL_SUFFIX = ".partial"


def write_durably(path: AnyPath, text: str) -> None:
    """Write a local file or an object in a store so that readers see either the old or the new contents.

    A local file is first written under a temporary name in the same folder, then synced to disk and
    renamed.

    Args:
        path: Path or URL.
        text: New contents.
    """
    if is_in_store(path):
        path.write_bytes(text.encode())
        return
    partial = path.with_name(f".{path.name}{_PARTIAL_SUFFIX}")
    if os.path.lexists(partial):  # left by a killed process, or a link to another file
        partial.unlink()
    with os.fdopen(open_new_file(partial), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush the contents and names of all files below ``folder`` to disk.

    The call is fast if all of them are already on disk.
    """
    # Flush in parallel, because each flush waits for the file system, and thousands of ranks write files.
    with ThreadPoolExecutor(_NUM_FLUSH_THREADS) as pool:
        for path, _, names in os.walk(folder, topdown=False):
            for _ in pool.map(fsync_path, [Path(path, name) for name in names]):
                pass
            sync_folder(Path(path))


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk, for example after a rename.

    The contents of the files are not flushed. Does nothing on Windows.
    """
    if os.name != "nt":
        fsync_path(path)


def prepare_path_inside(root: Path, *names: str) -> Path:
    """Build a path below ``root`` for a library that opens the path and follows symbolic links.

    Without this function, a link could lead the library to a file outside of ``root``. The parent
    folder of the path is created after all folders in the path have been checked. If the last
    component of the path is a link, this link is removed.

    Args:
        root: Folder that must contain the file.
        names: Components of the path below ``root``.

    Raises:
        UserError: If a parent folder is a link to a folder outside of ``root``.
    """
    path = root.joinpath(*names)
    folders = [folder for folder in reversed(path.parents) if folder.is_relative_to(root)]
    for folder in folders:  # before a folder is created, possibly through a link
        try:
            resolve_local_path_inside(folder, root)
        except LinkError:
            raise UserError(
                f"output_dir: {folder} is a link that leads out of {root}; remove the link"
            ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    return path
