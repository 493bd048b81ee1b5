"""A folder of the cache that one process writes while others wait, and that appears complete."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from portable.errors import RunError, UserError, one_line
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")


def made_once(folder: Path, opened: Callable[[Path], T | None], write: Callable[[Path], object]) -> T:
    """What ``opened`` finds in ``folder``, which is written first if it finds nothing.

    Any number of processes may call this concurrently: one writes, the others wait.

    Args:
        folder: of the cache.
        opened: None for a folder that does not exist or is damaged.
        write: writes into an empty folder beside it, which then takes its place.

    Raises:
        UserError: if the folder is not writable, or of ``write``.
    """
    if (found := opened(folder)) is not None:
        return found
    with _locked(folder) as draft:
        if (found := opened(folder)) is None:
            if folder.exists():
                tell(f"warning: data.cache_dir: {folder}: damaged; making it again")
            write(draft)
            for file in draft.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
            found = opened(folder)
    if found is None:
        raise RunError(f"data.cache_dir: {folder}: damaged, just written; choose a folder on another disk")
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Lock ``folder`` and yield an empty folder beside it to write into."""
    from filelock import FileLock

    draft = folder.with_name(f"{folder.name}.draft")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            shutil.rmtree(draft, ignore_errors=True)  # left by a killed writer
            draft.mkdir()
            try:
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"data.cache_dir: cannot write in {folder.parent} ({one_line(error)}); choose a writable folder"
        ) from error
