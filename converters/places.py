"""A place that a person names: a path on this machine, or a URL of an object store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Union

from converters.errors import CheckpointError
from converters.remote import RemotePath, is_url

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")

# Both answer to the same names for reading: exists, is_file, is_dir, iterdir, stat, read_text, `/` ...
Place = Union[Path, RemotePath]  # noqa: UP007


def place(named: str | Place) -> Place:
    """The place, `~` and `${VAR}` in it resolved as a shell does.

    Raises:
        RemoteError: a URL that cannot be one, or whose protocol's package is not installed.
        CheckpointError: an environment variable or a user that is not there.
    """
    if isinstance(named, str):
        named = expanded(named)
        return RemotePath.of(named) if is_url(named) else Path(named)
    return named


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
