"""A folder of the cache that one process writes while others wait, and that appears complete."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Draft:
    """A folder that is being written; ``commit`` renames it."""

    def __init__(self, path: Path, final: Path) -> None:
        self.path = path
        self._final = final

    def commit(self) -> None:
        for file in self.path.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if self._final.exists():  # only a damaged folder is rewritten
            shutil.rmtree(self._final)
        self.path.rename(self._final)


@contextmanager
def locked_folder(final: Path) -> Iterator[Draft]:
    """Lock ``final`` and yield an empty folder beside it to write into.

    Raises:
        UserError: if the folder is not writable.
    """
    from filelock import FileLock

    draft = final.with_name(f"{final.name}.draft")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.with_name(f"{final.name}.lock")):
            shutil.rmtree(draft, ignore_errors=True)  # left by a killed writer
            draft.mkdir()
            try:
                yield Draft(draft, final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"data.cache_dir: cannot write in {final.parent} ({one_line(error)}); choose a writable folder"
        ) from error
