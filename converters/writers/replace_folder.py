"""Replace folders atomically, and clean up after processes that were killed.

`renameat2` on Linux and `renamex_np` on macOS exchange two names, so that the target is a complete
folder at any time. If the file system does not support this, the old folder is renamed first. If
the process is killed before the second rename, the next process that writes to the same target
restores the old folder with `recover_replaced_folder`.

The temporary folders for the target `out` are hidden and next to it:

    .out.tmp-1234-a1b2c3   the new folder while it is written; the writer holds a lock on it
    .out.old-1234-a1b2c3   the old folder, which is restored if `out` is missing
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.config_and_tokenizer_files import COMPANION_NAMES
from portable.converters.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath

# Names of the files that the writers write, except companions. The name of a folder ends with `/`.
_WRITTEN_NAMES = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|adapter_config\.json"
    r"|optimizer\.(safetensors|json|pt)|pytorch_model\.bin|\.metadata|__\d+_\d+\.distcp|[^/]+\.gguf"
    r"|latest_universal|global_step\d+_universal/.*"
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Errors that mean that the kernel or the file system does not support the exchange.
_UNSUPPORTED_ERRNOS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def check_folder_replaceable(
    out: AnyPath, entry_names: Collection[str], replaceable_names: Collection[str] = ()
) -> None:
    """Check that a folder only contains files that a conversion may replace.

    These are files with the names of a conversion's outputs, such as `model.safetensors` or
    `config.json`, and the files in `replaceable_names`.

    Args:
        out: Folder to replace.
        entry_names: Names of the files and subfolders to check, relative to the folder. The names
            of subfolders end in `/`. The caller can omit entries that are known to be replaceable.
        replaceable_names: Names of additional files that may be replaced. If a name contains a
            slash, its top-level folder may be replaced too, including all other files in the
            folder.

    Raises:
        CommandError: If the folder contains other files.
    """
    replaceable = {
        *replaceable_names,
        *(f"{name.partition('/')[0]}/" for name in replaceable_names if "/" in name),
    }
    others = sorted(
        name
        for name in entry_names
        if not (_WRITTEN_NAMES.fullmatch(name) or COMPANION_NAMES.fullmatch(name) or name in replaceable)
    )
    if others:
        more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
        raise CommandError(
            f"{out}: contains files that no conversion has written ({', '.join(others[:3])}{more}), so the "
            "folder is not replaced; choose another folder"
        )


def exchange_paths(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders atomically.

    Args:
        first: Path of the first file or folder.
        second: Path of the second file or folder.

    Returns:
        True if the names were exchanged. False if the system does not support an exchange. In this
        case, nothing has changed.

    Raises:
        OSError: If a path does not exist or cannot be renamed.
    """
    import ctypes  # not at the top, because few conversions replace a folder

    libc: Any = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        call, args = getattr(libc, "renamex_np", None), (*names, ctypes.c_uint(_RENAME_EXCHANGE))
    else:
        call = getattr(libc, "renameat2", None)
        args = (_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    if call is None:
        return False
    if call(*args) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED_ERRNOS:
        return False
    raise OSError(number, os.strerror(number), str(second))


def build_temporary_path(target: Path, kind: str = "tmp") -> Path:
    """Build a new hidden path next to a target, with a name that `recover_replaced_folder` recognizes.

    Args:
        target: Path of the output.
        kind: `"tmp"` for a new folder, or `"old"` for a folder to be replaced.
    """
    return target.parent / f".{target.name}.{kind}-{os.getpid()}-{os.urandom(3).hex()}"


def move_into_place(new: Path, target: Path, old_path: Path) -> None:
    """Rename `new` to `target`, and an existing `target` to `old_path`.

    If the system can exchange two names atomically, `new` is first renamed to `old_path`, and then
    `old_path` and `target` are exchanged. `target` therefore always exists. Otherwise, `target` is
    renamed to `old_path`, and is missing until `new` has been renamed to `target`. If the process
    is killed before an exchange, the new content may remain at `old_path`. If the process is killed
    while `target` is missing, the new content is at `new` and the old content at `old_path`. For
    folders, `recover_replaced_folder` cleans up in both cases.

    Args:
        new: Path of the new file or folder.
        target: Path to replace. It need not exist.
        old_path: Unused path next to `target`.

    Raises:
        OSError: If renaming fails. `new` and `target` are then unchanged.
    """
    if not os.path.lexists(target):
        new.rename(target)
        return
    # Rename `new` first: `recover_replaced_folder` deletes the path of `new`, so this path must never be the
    # old folder.
    new.rename(old_path)
    try:
        if exchange_paths(old_path, target):
            return
    except BaseException:
        old_path.rename(new)
        raise
    old_path.rename(new)
    target.rename(old_path)
    try:
        new.rename(target)
    except BaseException:
        old_path.rename(target)
        raise


def replace_and_delete_folder(new: Path, target: Path) -> None:
    """Replace a folder with a new folder, and delete the old folder.

    Errors while deleting are ignored. `recover_replaced_folder` can delete the rest later.

    Args:
        new: Path of the new folder.
        target: Path of the folder to replace.

    Raises:
        OSError: If renaming fails. `target` is then unchanged.
    """
    old = build_temporary_path(target, "old")
    # Lock the folder, because otherwise another process could restore it while it is missing for a moment.
    lock = try_lock_folder(target)
    try:
        move_into_place(new, target, old)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        release_folder_lock(lock)


def try_lock_folder(folder: Path, *, waits: bool = False) -> int | None:
    """Try to lock a folder until this process ends or releases the lock.

    Args:
        folder: Folder to lock.
        waits: Whether to wait while another process holds the lock.

    Returns:
        A file descriptor that holds the lock. None if another process holds the lock and `waits` is
        False, if the folder cannot be opened, or if locks are not supported.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def release_folder_lock(lock: int | None) -> None:
    """Release a lock from `try_lock_folder`. Does nothing if the lock is None."""
    if lock is not None:
        os.close(lock)


class LockedFolder(NamedTuple):
    """New folder, and the lock that marks it as in use.

    Attributes:
        path: Path of the folder.
        lock: File descriptor that holds the lock. None if locks are not supported.
    """

    path: Path
    lock: int | None


def create_locked_folder(target: Path) -> LockedFolder:
    """Create an empty temporary folder next to a target, and lock it.

    Args:
        target: Path of the output.

    Returns:
        The folder and its lock.
    """
    while True:
        folder = build_temporary_path(target)
        folder.mkdir()
        # Wait, because another process that takes the folder for a leftover locks it before removing it.
        lock = try_lock_folder(folder, waits=True)
        if folder.exists():  # otherwise, another process removed it as a leftover before it was locked
            return LockedFolder(folder, lock)
        release_folder_lock(lock)


def recover_replaced_folder(target: Path) -> None:
    """Clean up after processes that were killed while writing or replacing a folder.

    If `target` is missing because its replacement was interrupted, the old folder is renamed back to
    `target`. All other temporary folders of killed processes are deleted. Folders locked by running
    processes are skipped. If locks are not supported, nothing is changed.

    Args:
        target: Path of the output folder, which may not exist.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-\d+-[0-9a-f]{{6}}")
    try:
        leftovers = [
            (entry, match[1]) for entry in target.parent.iterdir() if (match := pattern.fullmatch(entry.name))
        ]
    except OSError:
        return
    for folder, kind in sorted(leftovers, key=lambda each: each[1]):
        lock = try_lock_folder(folder)
        if lock is None:
            continue
        try:
            if kind == "old" and not os.path.lexists(target):
                with suppress(OSError):
                    folder.rename(target)
                continue
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            release_folder_lock(lock)
