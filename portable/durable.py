"""Durable writes: file contents and names are on disk before a function returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from converters.storage.places import in_store, sync
from converters.storage.safe_open import LinkError, open_new, real_path
from portable.errors import UserError

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place

_PARTIAL_SUFFIX = ".partial"


def write_durably(path: Place, text: str) -> None:
    """Replace the contents of ``path``, on a disk or in a store, by ``text``, atomically."""
    if in_store(path):
        path.write_bytes(text.encode())
        return
    partial = path.with_name(f".{path.name}{_PARTIAL_SUFFIX}")
    if os.path.lexists(partial):  # left by a killed process, or a link to another file
        partial.unlink()
    with os.fdopen(open_new(partial), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush all files below ``folder`` and their names. Cheap if they are on disk already."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(path, name))
        sync_folder(Path(path))


def sync_folder(path: Path) -> None:
    """Flush the names in a folder. A no-op on Windows."""
    if os.name != "nt":
        sync(path)


def own_path(root: Path, *names: str) -> Path:
    """The path ``names`` below ``root``, for a library that opens it by itself and follows links.

    Makes the folder around it and removes a link in its place.

    Raises:
        UserError: if a folder on the way is a link that leads out of ``root``.
    """
    path = root.joinpath(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        real_path(path.parent, root)
    except LinkError:
        raise UserError(f"output_dir: {path.parent} is a link that leads out of {root}; remove it") from None
    if path.is_symlink():
        path.unlink()
    return path
