"""Parse and compare paths given by the user, which may be local paths or URLs of object stores."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Union

from portable.converters.errors import CheckpointError, redact_credentials
from portable.converters.similar_names import find_similar_names
from portable.converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from portable.converters.storage.object_store import RemotePath

    # Both types have exists, is_file, is_dir, iterdir, read_bytes, name, parent, and `/`.
    AnyPath = Union[Path, RemotePath]  # noqa: UP007

_URL = re.compile(r"(?!file:|local:)[a-z][a-z0-9+.:-]*://", re.IGNORECASE)

_ALMOST_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(/|$)|(s3a?|gs|gcs|az|abfss?|hdfs):")

_LOCAL_URL = re.compile(r"^(?:file|local)://(?=/)", re.IGNORECASE)

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def is_url(text: object) -> bool:
    """Return whether a value is a string that begins with a protocol, such as `s3://bucket/run`.

    Unsupported protocols, such as `https`, are included. `file` and `local` are not included, because
    these URLs are local paths.
    """
    return isinstance(text, str) and _URL.match(text) is not None


def is_in_store(path: AnyPath) -> TypeIs[RemotePath]:
    """Return whether a path is in an object store, which is the case unless it is a `Path`."""
    return not isinstance(path, Path)


def parse_path_or_url(path_or_url: str | AnyPath) -> AnyPath:
    """Parse a path or URL given by the user.

    `~` and environment variables are expanded as in a shell. `file:///folder` is a local path. The path
    or URL need not exist, and no request is sent.

    Args:
        path_or_url: String given by the user. A path object is returned unchanged.

    Raises:
        RemoteError: If the URL is invalid. Also if a string such as `s3:/bucket` is probably a URL with a
            missing slash, unless a local file with this name exists.
        CheckpointError: If the string contains an unknown environment variable or user name.
    """
    if not isinstance(path_or_url, str):
        return path_or_url
    path_or_url = expand_user_and_variables(path_or_url)
    if is_url(path_or_url):
        # Imported here, because a run with local paths does not need it.
        from portable.converters.storage.object_store import RemotePath

        return RemotePath.from_url(path_or_url)
    path_or_url = strip_file_scheme(path_or_url)
    # A typo such as `s3:/bucket` would otherwise create a local folder, whose name could contain a secret
    # key.
    if _ALMOST_URL.match(path_or_url) and not _path_exists(path_or_url):
        scheme, _, rest = path_or_url.partition(":")
        url = redact_credentials(f"{scheme}://{rest.lstrip('/')}")
        raise RemoteError(f"{scheme}: the colon must be followed by two slashes; write {url}")
    return Path(path_or_url)


def make_absolute(path: AnyPath) -> AnyPath:
    """Return the absolute path without resolving links. A URL is returned unchanged."""
    return path if is_in_store(path) else path.absolute()


def resolve_links(path: AnyPath) -> AnyPath:
    """Return the absolute path with all links resolved. A URL is returned unchanged."""
    return path if is_in_store(path) else path.resolve()


def is_within(path: AnyPath, folder: AnyPath) -> bool:
    """Return whether `path` equals `folder` or is below it.

    Only the names are compared. Links are not resolved, and relative paths do not become absolute,
    so both paths must have the same form. In an object store, buckets and keys are compared. A
    local path and a path in a store are never within each other.
    """
    if is_in_store(path) and is_in_store(folder):
        is_below = folder.key in ("", path.key) or path.key.startswith(f"{folder.key}/")
        return path.bucket == folder.bucket and is_below
    return not is_in_store(path) and not is_in_store(folder) and path.is_relative_to(folder)


def get_file_size(path: AnyPath) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: If the file does not exist.
    """
    return path.get_file_size() if is_in_store(path) else path.stat().st_size


_MAX_COMPARED_NAMES = 10_000
"""Maximum number of names in a folder that are compared with a misspelled name."""


def format_path_suggestion(path: AnyPath) -> str:
    """Return `"; did you mean X?"` for a missing path, or an empty string if no name is similar.

    X is the path in the same folder with the most similar name. For object stores, nothing is
    suggested.
    """
    if is_in_store(path):
        return ""
    folder = path.parent
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MAX_COMPARED_NAMES)]
    except (OSError, ValueError):
        return ""
    similar = find_similar_names(path.name, names)
    return f"; did you mean {folder / similar[0]}?" if similar else ""


def strip_file_scheme(text: str) -> str:
    """Convert a URL of the form `file:///path` or `local:///path` to a path.

    Percent escapes are not decoded. Other strings are returned unchanged.
    """
    return _LOCAL_URL.sub("", text, count=1)


def expand_user_and_variables(text: str) -> str:
    """Expand `~`, `~user`, `$VAR`, and `${VAR}` as a shell does for unquoted text.

    `~` is only expanded at the beginning. The path of an existing file or folder is returned
    unchanged.

    Raises:
        CheckpointError: If an environment variable or a user does not exist. Without this error, a
            folder named `~` or `${VAR}` would be created.
    """
    if ("~" not in text and "$" not in text) or _path_exists(text):
        return text

    def look_up_variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise CheckpointError(f"{text}: the environment variable {name} is not set; set {name}")
        return os.environ[name]

    full = _VARIABLE.sub(look_up_variable, text)
    if not full.startswith("~"):
        return full
    home = os.path.expanduser(full)  # noqa: PTH111  (a Path would collapse the slashes of a URL)
    if home.startswith("~"):
        user = home.partition("/")[0]
        raise CheckpointError(f"{text}: the home folder of {user} is unknown; write the full path")
    return home


def _path_exists(text: str) -> bool:
    try:
        return not is_url(text) and os.path.lexists(text)
    except ValueError:  # The path contains a null byte.
        return False
