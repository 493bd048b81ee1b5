"""An output folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_output(out: Path, sources: list[Path], *, overwrite: bool) -> Path:
    """The absolute output folder, or CheckpointError if writing there could harm what is there.

    Args:
        sources: folders and files that are read; the output may neither hold one nor lie in one.
    """
    target = out.resolve()
    for source in sources:
        origin = source.resolve()
        if target == origin:
            raise CheckpointError(f"{out}: is the checkpoint itself; give another output folder")
        if target.is_relative_to(origin):
            raise CheckpointError(f"{out}: lies inside {source}; give an output folder outside it")
        if origin.is_relative_to(target):
            raise CheckpointError(f"{out}: holds {source}; give another output folder")
    if os.path.lexists(out):
        if not overwrite:
            raise CheckpointError(f"{out}: exists already; give another folder or --overwrite")
        if not target.is_dir():
            raise CheckpointError(f"{out}: is not a folder")
        if Path.cwd().is_relative_to(target) or Path.home().is_relative_to(target):
            raise CheckpointError(f"{out}: holds the current or the home folder and will not be replaced")
    return target


@contextmanager
def new_folder(target: Path, *, needed: int, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well, else vanishes.

    Args:
        needed: bytes that will be written, held against the free space before anything is.

    Raises:
        CheckpointError: no space, no permission, or any other failure to write.
    """
    created = _make_parents(target.parent)
    temporary = target.parent / f".{target.name}.tmp-{os.getpid()}-{os.urandom(3).hex()}"
    try:
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise CheckpointError(f"{target}: needs {needed:,} bytes, {free:,} are free on its disk")
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        _swap(temporary, target, overwrite=overwrite)
        created = []
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in created:
            try:
                folder.rmdir()
            except OSError:
                break


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_parents(folder: Path) -> list[Path]:
    """Create `folder`; the folders that were missing, innermost first."""
    missing = []
    current = folder
    while not current.exists():
        missing.append(current)
        current = current.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be created: {error.strerror or error}") from None
    return missing


def _swap(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if not target.exists():
        temporary.rename(target)
    elif not overwrite:
        raise CheckpointError(f"{target}: appeared while it was being written; nothing was replaced")
    else:
        old = target.parent / f".{target.name}.old-{os.getpid()}-{os.urandom(3).hex()}"
        target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(target.parent)
