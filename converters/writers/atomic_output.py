"""Outputs that appear atomically: by a rename on a disk, by a marker in an object store."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.config_and_tokenizer_files import list_companion_names
from portable.converters.errors import CommandError
from portable.converters.storage.folder_operations import copy_file, sync
from portable.converters.storage.output_file import BLOCK_BYTES, OutputFile, shares_blocks, write_file
from portable.converters.storage.path_or_url import in_store, is_within, resolve_links
from portable.converters.writers.replace_folder import (
    check_replaceable,
    create_temporary,
    recover_folder,
    release_lock,
    replace_folder,
)
from portable.converters.writers.writer_group import check_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from portable.converters.storage.byte_sources import FileSpan
    from portable.converters.storage.path_or_url import Place
    from portable.converters.writers.store_output import StoreOutput, StoreUploads


def check_output(
    out: Place,
    sources: Sequence[Place],
    *,
    overwrite: bool,
    single: bool = False,
    companions: Collection[str] = (),
) -> Place:
    """Check that writing the output cannot destroy the sources or files of other programs.

    Args:
        out: Folder or file to write.
        sources: Folders and files to read. The output must neither contain a source nor be inside a source.
        overwrite: Whether an existing output may be replaced.
        single: Whether the output is a file.
        companions: Names of further files that may be replaced.

    Returns:
        The absolute path of the output.

    Raises:
        CheckpointError: If writing the output could destroy files.
    """
    target = resolve_links(out)
    if not in_store(target):
        recover_folder(target)
    for source in sources:
        origin = resolve_links(source)
        if target == origin:
            raise CommandError(f"{out}: is the checkpoint itself; give another output folder")
        if is_within(target, origin):
            raise CommandError(f"{out}: lies inside {source}; give an output folder outside it")
        if is_within(origin, target):
            raise CommandError(f"{out}: contains {source}; give another output folder")
    if single:
        if not in_store(out) and out.is_symlink():
            raise CommandError(f"{out}: is a link; give the file that it points to")
        if out.exists() and not out.is_file():
            raise CommandError(f"{out}: is not a file")
        if out.exists() and not overwrite:
            raise CommandError(f"{out}: exists already; give another file or --overwrite")
    elif in_store(target):
        from portable.converters.writers.store_output import check_prefix

        check_prefix(target, overwrite=overwrite)
    elif not in_store(out):
        _check_folder(
            out, overwrite, {*companions, *(n for source in sources for n in list_companion_names(source))}
        )
    return target


def _check_folder(out: Path, overwrite: bool, companions: Collection[str]) -> None:
    if not os.path.lexists(str(out)):
        return
    target = out.resolve()
    if not overwrite:
        raise CommandError(f"{out}: exists already; give another folder or --overwrite")
    if out.is_symlink():
        raise CommandError(f"{out}: is a link; give the folder that it points to")
    if not target.is_dir():
        raise CommandError(f"{out}: is not a folder")
    if Path.cwd().is_relative_to(target) or Path.home().is_relative_to(target):
        raise CommandError(f"{out}: contains the current or the home folder and will not be replaced")
    check_replaceable(out, {entry.name + "/" * entry.is_dir() for entry in target.iterdir()}, companions)


class FolderOutput:
    """A temporary folder on a disk, which replaces the output in the end.

    Attributes:
        folder: where to read back what was written, after `commit`.
        threads: to write with; None for the number of CPUs.
    """

    threads: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folders = {folder}

    def create_file(self, name: str, lengths: Sequence[int]) -> OutputFile:
        """A new file of pieces of these lengths, written from any thread and in any order."""
        return OutputFile(self._get_path(name), lengths)

    def _get_path(self, name: str) -> Path:
        path = self.folder / name
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders |= {above for above in path.parents if above.is_relative_to(self.folder)}
        return path

    def commit(self) -> None:
        """Finish the files, after all their pieces; `write` and `copy` may follow."""

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check the files that several processes have written.

        Args:
            sizes: Size of each file in bytes, keyed by its name.

        Raises:
            CheckpointError: If a file is missing or has another size.
        """
        for name, size in sizes.items():
            path = self.folder / name
            check_size(path, size, path.stat().st_size if path.is_file() else None)

    def sync(self) -> None:
        """Make the entries of the folders durable."""
        for folder in self._folders:
            sync(folder)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        write_file(self._get_path(name), data)

    def copy(self, path: Place, name: str) -> None:
        """Copy a small file."""
        copy_file(path, self._get_path(name))


@contextmanager
def open_output(
    target: Place,
    *,
    needed: int,
    overwrite: bool,
    names: Collection[str] = (),
    facts: Mapping[str, Any] | None = None,
    single: bool = False,
    shared: bool = False,
    copied: Callable[[], Iterable[FileSpan]] = tuple,
) -> Iterator[FolderOutput | StoreOutput]:
    """An output that becomes `target` at the end of the block, and is removed after an exception.

    On a disk it is a temporary folder beside `target`. A killed process leaves `target` old or new, never
    partial; `check_output` removes its leftovers.

    Args:
        needed: bytes that will be written, on a disk checked against the free space first.
        names: of all files that will be written.
        facts: extra fields for the completion marker in an object store.
        single: `target` is the only one of those files.
        shared: whether other processes write into the same output, see `join_output`.
        copied: the spans of files that are copied unchanged; those whose blocks the file system shares need
            no space.

    Raises:
        CheckpointError: no space, no permission, or any other failure to write.
    """
    if in_store(target):
        from portable.converters.writers.store_output import StoreOutput

        store_output = StoreOutput(
            target, overwrite=overwrite, names=names, facts=facts or {}, single=single, shared=shared
        )
        try:
            yield store_output
            store_output.publish()
        finally:
            store_output.abort()
        return
    created = _make_parents(target.parent)
    temporary: Path | None = None
    lock: int | None = None
    try:
        free = shutil.disk_usage(target.parent).free
        if needed > free and needed - _count_shared_bytes(copied(), target.parent) > free:
            raise CommandError(f"{target}: needs {needed:,} bytes, {free:,} are free on its disk")
        temporary, lock = create_temporary(target)
        output = FolderOutput(temporary)
        yield output
        output.sync()
        _swap(temporary / next(iter(names)) if single else temporary, target, overwrite=overwrite)
        created = []
    except OSError as error:
        raise CommandError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        release_lock(lock)
        for folder in created:
            try:
                folder.rmdir()
            except OSError:
                break


@contextmanager
def join_output(target: Place, name: str) -> Iterator[FolderOutput | StoreUploads]:
    """An output that another process has created with `open_output`, to write further files into.

    Args:
        target: The output of the other process.
        name: Name of the folder that the other process writes into, beside `target`. Ignored in an object
            store.

    Raises:
        CheckpointError: If this process does not see the folder, or cannot write into it.
    """
    if in_store(target):
        from portable.converters.writers.store_output import StoreUploads

        uploads = StoreUploads(target)
        try:
            yield uploads
        finally:
            uploads.abort()
        return
    folder = target.parent / name
    try:
        yield FolderOutput(folder)
    except OSError as error:
        raise CommandError(f"{target}: cannot be written: {error.strerror or error}") from None


def _count_shared_bytes(spans: Iterable[FileSpan], folder: Path) -> int:
    """Bytes of the whole blocks of `spans` that a new file in `folder` shares, by a trial for each file."""
    tried: dict[object, bool] = {}
    total = 0
    for span in spans:
        path, blocks = span.file.path, span.nbytes // BLOCK_BYTES - 1
        if in_store(path) or blocks < 1:
            continue
        if path not in tried:
            tried[path] = shares_blocks(path, folder)
        total += blocks * BLOCK_BYTES * tried[path]
    return total


def _make_parents(folder: Path) -> list[Path]:
    """Create `folder`; returns the folders that were missing, innermost first."""
    missing = []
    current = folder
    while not current.exists():
        missing.append(current)
        current = current.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{folder}: cannot be created: {error.strerror or error}") from None
    return missing


def _swap(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if not target.exists() or (overwrite and temporary.is_file()):
        temporary.rename(target)
    elif not overwrite:
        raise CommandError(f"{target}: appeared while it was being written; nothing was replaced")
    else:
        replace_folder(temporary, target)
    sync(target.parent)
