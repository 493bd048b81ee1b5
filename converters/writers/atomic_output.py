"""Outputs that appear atomically: by a rename on a disk, by a marker in an object store."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.config_and_tokenizer_files import list_companion_names
from portable.converters.errors import CommandError
from portable.converters.storage.folder_operations import copy_file, fsync_path
from portable.converters.storage.output_file import BLOCK_BYTES, OutputFile, can_share_blocks, write_new_file
from portable.converters.storage.path_or_url import is_in_store, is_within, resolve_links
from portable.converters.writers.replace_folder import (
    check_folder_replaceable,
    create_locked_folder,
    recover_replaced_folder,
    release_folder_lock,
    replace_and_delete_folder,
)
from portable.converters.writers.writer_group import check_written_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from portable.converters.storage.byte_sources import FileSpan
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.store_output import StoreOutput, StoreUploads


def validate_output_path(
    out: AnyPath,
    sources: Sequence[AnyPath],
    *,
    overwrite: bool,
    is_single_file: bool = False,
    replaceable_names: Collection[str] = (),
) -> AnyPath:
    """Check that writing the output cannot destroy the sources or files of other programs.

    Args:
        out: Folder or file to write.
        sources: Folders and files to read. The output must neither contain a source nor be inside a source.
        overwrite: Whether an existing output may be replaced.
        is_single_file: Whether the output is a file.
        replaceable_names: Names of further files that may be replaced.

    Returns:
        The absolute path of the output.

    Raises:
        CheckpointError: If writing the output could destroy files.
    """
    target = resolve_links(out)
    if not is_in_store(target):
        recover_replaced_folder(target)
    for source in sources:
        origin = resolve_links(source)
        if target == origin:
            raise CommandError(f"{out}: is the checkpoint itself; give another output folder")
        if is_within(target, origin):
            raise CommandError(f"{out}: lies inside {source}; give an output folder outside it")
        if is_within(origin, target):
            raise CommandError(f"{out}: contains {source}; give another output folder")
    if is_single_file:
        if not is_in_store(out) and out.is_symlink():
            raise CommandError(f"{out}: is a link; give the file that it points to")
        if out.exists() and not out.is_file():
            raise CommandError(f"{out}: is not a file")
        if out.exists() and not overwrite:
            raise CommandError(f"{out}: exists already; give another file or --overwrite")
    elif is_in_store(target):
        from portable.converters.writers.store_output import check_store_output

        check_store_output(target, overwrite=overwrite)
    elif not is_in_store(out):
        _check_output_folder(
            out,
            overwrite,
            {*replaceable_names, *(n for source in sources for n in list_companion_names(source))},
        )
    return target


def _check_output_folder(out: Path, overwrite: bool, replaceable_names: Collection[str]) -> None:
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
    check_folder_replaceable(
        out, {entry.name + "/" * entry.is_dir() for entry in target.iterdir()}, replaceable_names
    )


class FolderOutput:
    """A temporary folder on a disk, which replaces the output in the end.

    Attributes:
        folder: where to read back what was written, after `complete_files`.
        num_threads: to write with; None for the number of CPUs.
    """

    num_threads: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written_folders = {folder}

    def create_file(self, name: str, lengths: Sequence[int]) -> OutputFile:
        """A new file of pieces of these lengths, written from any thread and in any order."""
        return OutputFile(self._get_path(name), lengths)

    def _get_path(self, name: str) -> Path:
        path = self.folder / name
        if path.parent not in self._written_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._written_folders |= {above for above in path.parents if above.is_relative_to(self.folder)}
        return path

    def complete_files(self) -> None:
        """Finish the files, after all their pieces; `write_small_file` and `copy_small_file` may follow."""

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check the files that several processes have written.

        Args:
            sizes: Size of each file in bytes, keyed by its name.

        Raises:
            CheckpointError: If a file is missing or has another size.
        """
        for name, size in sizes.items():
            path = self.folder / name
            check_written_size(path, size, path.stat().st_size if path.is_file() else None)

    def sync(self) -> None:
        """Make the entries of the folders durable."""
        for folder in self._written_folders:
            fsync_path(folder)

    def write_small_file(self, name: str, data: bytes) -> None:
        """Write a small file."""
        write_new_file(self._get_path(name), data)

    def copy_small_file(self, path: AnyPath, name: str) -> None:
        """Copy a small file."""
        copy_file(path, self._get_path(name))


@contextmanager
def open_atomic_output(
    target: AnyPath,
    *,
    needed_bytes: int,
    overwrite: bool,
    file_names: Collection[str] = (),
    marker_fields: Mapping[str, Any] | None = None,
    is_single_file: bool = False,
    has_other_writers: bool = False,
    iter_copied_spans: Callable[[], Iterable[FileSpan]] = tuple,
) -> Iterator[FolderOutput | StoreOutput]:
    """An output that becomes `target` at the end of the block, and is removed after an exception.

    On a disk it is a temporary folder beside `target`. A killed process leaves `target` old or new, never
    partial; `validate_output_path` removes its leftovers.

    Args:
        needed_bytes: bytes that will be written, on a disk checked against the free space first.
        file_names: of all files that will be written.
        marker_fields: extra fields for the completion marker in an object store.
        is_single_file: `target` is the only one of those files.
        has_other_writers: whether other processes write into the same output, see `join_atomic_output`.
        iter_copied_spans: the spans of files that are copied unchanged; those whose blocks the file system
        shares need
            no space.

    Raises:
        CheckpointError: no space, no permission, or any other failure to write.
    """
    if is_in_store(target):
        from portable.converters.writers.store_output import StoreOutput

        store_output = StoreOutput(
            target,
            overwrite=overwrite,
            names=file_names,
            facts=marker_fields or {},
            single=is_single_file,
            shared=has_other_writers,
        )
        try:
            yield store_output
            store_output.publish_folder()
        finally:
            store_output.abort_uploads()
        return
    created_parents = _create_missing_folders(target.parent)
    temporary: Path | None = None
    lock: int | None = None
    try:
        free = shutil.disk_usage(target.parent).free
        if (
            needed_bytes > free
            and needed_bytes - _count_shared_bytes(iter_copied_spans(), target.parent) > free
        ):
            raise CommandError(f"{target}: needs {needed_bytes:,} bytes, {free:,} are free on its disk")
        temporary, lock = create_locked_folder(target)
        output = FolderOutput(temporary)
        yield output
        output.sync()
        _move_to_target(
            temporary / next(iter(file_names)) if is_single_file else temporary, target, overwrite=overwrite
        )
        created_parents = []
    except OSError as error:
        raise CommandError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        release_folder_lock(lock)
        for folder in created_parents:
            try:
                folder.rmdir()
            except OSError:
                break


@contextmanager
def join_atomic_output(target: AnyPath, temporary_name: str) -> Iterator[FolderOutput | StoreUploads]:
    """An output that another process has created with `open_atomic_output`, to write further files into.

    Args:
        target: The output of the other process.
        temporary_name: Name of the folder that the other process writes into, beside `target`. Ignored in an
        object
            store.

    Raises:
        CheckpointError: If this process does not see the folder, or cannot write into it.
    """
    if is_in_store(target):
        from portable.converters.writers.store_output import StoreUploads

        uploads = StoreUploads(target)
        try:
            yield uploads
        finally:
            uploads.abort_uploads()
        return
    folder = target.parent / temporary_name
    try:
        yield FolderOutput(folder)
    except OSError as error:
        raise CommandError(f"{target}: cannot be written: {error.strerror or error}") from None


def _count_shared_bytes(spans: Iterable[FileSpan], folder: Path) -> int:
    """Bytes of the whole blocks of `spans` that a new file in `folder` shares, by a trial for each file."""
    shares_by_path: dict[object, bool] = {}
    total = 0
    for span in spans:
        path, num_whole_blocks = span.file.path, span.nbytes // BLOCK_BYTES - 1
        if is_in_store(path) or num_whole_blocks < 1:
            continue
        if path not in shares_by_path:
            shares_by_path[path] = can_share_blocks(path, folder)
        total += num_whole_blocks * BLOCK_BYTES * shares_by_path[path]
    return total


def _create_missing_folders(folder: Path) -> list[Path]:
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


def _move_to_target(temporary: Path, target: Path, *, overwrite: bool) -> None:
    if not target.exists() or (overwrite and temporary.is_file()):
        temporary.rename(target)
    elif not overwrite:
        raise CommandError(f"{target}: appeared while it was being written; nothing was replaced")
    else:
        replace_and_delete_folder(temporary, target)
    fsync_path(target.parent)
