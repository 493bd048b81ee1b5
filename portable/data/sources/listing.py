"""Which files a name means, here or in an object store."""

from __future__ import annotations

import glob
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.storage.path_or_url import is_url, suggest_path
from portable.data.sources.compression import FORMATS, format_of
from portable.data.sources.documents import listed
from portable.errors import MissingDataError, UserError, one_line
from portable.paths import check_link, place_of, regular_files, storage_errors

if TYPE_CHECKING:
    from portable.converters.storage.listed import Object
    from portable.converters.storage.path_or_url import Place


def place_with(name: str, file: str) -> Place | None:
    """The folder that ``name`` means, here or in an object store, if ``file`` is in it."""
    if glob.has_magic(name) or (is_url(name) and format_of(name) in FORMATS):
        return None
    place = place_of("data.source", name)
    try:
        with storage_errors("data.source"):
            return place if (place / file).is_file() else None
    except OSError:  # of an impossible name
        return None


def local_files(name: str) -> list[Path] | None:
    """Return the files that ``name`` matches, or ``None`` if it does not look like a local path.

    Raises:
        UserError: if there is no readable file, or the name is invalid.
    """
    try:
        if "\0" in name:
            raise ValueError("it contains a NUL character")
        return _local_files(name)
    except (OSError, ValueError, RuntimeError) as error:  # too long, not encodable, unknown user
        reason = one_line(getattr(error, "strerror", None) or error)
        shown = repr(name if len(name) <= 80 else f"{name[:77]}...")
        raise UserError(f"data.source: {shown}: invalid path ({reason}); check the path") from error


def _local_files(name: str) -> list[Path] | None:
    path = Path(name)
    if path.is_dir():
        found = sorted(file for file in regular_files("data.source", path) if format_of(file) in FORMATS)
        if not found:
            raise UserError(f"data.source: {name} has no {listed(FORMATS)} files; choose another folder")
        return found
    if path.exists():
        found = [path]
    elif glob.has_magic(name):
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 (a pattern may be absolute)
        found = sorted(file for file in map(Path, matches) if file.is_file())
        fixed = takewhile(lambda part: not glob.has_magic(part), path.parts)
        folder = Path(*fixed)
        for file in found:
            check_link("data.source", file, folder)
        if not found:
            raise MissingDataError(f"data.source: no file matches {name}; check the path and the pattern")
    elif name.startswith((".", "/", "~")) or format_of(path) in FORMATS or name.count("/") > 1:
        raise MissingDataError(
            f"data.source: {name}: no such file or folder" + (suggest_path(path) or "; check the path")
        )
    else:
        return None
    for file in found:
        if format_of(file) not in FORMATS:
            raise UserError(f"data.source: {file}: cannot read this kind of file; use {listed(FORMATS)}")
    return found


def remote_files(url: str) -> dict[Place, Object]:
    """List the files of a URL: one file, those that match a pattern, or all readable files in a folder.

    Raises:
        UserError: if there is no readable file.
    """
    from portable.converters.storage.object_store import RemotePath, matching  # a run on a disk does without

    with storage_errors("data.source"):
        path = RemotePath.of(url)
        found: dict[Any, Object] = dict(matching(path))
        if not found:
            found = {
                path / name: found
                for name, found in path.objects().items()
                if format_of(name) in FORMATS and not any(part.startswith(".") for part in name.split("/"))
            }
    if not found:
        raise UserError(
            f"data.source: there is no {listed(FORMATS)} file at {url}; check the URL and the pattern"
        )
    for file in found:
        if format_of(file) not in FORMATS:
            raise UserError(f"data.source: {file}: cannot read this kind of file; use {listed(FORMATS)}")
    return dict(sorted(found.items(), key=lambda item: str(item[0])))
