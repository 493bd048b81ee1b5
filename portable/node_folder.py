"""Temporary folder that the ranks of a launch share on a node, for files that only one rank writes.

The folder name is derived from the parent process of the ranks, so ranks find it without a process
group.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import pickle
import shutil
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from portable.temporary_folder import get_lasting_folder

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX = "portable-node-"
_RECENT_SECONDS = 900.0
T = TypeVar("T")
_SHARED_PREFIX = "shared-"
"""Prefix of files that one rank writes and all ranks of the node read."""


def write_once_per_node(key: str, write_file: Callable[[Path], None]) -> Path | None:
    """Write a file in one process of this node, while the other processes of the launch wait.

    Args:
        key: Name of the content. If a process of this launch has written this content in the last
            15 minutes, the file is not written again.
        write_file: Function that writes the content to a path. If it raises an exception, the next
            waiting process calls the function. An OSError is not passed on to the caller, but
            makes the result None.

    Returns:
        Path of the file, which exists until :func:`remove_shared_files` is called. None if the file
        cannot be written, for example because the disk for temporary files is full.
    """
    try:
        path = get_node_folder() / f"{_SHARED_PREFIX}{hashlib.sha256(key.encode()).hexdigest()}"
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not is_recently_written(path):
                draft = path.with_suffix(".draft")
                try:
                    write_file(draft)
                    draft.replace(path)
                finally:
                    draft.unlink(missing_ok=True)
    except OSError:
        return None
    return path


def compute_once_per_node(key: str, compute: Callable[[], T]) -> T:
    """Compute a value on one rank of this node, and share it with the other ranks of the node.

    The other ranks wait, and then read the value from a temporary file. A process that is not a
    rank always computes the value itself.

    Args:
        key: Name of the value. If a rank of this launch has computed the value with this name in
            the last 15 minutes, that value is reused.
        compute: Function that returns a picklable value. If it raises an exception, this rank
            raises the exception, and the next waiting rank calls the function. If no file can be
            written for the result, every rank calls the function.

    Returns:
        The value.
    """
    if "LOCAL_RANK" not in os.environ:
        return compute()
    computed: list[T] = []

    def write(path: Path) -> None:
        computed.append(compute())
        path.write_bytes(pickle.dumps(computed[0]))

    path = write_once_per_node(key, write)
    if not computed and path is not None:
        with suppress(FileNotFoundError):  # another rank has failed, and has removed the file
            computed.append(pickle.loads(path.read_bytes()))  # noqa: S301 (written by this user's ranks)
    return computed[0] if computed else compute()


def is_recently_written(path: Path) -> bool:
    """Return whether a file was written in the last 15 minutes. Returns False if it does not exist.

    Callers check this before they reuse a file in the node folder, which the ranks on a node share.
    If one process, such as a notebook, starts several launches, all of them use the same folder. An
    older file may therefore be left over from an earlier launch, with outdated data.
    """
    try:
        return time.time() - path.stat().st_mtime < _RECENT_SECONDS
    except FileNotFoundError:
        return False


def remove_shared_files() -> None:
    """Remove all files of :func:`write_once_per_node` for this launch on this node.

    Lock files are kept, and errors are ignored. Processes that have already opened a file can still
    read it. A process that opens the file later does not find it.
    """
    with suppress(OSError):
        for path in get_node_folder().glob(f"{_SHARED_PREFIX}*"):
            if path.suffix != ".lock":
                path.unlink(missing_ok=True)


def get_node_folder() -> Path:
    """Return the folder of this launch on this node. The first call creates it.

    A launch is identified by its launcher process and by torchrun's restart count. If this process
    is a rank (the environment variable ``LOCAL_RANK`` is set), the launcher is the parent process.
    Otherwise, it is this process.

    Raises:
        OSError: If the folder cannot be created or belongs to another user.
    """
    is_rank = "LOCAL_RANK" in os.environ
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return _create_node_folder(os.getppid() if is_rank else os.getpid(), attempt, is_rank)


@cache
def _create_node_folder(launcher: int, attempt: str, is_rank: bool) -> Path:
    """Create the folder of a launch if it does not exist, and return its path.

    First, this function removes the folders of launches that have ended. A launch has ended if its
    launcher process has ended. Folders of other users are not removed. A launcher also removes its
    own folder at exit. A restart by torchrun counts as a new launch. The result is cached.

    Args:
        launcher: Process id of the launcher, which is the parent of all ranks on a node.
        attempt: Number of times that torchrun has restarted the ranks, as a string. Empty without
            torchrun.
        is_rank: Whether this process is a rank. If not, it is the launcher.

    Raises:
        PermissionError: If the folder belongs to another user or is a link.
    """
    launch = hashlib.sha256(f"{_read_process_start_time(launcher)} {attempt}".encode()).hexdigest()[:16]
    for other in get_lasting_folder().glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            if other.lstat().st_uid == os.getuid() and not _is_alive(int(other.name.split("-")[2])):
                shutil.rmtree(other, ignore_errors=True)
    folder = get_lasting_folder() / f"{_PREFIX}{launcher}-{launch}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder}: is a link or belongs to another user; remove the link or folder, or set TMPDIR "
            "to another folder"
        )
    if not is_rank:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read_process_start_time(pid: int) -> str:
    """Read the start time of a process, to distinguish processes that reuse a process id.

    Returns:
        The time in clock ticks since boot, as a string. Empty if it is unknown.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(pid: int) -> bool:
    """Return whether a process with this id exists, including processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
