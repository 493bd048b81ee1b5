"""Temporary folders. If a process is killed, the next one removes its folder."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from converters.writers.replace_folder import hold, let_go

if TYPE_CHECKING:
    from collections.abc import Iterator


_LASTING = "PORTABLE_LASTING_TMPDIR"
# The path of a data worker's socket, and the maximum length of a socket's path (104 bytes on macOS).
_SOCKET, _MAX_SOCKET_PATH = "/t/pymp-12345678/listener-12345678", 100


def lasting_folder() -> Path:
    """The folder for temporary files that outlive the run."""
    return Path(os.environ.get(_LASTING) or tempfile.gettempdir())


def _user() -> str:
    """The user's name as torch writes it."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Make child processes create their temporary files in ``folder``.

    torch, DeepSpeed and ``multiprocessing`` remove their temporary folders on exit, but not if they are
    killed. Caches stay in the usual folder. A no-op if ``folder`` is too long for the path of a socket.
    """
    if len(os.fsencode(folder)) + len(_SOCKET) > _MAX_SOCKET_PATH:
        yield
        return
    usual = tempfile.gettempdir()
    (folder / "t").mkdir()
    changes = {"TMPDIR": str(folder / "t")}
    if _LASTING not in os.environ:
        changes[_LASTING] = usual
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # kernels take minutes to compile
        changes["TORCHINDUCTOR_CACHE_DIR"] = str(Path(usual) / f"torchinductor_{_user()}")
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
def scratch_folder(kind: str) -> Iterator[Path]:
    """Create a temporary folder for this context, and lock it.

    First removes this user's unlocked folders of the same kind, which killed processes left.

    Args:
        kind: a unique prefix of the folder's name.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{kind}-*"):
        _remove_leftover(left)
    folder, held = _new(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        let_go(held)


def _new(kind: str) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        held = hold(folder)
        if folder.exists():  # another process may have removed it before it was locked
            return folder, held
        let_go(held)


def _remove_leftover(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.getuid():
            return
    except FileNotFoundError:
        return
    if (held := hold(folder)) is None:  # in use, not a folder, or no locks on this file system
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        let_go(held)
