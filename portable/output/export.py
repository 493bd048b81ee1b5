"""The model at the end of a run: ``final/``, which replaces what an earlier export wrote, and nothing else.

A marker in the folder tells which files an export wrote there, each with its size and its time. A folder that
holds anything else, or is none, is set aside under another name before the new one takes its place.

    .final.new        being written
    .final.replaced   about to change places with final, or what was there; the old one as long as nobody says
                      that an export wrote all of it

In an object store the marker of completion tells it, with the objects' versions. What no export wrote is
moved aside there object by object, because there are no folders that could be renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from converters import CheckpointError, check_manifest, open_checkpoint, write_safetensors
from converters.errors import printable
from converters.storage.object_store import RemotePath
from converters.writers.remote_draft import Written, versions
from converters.writers.replace_folder import recover, swap
from portable.checkpoint.store import sync_folder, unused_name, write_durably
from portable.errors import UserError, one_line
from portable.paths import storage_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from portable.paths import Place

MARKER = ".export.json"
EXPORTED = "exported"
"""The fact by which an object store's marker of completion is that of an export."""


def export(checkpoint: Place, folder: Place) -> None:
    """Write ``checkpoint`` as plain safetensors with config and tokenizer into ``folder``."""
    try:
        with storage_errors("checkpoint.export"):
            check_manifest(checkpoint)
            if isinstance(folder, RemotePath):
                _keep_foreign(folder)
                facts = {EXPORTED: checkpoint.name}
                write_safetensors(open_checkpoint(checkpoint), folder, overwrite=True, facts=facts)
                return
            recover_export(folder)
            new = _new(folder)
            write_safetensors(open_checkpoint(checkpoint), new)
            told = {"checkpoint": checkpoint.name, "files": _files(new)}
            write_durably(new / MARKER, json.dumps(told, indent=1) + "\n")
            _put(new, folder)
    except CheckpointError as error:
        raise UserError(f"checkpoint.export: {error}") from error
    except OSError as error:
        raise UserError(f"checkpoint.export: {folder}: {one_line(error)}") from error


def recover_export(folder: Path) -> None:
    """Clear up, or restore, what an export into ``folder`` left that was killed; the run's lock is held."""
    new, replaced = _new(folder), _replaced(folder)
    if not os.path.lexists(folder) and os.path.lexists(replaced):
        replaced.rename(folder)
    _retire(replaced, folder)
    recover(new)  # what the converter was still writing
    _delete(new)


def _new(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _put(new: Path, folder: Path) -> None:
    """Have ``new`` be ``folder``, so that there is one at every moment where the system can do that."""
    swap(new, folder, _replaced(folder))
    sync_folder(folder.parent)
    _retire(_replaced(folder), folder)


def _keep_foreign(folder: RemotePath) -> None:
    """Move aside what no export has put into ``folder``, and say where it is."""
    folder.refresh()
    told = Written.of(folder)
    if EXPORTED not in told.facts:
        told = Written({}, {}, frozenset())
    there = versions(folder)
    # Of an export that was killed near its end, the names alone are known.
    reasons = {name: _alien(name, there[name], told.objects) for name in there.keys() - told.names}
    foreign = {name: reason for name, reason in sorted(reasons.items()) if reason is not None}
    if not foreign:
        return
    kept = unused_name(folder.with_name(f"{folder.name}.kept"))
    for name in foreign:
        (folder / name).move_to(kept / name)
    others = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
    reason = printable(f"{folder}: {next(iter(foreign.values()))}{others}")
    print(f"warning: {reason}, so it is kept in {kept}", file=sys.stderr)


def _retire(old: Path, folder: Path) -> None:
    """Delete what an export wrote; anything else is kept, and it is said where."""
    if not os.path.lexists(old):
        return
    foreign = _foreign(old)
    if foreign is None:
        _delete(old)
        return
    kept = unused_name(folder.with_name(f"{folder.name}.kept"))
    old.rename(kept)
    sync_folder(folder.parent)
    reason = printable(f"{folder}: {foreign}")
    print(f"warning: {reason}, so what was there is kept as {kept}", file=sys.stderr)


def _foreign(folder: Path) -> str | None:
    """Why not all of what has this name was written by an export; None where it was."""
    if folder.is_symlink() or not folder.is_dir():
        return "no export made it a link or a file"
    try:
        told = json.loads((folder / MARKER).read_text("utf-8"))["files"]
        written = {str(name): tuple(values) for name, values in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"no {MARKER} tells that an export wrote it"
    there = _files(folder)
    for name, values in there.items():
        if (reason := _alien(name, values, written)) is not None:
            return reason
    return None


def _alien(name: str, version: object, written: Mapping[str, object]) -> str | None:
    """Why a file is not what an export wrote; None where it is."""
    if written.get(name) == version:
        return None
    return f"{name} was {'changed' if name in written else 'put there'} by no export"


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of everything below ``folder`` but folders and the marker; of links, their own."""
    found: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            status = path.lstat()
            found[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns)
    found.pop(MARKER, None)
    return found


def _delete(path: Any) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
