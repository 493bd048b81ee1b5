"""List the files that a path, pattern or URL in ``data.source`` selects."""

from __future__ import annotations

import glob
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.storage.path_or_url import format_path_suggestion, is_url
from portable.data.sources.compression import FILE_FORMATS, get_file_format
from portable.data.sources.documents import format_name_list
from portable.errors import MissingDataError, UserError, to_one_line
from portable.paths import (
    check_link_stays_inside,
    convert_storage_errors,
    iter_regular_files,
    parse_place_setting,
)

if TYPE_CHECKING:
    from portable.converters.storage.listed_file import ListedFile
    from portable.converters.storage.path_or_url import AnyPath


def find_folder_with_file(name: str, required_file: str) -> AnyPath | None:
    """Return the local or remote folder ``name`` if it contains the file ``required_file``.

    Args:
        name: Path or URL of the folder.
        required_file: Name of the file that the folder must contain.

    Returns:
        The folder. None if there is no such folder or file, or if the name is a pattern, an
        invalid path, or the URL of a data file.

    Raises:
        UserError: If the URL is not valid, or if the object store reports an error.
        RunError: If the object store cannot be reached after all retries.
    """
    if glob.has_magic(name) or (is_url(name) and get_file_format(name) in FILE_FORMATS):
        return None
    folder = parse_place_setting("data.source", name)
    try:
        with convert_storage_errors("data.source"):
            return folder if (folder / required_file).is_file() else None
    except OSError:  # the name is not a valid path
        return None


def list_local_files(name: str) -> list[Path] | None:
    """List the data files that a path or pattern matches.

    For a folder, lists the files with supported formats in the folder and its subfolders. Hidden
    files are skipped.

    Returns:
        Sorted files. None if ``name`` may be the name of a dataset on the Hub. Such a name does not
        exist as a path, has no wildcards and at most one slash, does not begin with ``.``, ``/`` or
        ``~``, and does not end with the suffix of a supported format.

    Raises:
        MissingDataError: If there is no such file or folder, or if a pattern matches no file.
        UserError: If the name is invalid, if a file has an unsupported format, if a folder has no
            supported files, or if a link leaves the folder.
    """
    try:
        if "\0" in name:
            raise ValueError("the path contains a NUL character")
        return _match_local_files(name)
    except (OSError, ValueError, RuntimeError) as error:
        # The name is too long, cannot be encoded, or begins with the home folder of an unknown user.
        reason = to_one_line(getattr(error, "strerror", None) or error)
        shown = repr(name if len(name) <= 80 else f"{name[:77]}...")
        raise UserError(f"data.source: {shown}: invalid path ({reason}); check the path") from error


def _match_local_files(name: str) -> list[Path] | None:
    """List the local files that a path or pattern matches. See :func:`list_local_files`.

    Returns:
        Sorted files. None if ``name`` may be the name of a dataset on the Hub.

    Raises:
        MissingDataError: If a path does not exist or a pattern does not match.
        UserError: If a folder has no supported files, if a file has an unsupported format, or if a
            link leaves the folder.
        OSError: If the operating system rejects the name, for example because it is too long. The
            caller must convert this error to a UserError.
    """
    path = Path(name)
    if path.is_dir():
        files = sorted(
            file for file in iter_regular_files("data.source", path) if get_file_format(file) in FILE_FORMATS
        )
        if not files:
            raise UserError(
                f"data.source: {name} has no {format_name_list(FILE_FORMATS)} files; choose another folder"
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
            check_link_stays_inside("data.source", file, folder)
        if not files:
            raise MissingDataError(f"data.source: no file matches {name}; check the path and the pattern")
    elif name.startswith((".", "/", "~")) or get_file_format(path) in FILE_FORMATS or name.count("/") > 1:
        raise MissingDataError(
            f"data.source: {name}: no such file or folder"
            + (format_path_suggestion(path) or "; check the path")
        )
    else:
        return None
    for file in files:
        if get_file_format(file) not in FILE_FORMATS:
            raise UserError(
                f"data.source: {file}: this kind of file is not supported; use "
                f"{format_name_list(FILE_FORMATS)}"
            )
    return files


def list_remote_files(url: str) -> dict[AnyPath, ListedFile]:
    """List the files in an object store that a URL selects.

    The URL may refer to a file or a folder, or contain wildcards. For a folder, the files in its
    subfolders are included. Hidden files and files with unsupported formats are skipped.

    Returns:
        Size and version of each file, keyed by URL and sorted by URL.

    Raises:
        UserError: If there is no such file, or if a file named in the URL or matched by the pattern
            has an unsupported format. Also raised if the URL is not valid, or if the store reports
            an error.
        RunError: If the store cannot be reached after all retries.
    """
    from portable.converters.storage.object_store import (  # not needed for local files
        RemotePath,
        find_matching_objects,
    )

    with convert_storage_errors("data.source"):
        path = RemotePath.from_url(url)
        objects: dict[Any, ListedFile] = dict(find_matching_objects(path))
        if not objects:
            objects = {
                path / name: stored_object
                for name, stored_object in path.list_objects().items()
                if get_file_format(name) in FILE_FORMATS
                and not any(part.startswith(".") for part in name.split("/"))
            }
    if not objects:
        raise UserError(
            f"data.source: there is no {format_name_list(FILE_FORMATS)} file at {url}; check the URL and the "
            "pattern"
        )
    for file in objects:
        if get_file_format(file) not in FILE_FORMATS:
            raise UserError(
                f"data.source: {file}: this kind of file is not supported; use "
                f"{format_name_list(FILE_FORMATS)}"
            )
    return dict(sorted(objects.items(), key=lambda item: str(item[0])))
