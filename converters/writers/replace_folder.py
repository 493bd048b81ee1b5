"""Replacing a folder by another of its name in one step, and mending what a killed process left halfway.

`renameat2` lets two names change places (Linux; macOS has `renamex_np`), so that at every moment one whole
folder bears the name. Where the file system cannot, the old one is set aside for a moment; the next process
that writes there puts it back (`recover`).

    .out.tmp-1234-a1b2c3   being written, or replaced already; the writer holds its lock
    .out.old-1234-a1b2c3   set aside, to be put back where `out` is missing
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_AT_FDCWD, _EXCHANGE = -100, 2
# The kernel, or the file system, does not know how.
_CANNOT = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(left: Path, right: Path) -> bool:
    """Let two paths change places, at once; False, and nothing done, where the system cannot.

    Raises:
        OSError: one is not there, or may not be renamed.
    """
    import ctypes  # not at the top: few conversions replace anything

    libc: Any = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(left), os.fsencode(right)
    if sys.platform == "darwin":
        call, args = getattr(libc, "renamex_np", None), (*names, ctypes.c_uint(_EXCHANGE))
    else:
        call = getattr(libc, "renameat2", None)
        args = (_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_EXCHANGE))
    if call is None:
        return False
    if call(*args) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(right))


def temporary_name(target: Path, kind: str = "tmp") -> Path:
    """A new name beside `target`, hidden, that `recover` knows."""
    return target.parent / f".{target.name}.{kind}-{os.getpid()}-{os.urandom(3).hex()}"


def swap(new: Path, target: Path, old: Path) -> None:
    """Put `new` in the place of `target`; what was there, if anything was, is called `old` from then on.

    A process that is killed meanwhile leaves `target` as it was or as it was to be. `old` may then be the new
    one; where the system cannot exchange, there is a moment in which `target` is missing, and `old` is it.

    Args:
        old: a name beside `target` that is free.

    Raises:
        OSError: it cannot be done; `new` and `target` are then as they were.
    """
    if not os.path.lexists(target):
        new.rename(target)
        return
    new.rename(old)  # before: what is deleted as `new` after a kill must never be what was there
    try:
        if exchange(old, target):
            return
    except BaseException:
        old.rename(new)
        raise
    old.rename(new)
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise


def replace_folder(new: Path, target: Path) -> None:
    """Put the folder `new` in the place of the folder `target`, which is removed.

    Raises:
        OSError: it cannot be done; `target` is then as it was.
    """
    old = temporary_name(target, "old")
    held = hold(target)  # or another process would put it back where it is missing for a moment
    try:
        swap(new, target, old)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        let_go(held)


def hold(folder: Path) -> int | None:
    """Lock a folder for this process, however it ends; None where another holds it or locks are unknown."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def let_go(held: int | None) -> None:
    """The opposite of `hold`."""
    if held is not None:
        os.close(held)


def new_temporary(target: Path) -> tuple[Path, int | None]:
    """A new empty folder beside `target`, and the lock on it, by which others see that it is in use."""
    while True:
        folder = temporary_name(target)
        folder.mkdir()
        held = hold(folder)
        if folder.exists():  # else another process found it before it was locked, and took it for a leftover
            return folder, held
        let_go(held)


def recover(target: Path) -> None:
    """Put `target` back where a killed process had set it aside, and remove what it left; nobody's else.

    What a living process writes is locked and stays, as does everything where locks are unknown.
    """
    named = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-\d+-[0-9a-f]{{6}}")
    try:
        found = [
            (entry, match[1]) for entry in target.parent.iterdir() if (match := named.fullmatch(entry.name))
        ]
    except OSError:
        return
    for folder, kind in sorted(found, key=lambda each: each[1]):
        held = hold(folder)
        if held is None:
            continue
        try:
            if kind == "old" and not os.path.lexists(target):
                with suppress(OSError):
                    folder.rename(target)
                continue
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            let_go(held)
