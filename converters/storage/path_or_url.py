"""A place that a person names: a path on this machine, or a URL of an object store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Union

from converters.errors import CheckpointError
from converters.storage.object_store import RemotePath, is_url
from converters.storage.store_errors import RemoteError, redact

_ALMOST_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(/|$)|(s3a?|gs|gcs|az|abfss?|hdfs):")

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")

# Both answer to the same names for reading: exists, is_file, is_dir, iterdir, stat, read_text, `/` ...
Place = Union[Path, RemotePath]  # noqa: UP007


def place(named: str | Place) -> Place:
    """The place, `~` and `${VAR}` in it resolved as a shell does.

    Raises:
        RemoteError: a URL that cannot be one, or whose protocol's package is not installed.
        CheckpointError: an environment variable or a user that is not there.
    """
    if not isinstance(named, str):
        return named
    named = expanded(named)
    if is_url(named):
        return RemotePath.of(named)
    # With a slash too few it would be a folder here, made under the name of the key that stands in it.
    if _ALMOST_URL.match(named) and not _there(named):
        scheme, _, rest = named.partition(":")
        key = rest.lstrip("/")
        slashes = rest[: len(rest) - len(key)]
        told = redact(f"{scheme}://{key}").replace(
            "://", f":{slashes}", 1
        )  # as it was written, but for secrets
        raise RemoteError(f"{told}: is neither a path nor a URL; write a URL with two slashes (s3://...)")
    return Path(named)


def expanded(text: str) -> str:
    """`text` with `~`, `~user`, `$VAR` and `${VAR}` resolved, as a shell does with what is not quoted.

    A file that is there under the very name is meant by it.

    Raises:
        CheckpointError: an environment variable or a user that is not there. A folder called `~` or `${VAR}`
            is never what was meant.
    """
    if ("~" not in text and "$" not in text) or _there(text):
        return text

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise CheckpointError(f"{text}: the environment variable {name} is not set")
        return os.environ[name]

    full = _VARIABLE.sub(value, text)
    if not full.startswith("~"):
        return full
    home = os.path.expanduser(full)  # noqa: PTH111  (a Path would fold the slashes of what is no path)
    if home.startswith("~"):
        user = home.partition("/")[0]
        raise CheckpointError(f"{text}: the home folder of {user} is not known; write the whole path")
    return home


def _there(text: str) -> bool:
    try:
        return not is_url(text) and os.path.lexists(text)
    except ValueError:  # a null byte
        return False
