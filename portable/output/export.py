"""Export the model to ``final/`` at the end of a run.

A new export replaces a previous export, but never deletes other files. For this purpose,
a marker in ``final`` lists the files of the export with their sizes and modification
times. If ``final`` contains any other or changed file, or is not a folder, it is renamed
to a name such as ``final.kept`` instead of being deleted. Two hidden folders exist
temporarily:

    .final.new        the new export while it is being written
    .final.replaced   the previous ``final`` until it is deleted or renamed

In an object store, the completion marker lists the objects of the export with their
versions. Other objects are moved one by one, because an object store cannot rename a
folder.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

from portable import converters
from portable.converters.errors import to_printable
from portable.converters.storage.folder_operations import find_unused_path
from portable.converters.storage.path_or_url import is_in_store
from portable.converters.writers.replace_folder import move_into_place, recover_replaced_folder
from portable.errors import UserError, to_one_line
from portable.optim.weight_average import AVERAGE_KEY
from portable.paths import convert_checkpoint_errors, sync_folder, write_durably
from portable.terminal import print_status, shows_run_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from portable.converters import Checkpoint, StoredAdapter
    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.writer_group import WriterGroup

EXPORT_MARKER_FILE = ".export.json"
EXPORT_FACT = "exported"
"""Key in a completion marker that identifies an export."""


def export_model(
    checkpoint: AnyPath,
    folder: AnyPath,
    *,
    is_adapter: bool = False,
    base: Checkpoint | None = None,
    quantized_like: Checkpoint | None = None,
    extra_files: Mapping[str, Path] | None = None,
    uses_average: bool = False,
    rename_to_published: Callable[[Checkpoint], tuple[Checkpoint, set[str]]] | None = None,
    group: WriterGroup | None = None,
) -> None:
    """Write a checkpoint of a run as safetensors, with its config and tokenizer.

    A previous export in the folder is replaced. Files that do not belong to that export are kept
    under another name, with a warning. If writing to a local folder fails, the previous export
    remains.

    Args:
        checkpoint: Folder or URL of the checkpoint.
        folder: Folder or URL of the export.
        is_adapter: Whether the run trained an adapter.
        base: Base model into which to merge the adapter. None to write the adapter in peft's
            format.
        quantized_like: Quantized model whose layout the export adopts. None to write the weights
            unquantized.
        extra_files: Further files to copy into the export, keyed by name.
        uses_average: Whether to export the moving average of the weights.
        rename_to_published: Function that converts a checkpoint to the tensor names and shapes of
            the published model. It is not used for adapters. It returns the converted checkpoint,
            and the names of the tensors that are identical to tensors of the base model. None to
            keep the names and shapes.
        group: Processes that call this function together. Each process writes some of the files.
            None if only this process writes.

    Raises:
        UserError: If the export cannot be written.
        RunError: If the object store is unavailable.
    """
    is_leader = group is None or group.number == 0
    models: list[Checkpoint | StoredAdapter] = []

    def open_models() -> str:
        if is_leader:
            converters.check_manifest(checkpoint)
            if is_in_store(folder):
                _move_foreign_objects(folder)
            else:
                recover_export(folder)
        models.append(
            _open_exported_model(
                checkpoint,
                is_adapter,
                base,
                quantized_like,
                extra_files or {},
                uses_average,
                rename_to_published,
            )
        )
        return ""

    try:
        with convert_checkpoint_errors("checkpoint.export"):
            if group is None:
                open_models()
            else:
                group.call_everywhere(open_models)
            options: dict[str, Any] = {"progress": is_leader and shows_run_progress_bars(), "group": group}
            if is_in_store(folder):
                facts = {EXPORT_FACT: checkpoint.name}
                _write_safetensors_or_adapter(models[0], folder, overwrite=True, facts=facts, **options)
                return
            new = _get_new_path(folder)
            _write_safetensors_or_adapter(models[0], new, **options)
            if is_leader:
                marker = {"checkpoint": checkpoint.name, "files": _list_file_versions(new)}
                write_durably(new / EXPORT_MARKER_FILE, json.dumps(marker, indent=1) + "\n")
                _replace_export(new, folder)
    except OSError as error:
        raise UserError(
            f"checkpoint.export: {folder}: cannot be written ({to_one_line(error)}); check the permissions "
            "and the free space of the folder"
        ) from error


def _open_exported_model(
    checkpoint: AnyPath,
    is_adapter: bool,
    base: Checkpoint | None,
    quantized_like: Checkpoint | None,
    extra_files: Mapping[str, Path],
    uses_average: bool,
    rename_to_published: Callable[[Checkpoint], tuple[Checkpoint, set[str]]] | None,
) -> Checkpoint | StoredAdapter:
    """Open the model or adapter to export, lazily. See :func:`export_model` for the arguments.

    Returns:
        An adapter if the run trained one and there is no base model to merge it into, otherwise a model.
    """
    opened = converters.open_checkpoint(checkpoint).with_companions(extra_files)
    if uses_average:
        opened = opened.with_state_as_weights(AVERAGE_KEY)
    adapter = converters.find_adapter(opened) if is_adapter else None
    if adapter is not None and base is None:
        return adapter
    model = opened
    untouched: set[str] = set()
    if adapter is not None and base is not None:
        model = converters.merge(adapter, base.with_companions(extra_files))
    elif rename_to_published is not None:
        model, untouched = rename_to_published(opened)
    if quantized_like is not None:
        model = converters.quantize_like_base(model, quantized_like, untouched=untouched)
    return model


def _write_safetensors_or_adapter(model: Checkpoint | StoredAdapter, out: AnyPath, **options: Any) -> None:
    write: Any = converters.write_safetensors
    if isinstance(model, converters.StoredAdapter):
        write = converters.write_adapter
    write(model, out, **options)


def recover_export(folder: Path) -> None:
    """Clean up after a killed export: delete temporary folders, and restore the previous export.

    If ``folder`` does not exist, the old folder ``.final.replaced`` is renamed to ``folder``.
    Otherwise, the old folder is deleted if it is an unmodified export. If it contains other or
    changed files, it is renamed with a warning. The caller must hold the lock of the run.

    Args:
        folder: Local folder of the export, such as ``final``.
    """
    new, replaced = _get_new_path(folder), _get_replaced_path(folder)
    if not os.path.lexists(folder) and os.path.lexists(replaced):
        replaced.rename(folder)
    _delete_export_or_move(replaced, folder)
    recover_replaced_folder(new)  # removes the temporary folder of the converter
    _delete_path(new)


def _get_new_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def _get_replaced_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _replace_export(new: Path, folder: Path) -> None:
    """Rename the folder ``new`` to ``folder``, atomically if the file system supports it.

    The previous ``folder`` is deleted if it is an unmodified export, otherwise it is renamed
    with a warning.
    """
    move_into_place(new, folder, _get_replaced_path(folder))
    sync_folder(folder.parent)
    _delete_export_or_move(_get_replaced_path(folder), folder)


def _move_foreign_objects(folder: RemotePath) -> None:
    """Move foreign objects from ``folder`` to another folder, and print a warning.

    The other folder has a name such as ``final.kept``. Foreign objects are objects that the last
    export did not write, or that were changed after this export. If the last export was killed, the
    objects that it was going to write are not foreign. Does nothing if there are no foreign
    objects.
    """
    from portable.converters.writers.store_output import list_content_objects, read_written_objects

    folder.clear_listings()
    # If an export was killed near its end, the marker lists its objects without versions.
    written = read_written_objects(folder, EXPORT_FACT)
    planned = {name for name, version in written.items() if version is None}
    objects = {name: version for name, version in list_content_objects(folder).items() if name not in planned}
    reasons = {name: _find_version_difference(name, version, written) for name, version in objects.items()}
    others = {name: reason for name, reason in sorted(reasons.items()) if reason is not None}
    if not others:
        return
    kept_folder = find_unused_path(folder.parent / f"{folder.name}.kept")
    for name in others:
        (folder / name).move_to(kept_folder / name)
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    reason = to_printable(f"{folder}: {next(iter(others.values()))}{more}")
    print_status(f"warning: {reason}; the changed content is now in {kept_folder}")


def _delete_export_or_move(old_folder: Path, folder: Path) -> None:
    """Delete ``old_folder`` if it is an unmodified export. Otherwise, rename it and print a warning.

    The folder is renamed if it was not written by an export, or if a file in it was added or
    changed after the export.

    Args:
        old_folder: Path of the previous content of ``folder``. If it does not exist, nothing
            happens.
        folder: Usual folder of the export, such as ``final``. ``old_folder`` is renamed to a
            similar name, such as ``final.kept``.
    """
    if not os.path.lexists(old_folder):
        return
    reason = _explain_foreign_content(old_folder)
    if reason is None:
        _delete_path(old_folder)
        return
    kept_folder = find_unused_path(folder.with_name(f"{folder.name}.kept"))
    old_folder.rename(kept_folder)
    sync_folder(folder.parent)
    print_status(f"warning: {to_printable(f'{folder}: {reason}')}; the old folder is now {kept_folder}")


def _explain_foreign_content(folder: Path) -> str | None:
    """Explain how a folder differs from an unmodified export, for example because a file was added.

    Returns:
        The first difference that is found, as a clause for a warning. None if all files in the
        folder are from the export and have not changed since.
    """
    if folder.is_symlink() or not folder.is_dir():
        return "the path was a link or a file, not an export"
    try:
        listed = json.loads((folder / EXPORT_MARKER_FILE).read_text("utf-8"))["files"]
        written = {str(name): tuple(values) for name, values in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"the folder had no valid {EXPORT_MARKER_FILE}, so it was not an export"
    for name, values in _list_file_versions(folder).items():
        if (reason := _find_version_difference(name, values, written)) is not None:
            return reason
    return None


def _find_version_difference(name: str, version: object, written: Mapping[str, object]) -> str | None:
    """Describe how a file has changed since an export, or that the export did not write it.

    Args:
        name: Name of the file.
        version: Value that identifies the file's current content, such as its size and modification
            time.
        written: Versions of the files that the export wrote, keyed by file name.

    Returns:
        The difference, as a clause for a warning, such as ``a.txt was changed after the export``.
        None if the export wrote this version of the file.
    """
    if written.get(name) == version:
        return None
    if name in written:
        return f"{name} was changed after the export"
    return f"{name} was not part of the export"


class _FileVersion(NamedTuple):
    """Size and modification time of a file, to detect later changes."""

    size_bytes: int
    mtime_ns: int


def _list_file_versions(folder: Path) -> dict[str, _FileVersion]:
    """Return the size and modification time of each file and symlink below a folder.

    The result is keyed by relative path. The file ``.export.json``, which marks a folder as an
    export, is omitted.
    """
    files: dict[str, _FileVersion] = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            status = path.lstat()
            files[path.relative_to(folder).as_posix()] = _FileVersion(status.st_size, status.st_mtime_ns)
    files.pop(EXPORT_MARKER_FILE, None)
    return files


def _delete_path(path: Any) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
