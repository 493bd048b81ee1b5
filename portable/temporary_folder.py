"""Create temporary folders, and cache folders that one process writes while others wait.

If a process is killed, its temporary folder remains on disk until a later process removes it.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from portable.converters.writers.replace_folder import release_folder_lock, try_lock_folder
from portable.errors import RunError, UserError, to_one_line
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_LASTING_FOLDER_VARIABLE = "PORTABLE_LASTING_TMPDIR"
# Typical path of a data worker's socket below TMPDIR, and maximum length in bytes of the complete path of a
# socket. The limit is 104 bytes on macOS, so 100 leaves a margin.
_SOCKET_PATH, _MAX_SOCKET_PATH = "/t/pymp-12345678/listener-12345678", 100


def get_lasting_folder() -> Path:
    """Return the system's folder for temporary files, even within :func:`redirect_temporary_files`.

    Files in this folder outlive the run.
    """
    return Path(os.environ.get(_LASTING_FOLDER_VARIABLE) or tempfile.gettempdir())


def _get_user_name() -> str:
    """Return the user's name as it appears in the name of inductor's cache folder.

    If the user has no name, return the user id as text.
    """
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # the user id has no name
        return str(os.getuid())


@contextmanager
def redirect_temporary_files(folder: Path) -> Iterator[None]:
    """Make child processes create their temporary files below ``folder`` within this context.

    The environment variable ``TMPDIR`` is changed within this context. ``tempfile`` in this process
    still uses the usual folder, because it has cached the path.

    torch, DeepSpeed and ``multiprocessing`` leave temporary folders behind if their process is
    killed. The caller can remove them all by removing ``folder`` afterward. The cache of inductor
    and the folder that :func:`get_lasting_folder` returns are not redirected. Nothing is redirected
    if the path of ``folder`` is so long that sockets below it would exceed the system's limit on
    path length.

    Args:
        folder: Existing folder. The files are created in its subfolder ``t``, which must not exist
            yet.
    """
    if len(os.fsencode(folder)) + len(_SOCKET_PATH) > _MAX_SOCKET_PATH:
        yield
        return
    usual = tempfile.gettempdir()
    (folder / "t").mkdir()
    changes = {"TMPDIR": str(folder / "t")}
    if _LASTING_FOLDER_VARIABLE not in os.environ:
        changes[_LASTING_FOLDER_VARIABLE] = usual
    # Keep inductor's cache, because kernels take minutes to compile.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        changes["TORCHINDUCTOR_CACHE_DIR"] = str(Path(usual) / f"torchinductor_{_get_user_name()}")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def create_scratch_folder(name_prefix: str) -> Iterator[Path]:
    """Create a locked temporary folder for the duration of this context.

    First removes leftovers of killed processes: folders of this user with the same prefix that no
    process has locked. If the file system does not support locks, leftovers are not removed.

    Args:
        name_prefix: Prefix of the folder's name. Each purpose needs its own prefix.

    Yields:
        The empty folder. It is removed at the end of the context.
    """
    for leftover in Path(tempfile.gettempdir()).glob(f"{name_prefix}-*"):
        _remove_leftover(leftover)
    folder, lock = _create_locked_folder(name_prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        release_folder_lock(lock)


class LockedFolder(NamedTuple):
    """Temporary folder with a lock that marks it as in use."""

    folder: Path
    lock: int | None
    """File descriptor that holds the lock. None if the file system has no locks."""


def _create_locked_folder(kind: str) -> LockedFolder:
    """Create a temporary folder, and lock it so that other processes do not remove it as a leftover.

    Args:
        kind: Prefix of the folder's name.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        # Wait, because another process that takes the folder for a leftover locks it before removing it.
        lock = try_lock_folder(folder, waits=True)
        if folder.exists():  # another process may have removed it before it was locked
            return LockedFolder(folder, lock)
        release_folder_lock(lock)


def _remove_leftover(folder: Path) -> None:
    """Remove a folder that a killed process has left behind.

    Does nothing if the folder belongs to another user, is locked by a process, or no longer exists.
    Also does nothing if the path is not a folder, or if the file system does not support locks.
    """
    try:
        if folder.lstat().st_uid != os.getuid():
            return
    except FileNotFoundError:
        return
    if (lock := try_lock_folder(folder)) is None:  # in use, not a folder, or no locks on this file system
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        release_folder_lock(lock)


T = TypeVar("T")


def open_or_build_cache_folder(
    folder: Path,
    open_cached: Callable[[Path], T | None],
    write: Callable[[Path], object],
    *,
    resumes: bool = False,
    describe_defect: Callable[[], str] = lambda: "is damaged",
) -> T:
    """Open a cache folder. If it does not exist or is damaged, write it first.

    Any number of processes may call this function concurrently. One process writes, and the others
    wait. A warning is printed before a damaged folder is replaced.

    Args:
        folder: Folder of the cache.
        open_cached: Function that opens the folder and returns an object that represents its
            contents. Returns None if the folder does not exist or is damaged. It is called again
            after the process has waited for the lock, and after the folder is written.
        write: Function that writes the contents to a temporary folder, which is its argument. This
            folder then replaces ``folder``.
        resumes: Whether ``write`` can continue from the files of a killed process. If so, the
            temporary folder may already contain such files. Otherwise, it is empty.
        describe_defect: Function that describes why ``open_cached`` has returned None for an
            existing folder.

    Returns:
        The result of ``open_cached``.

    Raises:
        UserError: If the parent folder is not writable, or if ``write`` raises a UserError, an
            OSError or a NotImplementedError.
        RunError: If ``open_cached`` returns None right after the folder was written.
    """
    if (result := open_cached(folder)) is not None:
        return result
    with _lock_for_writing(folder, resumes=resumes) as draft:
        if (result := open_cached(folder)) is None:
            if folder.exists():
                print_status(f"warning: data.cache_dir: {folder}: {describe_defect()}; recreating the folder")
            write(draft)
            for file in draft.rglob("*"):
                if file.is_file():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
            result = open_cached(folder)
    if result is None:
        raise RunError(
            f"data.cache_dir: {folder}: was damaged right after it was written; choose a folder on another "
            "disk"
        )
    return result


@contextmanager
def _lock_for_writing(folder: Path, *, resumes: bool) -> Iterator[Path]:
    """Wait for the lock of a cache folder, and create a temporary folder next to it.

    Args:
        folder: Folder of the cache.
        resumes: Whether an interrupted write can be continued. If so, the temporary folder may
            already contain files of a killed process.

    Yields:
        The temporary folder, with the suffix ``.draft``. At the end of the context, it is removed
        if the caller has not renamed it. If ``resumes`` is True, it remains after an exception
        other than a UserError or an OSError, so that a later process can continue the write.

    Raises:
        UserError: If the temporary folder or the lock file cannot be written. An OSError or a
            NotImplementedError that is raised within the context is also converted to a UserError.
    """
    from filelock import FileLock

    draft = folder.with_name(f"{folder.name}.draft")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not resumes:
                shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(exist_ok=resumes)
            try:
                yield draft
            except BaseException as error:
                if not resumes or isinstance(error, UserError | OSError):
                    shutil.rmtree(draft, ignore_errors=True)
                raise
            # The draft still exists if the caller did not rename it, because another process wrote the folder
            # while this one waited.
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"data.cache_dir: cannot write to {folder.parent} ({to_one_line(error)}); choose a writable "
            "folder"
        ) from error
