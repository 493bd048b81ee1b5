"""Publish outputs atomically.

On a local disk, an output is written to a temporary path and then renamed. In an object store, a
completion marker shows that the output is complete.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.config_and_tokenizer_files import list_companion_names
from portable.converters.errors import CommandError, explain_os_error
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
    """Check that writing an output cannot destroy its sources, or files that other programs created.

    On a local disk, the remains of killed conversions to the same output are cleaned up first. An
    output folder that was being replaced is restored, and temporary folders are deleted. See
    `recover_replaced_folder`.

    Args:
        out: Path or URL of the folder or file to write.
        sources: Folders and files to read. The output must neither contain a source nor be inside a
            source.
        overwrite: Whether an existing output may be replaced.
        is_single_file: Whether the output is a file.
        replaceable_names: Names of additional files in the output folder that may be replaced.

    Returns:
        The absolute path of the output, with symbolic links resolved.

    Raises:
        CheckpointError: If writing the output could destroy files.
    """
    target = resolve_links(out)
    if not is_in_store(target):
        recover_replaced_folder(target)
    for source in sources:
        origin = resolve_links(source)
        if target == origin:
            raise CommandError(f"{out}: is the checkpoint itself; choose another output path")
        if is_within(target, origin):
            raise CommandError(
                f"{out}: is inside the checkpoint {source}; choose an output path outside of the checkpoint"
            )
        if is_within(origin, target):
            raise CommandError(f"{out}: contains the checkpoint {source}; choose another output path")
    if is_single_file:
        if not is_in_store(out) and out.is_symlink():
            raise CommandError(f"{out}: is a link; specify the file that it points to")
        if out.exists() and not out.is_file():
            raise CommandError(f"{out}: is not a file; choose another file")
        if out.exists() and not overwrite:
            raise CommandError(f"{out}: already exists; choose another file, or add --overwrite")
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
    """Check that an output folder on a local disk may be replaced, or does not exist.

    Args:
        out: Path of the output folder.
        overwrite: Whether an existing folder may be replaced.
        replaceable_names: Names of files that may be replaced, in addition to the files that the
            writers create.

    Raises:
        CheckpointError: If `out` exists and `overwrite` is False, if it is a symbolic link or not a
            folder, or if it contains the current folder, the home folder, or files that may not be
            replaced.
    """
    if not os.path.lexists(str(out)):
        return
    target = out.resolve()
    if not overwrite:
        raise CommandError(f"{out}: already exists; choose another folder, or add --overwrite")
    if out.is_symlink():
        raise CommandError(f"{out}: is a link; specify the folder that it points to")
    if not target.is_dir():
        raise CommandError(f"{out}: is not a folder; choose another folder")
    if Path.cwd().is_relative_to(target) or Path.home().is_relative_to(target):
        raise CommandError(
            f"{out}: contains the current folder or the home folder, so it is not replaced; choose another "
            "folder"
        )
    check_folder_replaceable(
        out, {entry.name + "/" * entry.is_dir() for entry in target.iterdir()}, replaceable_names
    )


class FolderOutput:
    """Output that is written to a temporary folder on a disk.

    The caller moves the folder to its final path once the output is complete.

    Args:
        folder: Path of the temporary folder. It must exist.

    Attributes:
        folder: Folder from which the written files can be read after `complete_files`.
        num_threads: Number of threads that write. If None, the number depends on whether the
            input checkpoint is stored on a disk or in an object store.
    """

    num_threads: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written_folders = {folder}

    def create_file(self, name: str, lengths: Sequence[int]) -> OutputFile:
        """Create a file whose pieces can be written from any thread, in any order.

        Args:
            name: Path of the file, relative to the output folder.
            lengths: Size of each piece in bytes.

        Returns:
            The file.
        """
        return OutputFile(self._get_path(name), lengths)

    def _get_path(self, name: str) -> Path:
        """Return the path of a file in the folder, and create its parent folders."""
        path = self.folder / name
        if path.parent not in self._written_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._written_folders |= {above for above in path.parents if above.is_relative_to(self.folder)}
        return path

    def complete_files(self) -> None:
        """Do nothing, because a file on disk is complete as soon as its pieces are written.

        Writers call this method after the tensor files and before the small files. The same method
        of `StoreOutput` makes the uploaded files visible.
        """

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check the sizes of files that several processes have written.

        Args:
            sizes: Expected size of each file in bytes, keyed by name.

        Raises:
            CheckpointError: If a file is missing or has a different size.
        """
        for name, size in sizes.items():
            path = self.folder / name
            check_written_size(path, size, path.stat().st_size if path.is_file() else None)

    def sync(self) -> None:
        """Flush the directory entries of the output folder and its subfolders to the disk.

        Without this flush, the written files could be lost in a power failure, although the content
        of each file has already been flushed.
        """
        for folder in self._written_folders:
            fsync_path(folder)

    def write_small_file(self, name: str, data: bytes) -> None:
        """Write a small file, creating its parent folders if necessary.

        Args:
            name: Path of the file, relative to the output folder.
            data: Content of the file.
        """
        write_new_file(self._get_path(name), data)

    def copy_small_file(self, path: AnyPath, name: str) -> None:
        """Copy a small file.

        Args:
            path: Path or URL of the file to copy.
            name: Path of the copy, relative to the output folder.
        """
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
    """Open an output that replaces `target` when the context ends. An exception discards the output.

    On a disk, the output is a temporary folder next to `target`. If the process is killed, `target` is
    either unchanged or completely replaced. The next call of `validate_output_path` removes the
    temporary folder.

    Args:
        target: Absolute path or URL of the output.
        needed_bytes: Size of the output in bytes. On a disk, it must not exceed the free space.
        overwrite: Whether an existing output may be replaced.
        file_names: Names of all files that will be written.
        marker_fields: Additional fields of the completion marker in an object store.
        is_single_file: Whether `target` is a single file instead of a folder.
        has_other_writers: Whether other processes write to the same output. See `join_atomic_output`.
        iter_copied_spans: Function that yields the file spans that are copied unchanged. It is only
            called if `needed_bytes` exceeds the free space. Spans need no space if the file system can
            share their blocks.

    Yields:
        The output to write to.

    Raises:
        CheckpointError: If there is too little space, or if the output cannot be written.
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
            raise CommandError(
                f"{target}: needs {needed_bytes:,} bytes, but only {free:,} bytes are free on the disk; free "
                "some space, or choose a folder on another disk"
            )
        temporary, lock = create_locked_folder(target)
        output = FolderOutput(temporary)
        yield output
        output.sync()
        _move_to_target(
            temporary / next(iter(file_names)) if is_single_file else temporary, target, overwrite=overwrite
        )
        created_parents = []
    except OSError as error:
        reason, remedy = explain_os_error(error)
        raise CommandError(f"{target}: cannot be written ({reason}); {remedy}") from None
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
    """Open an output that another process has created, and write more files to it.

    Args:
        target: Absolute path or URL of the output.
        temporary_name: Name of the temporary folder next to `target`, which the other process has
            created with `open_atomic_output`. Ignored in an object store.

    Yields:
        The output to write to.

    Raises:
        CheckpointError: If this process cannot access the folder or write to it.
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
        reason, remedy = explain_os_error(error)
        raise CommandError(f"{target}: cannot be written ({reason}); {remedy}") from None


def _count_shared_bytes(spans: Iterable[FileSpan], folder: Path) -> int:
    """Count the bytes of copied spans that need no space, because they share blocks with the source files.

    Only full blocks of `BLOCK_BYTES` are counted, and spans in an object store are ignored. For each
    source file, this function tests once whether the file system of `folder` can share its blocks.

    Args:
        spans: Spans of source files that are copied unchanged.
        folder: Existing folder on the file system of the output.
    """
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
    """Create a folder and its parents, and return the folders that were missing, innermost first.

    Raises:
        CommandError: If a folder cannot be created.
    """
    missing = []
    current = folder
    while not current.exists():
        missing.append(current)
        current = current.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason, remedy = explain_os_error(error)
        raise CommandError(f"{folder}: cannot be created ({reason}); {remedy}") from None
    return missing


def _move_to_target(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Rename the complete output to its final path.

    Args:
        temporary: Complete output file or folder, on the same file system as `target`.
        target: Final path of the output.
        overwrite: Whether an existing `target` may be replaced.

    Raises:
        CommandError: If `overwrite` is False and another program has created `target` while the output
            was being written.
    """
    if not target.exists() or (overwrite and temporary.is_file()):
        temporary.rename(target)
    elif not overwrite:
        raise CommandError(
            f"{target}: was created by another process during the conversion, and was not replaced; choose "
            "another folder"
        )
    else:
        replace_and_delete_folder(temporary, target)
    fsync_path(target.parent)
