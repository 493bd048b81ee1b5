"""A place that a person names: a path on this machine, or a URL of an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Union

from converters.remote import RemotePath, is_url

# Both answer to the same names for reading: exists, is_file, is_dir, iterdir, stat, read_text, `/` ...
Place = Union[Path, RemotePath]  # noqa: UP007


def place(named: str | Place) -> Place:
    """The place; RemoteError for a URL that cannot be one, or whose protocol's package is not installed."""
    if isinstance(named, str):
        return RemotePath.of(named) if is_url(named) else Path(named)
    return named
