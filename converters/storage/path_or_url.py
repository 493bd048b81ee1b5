"""What a user gives as a path: a local path, or a URL of an object store."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Union

from portable.converters.errors import CheckpointError, redact_credentials
from portable.converters.similar_names import find_similar
from portable.converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from portable.converters.storage.object_store import RemotePath

    # Both have exists, is_file, is_dir, iterdir, read_bytes, name, parent and `/`.
    Place = Union[Path, RemotePath]  # noqa: UP007

_URL = re.compile(r"(?!file:|local:)[a-z][a-z0-9+.:-]*://", re.IGNORECASE)

_ALMOST_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(/|$)|(s3a?|gs|gcs|az|abfss?|hdfs):")

_LOCAL_URL = re.compile(r"^(?:file|local)://(?=/)", re.IGNORECASE)

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def is_url(text: object) -> bool:
    """Whether `text` is a URL of a store (`s3://bucket/run`) rather than a path."""
    return isinstance(text, str) and _URL.match(text) is not None


def in_store(place: Place) -> TypeIs[RemotePath]:
    """Whether a place is in an object store."""
    return not isinstance(place, Path)


def place(named: str | Place) -> Place:
    """The path or URL, with `~` and `${VAR}` expanded as in a shell; a path for `file:///folder`.

    Raises:
        RemoteError: not a valid URL.
        CheckpointError: an environment variable or a user in it does not exist.
    """
    if not isinstance(named, str):
        return named
    named = expanded(named)
    if is_url(named):
        from portable.converters.storage.object_store import RemotePath  # a run on a disk never loads it

        return RemotePath.of(named)
    named = without_file(named)
    # `s3:/bucket` would create a local folder, and its name could hold a secret key.
    if _ALMOST_URL.match(named) and not _exists(named):
        scheme, _, rest = named.partition(":")
        url = redact_credentials(f"{scheme}://{rest.lstrip('/')}")
        raise RemoteError(f"{url}: given without its two slashes; write the URL like this")
    return Path(named)


def make_absolute(path: Place) -> Place:
    """Return the path from the root of the disk, with its links. A URL does not change."""
    return path if in_store(path) else path.absolute()


def resolve_links(path: Place) -> Place:
    """Return the path from the root of the disk, without links. A URL does not change."""
    return path if in_store(path) else path.resolve()


def is_within(path: Place, folder: Place) -> bool:
    """Return whether a path is a folder or below the folder, by their names."""
    if in_store(path) and in_store(folder):
        is_below = folder.key in ("", path.key) or path.key.startswith(f"{folder.key}/")
        return path.bucket == folder.bucket and is_below
    return not in_store(path) and not in_store(folder) and path.is_relative_to(folder)


def file_size(path: Place) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: If there is no such file.
    """
    return path.file_size() if in_store(path) else path.stat().st_size


_MOST_NAMES = 10_000
"""Maximum number of names in a folder that are compared with a misspelled name."""


def suggest_path(path: Place) -> str:
    """Return `"; did you mean X?"` for a path that does not exist, or an empty string.

    X is the most similar name in the same folder. Nothing is suggested for object stores.
    """
    if in_store(path):
        return ""
    folder = path.parent
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES)]
    except (OSError, ValueError):
        return ""
    similar = find_similar(path.name, names)
    return f"; did you mean {folder / similar[0]}?" if similar else ""


def without_file(text: str) -> str:
    """The path that a URL `file:///path` means; other text unchanged."""
    return _LOCAL_URL.sub("", text, count=1)


def expanded(text: str) -> str:
    """`text` with `~`, `~user`, `$VAR` and `${VAR}` expanded, as a shell does with unquoted text.

    The name of an existing file is returned unchanged.

    Raises:
        CheckpointError: an environment variable or a user in it does not exist; a folder called `~` or
            `${VAR}` is never what was meant.
    """
    if ("~" not in text and "$" not in text) or _exists(text):
        return text

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise CheckpointError(f"{text}: the environment variable {name} is not set")
        return os.environ[name]

    full = _VARIABLE.sub(value, text)
    if not full.startswith("~"):
        return full
    home = os.path.expanduser(full)  # noqa: PTH111  (a Path would collapse the slashes of a URL)
    if home.startswith("~"):
        user = home.partition("/")[0]
        raise CheckpointError(f"{text}: the home folder of {user} is unknown; write the full path")
    return home


def _exists(text: str) -> bool:
    try:
        return not is_url(text) and os.path.lexists(text)
    except ValueError:  # a null byte
        return False
