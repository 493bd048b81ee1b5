"""Temporary folders that do not outlive a killed process for long: the next one removes them."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from converters.writers.replace_folder import hold, let_go

if TYPE_CHECKING:
    from collections.abc import Iterator


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
