"""Temporary folders that do not outlive a killed process for long: the next one removes them."""

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
# A data worker's socket, and the most bytes that a socket's path may have (104 on macOS).
_SOCKET, _MOST_OF_SOCKET = "/t/pymp-12345678/listener-12345678", 100


def lasting() -> Path:
    """The machine's folder for temporary files, for what has to outlive the run: see ``started_below``."""
    return Path(os.environ.get(_LASTING) or tempfile.gettempdir())


def _user() -> str:
    """The user's name, as torch writes it."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a number that the machine knows no name for
        return str(os.getuid())


@contextmanager
def started_below(folder: Path) -> Iterator[None]:
    """Have processes that are started meanwhile keep their temporary files in ``folder``, and go with it.

    torch, DeepSpeed and ``multiprocessing`` make folders of their own and remove them at their end, which a
    killed process has not. What is worth keeping, and paths that are too long for sockets, stay where they
    are.
    """
    if len(os.fsencode(folder)) + len(_SOCKET) > _MOST_OF_SOCKET:
        yield
        return
    usual = tempfile.gettempdir()
    (folder / "t").mkdir()
    changes = {"TMPDIR": str(folder / "t")}
    if _LASTING not in os.environ:
        changes[_LASTING] = usual
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # kernels that took minutes to compile
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
    """A new temporary folder, removed with what is in it when the block ends.

    This process holds its lock. What bears a name of the same kind, is this user's and is locked by nobody,
    a killed process left; that is removed first.

    Args:
        kind: the beginning of its name, which nobody else gives.
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
        if folder.exists():  # else another process found it before it was locked, and took it for a leftover
            return folder, held
        let_go(held)


def _remove_leftover(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.getuid():
            return
    except FileNotFoundError:
        return
    if (held := hold(folder)) is None:  # in use, no folder, or on a file system without locks
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        let_go(held)
