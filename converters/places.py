"""A place that a person names: a path on this machine, or a URL of an object store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Union

from converters.remote import RemotePath, is_url
from converters.remote_errors import RemoteError, redact

_ALMOST_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(/|$)|(s3a?|gs|gcs|az|abfss?|hdfs):")

# Both answer to the same names for reading: exists, is_file, is_dir, iterdir, stat, read_text, `/` ...
Place = Union[Path, RemotePath]  # noqa: UP007


def place(named: str | Place) -> Place:
    """The place; RemoteError for a URL that cannot be one, or whose protocol's package is not installed."""
    if not isinstance(named, str):
        return named
    if is_url(named):
        return RemotePath.of(named)
    path = Path(named)
    # With a slash too few it would be a folder here, made under the name of the key that stands in it.
    if _ALMOST_URL.match(named) and not path.exists():
        scheme, _, rest = named.partition(":")
        told = redact(f"{scheme}://{rest.lstrip('/')}")
        raise RemoteError(f"{told}: is neither a path nor a URL as it was written; write it with two slashes")
    return path
