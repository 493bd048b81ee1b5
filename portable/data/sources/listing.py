"""Which files a name means, here or in an object store."""

from __future__ import annotations

import glob
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.storage.path_or_url import is_url, suggest_path
from portable.data.sources.compression import FORMATS, get_format
from portable.data.sources.documents import format_names
from portable.errors import MissingDataError, UserError, to_one_line
from portable.paths import check_link, convert_storage_errors, iter_regular_files, place_of

if TYPE_CHECKING:
    from portable.converters.storage.listed_file import Object
    from portable.converters.storage.path_or_url import Place


def find_folder(name: str, file: str) -> Place | None:
    """The folder that ``name`` means, here or in an object store, if ``file`` is in it."""
    if glob.has_magic(name) or (is_url(name) and get_format(name) in FORMATS):
        return None
    place = place_of("data.source", name)
    try:
        with convert_storage_errors("data.source"):
            return place if (place / file).is_file() else None
    except OSError:  # of an impossible name
        return None


def list_local_files(name: str) -> list[Path] | None:
    """Return the files that ``name`` matches, or ``None`` if it does not look like a local path.

    Raises:
        UserError: if there is no readable file, or the name is invalid.
    """
    try:
        if "\0" in name:
            raise ValueError("it contains a NUL character")
        return _match_local_files(name)
    except (OSError, ValueError, RuntimeError) as error:  # too long, not encodable, unknown user
        reason = to_one_line(getattr(error, "strerror", None) or error)
        shown = repr(name if len(name) <= 80 else f"{name[:77]}...")
        raise UserError(f"data.source: {shown}: invalid path ({reason}); check the path") from error


def _match_local_files(name: str) -> list[Path] | None:
    path = Path(name)
    if path.is_dir():
        files = sorted(
            file for file in iter_regular_files("data.source", path) if get_format(file) in FORMATS
        )
        if not files:
            raise UserError(
                f"data.source: {name} has no {format_names(FORMATS)} files; choose another folder"
            )
        return files
    if path.exists():
        files = [path]
    elif glob.has_magic(name):
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 (a pattern may be absolute)
        files = sorted(file for file in map(Path, matches) if file.is_file())
        fixed_parts = takewhile(lambda part: not glob.has_magic(part), path.parts)
        folder = Path(*fixed_parts)
        for file in files:
            check_link("data.source", file, folder)
        if not files:
            raise MissingDataError(f"data.source: no file matches {name}; check the path and the pattern")
    elif name.startswith((".", "/", "~")) or get_format(path) in FORMATS or name.count("/") > 1:
        raise MissingDataError(
            f"data.source: {name}: no such file or folder" + (suggest_path(path) or "; check the path")
        )
    else:
        return None
    for file in files:
        if get_format(file) not in FORMATS:
            raise UserError(
                f"data.source: {file}: cannot read this kind of file; use {format_names(FORMATS)}"
            )
    return files


def list_remote_files(url: str) -> dict[Place, Object]:
    """List the files of a URL: one file, those that match a pattern, or all readable files in a folder.

    Raises:
        UserError: if there is no readable file.
    """
    from portable.converters.storage.object_store import RemotePath, matching  # a run on a disk does without

    with convert_storage_errors("data.source"):
        path = RemotePath.of(url)
        objects: dict[Any, Object] = dict(matching(path))
        if not objects:
            objects = {
                path / name: stored_object
                for name, stored_object in path.objects().items()
                if get_format(name) in FORMATS and not any(part.startswith(".") for part in name.split("/"))
            }
    if not objects:
        raise UserError(
            f"data.source: there is no {format_names(FORMATS)} file at {url}; check the URL and the pattern"
        )
    for file in objects:
        if get_format(file) not in FORMATS:
            raise UserError(
                f"data.source: {file}: cannot read this kind of file; use {format_names(FORMATS)}"
            )
    return dict(sorted(objects.items(), key=lambda item: str(item[0])))
