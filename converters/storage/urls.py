"""What is a URL of a store, and what is known of a file that is listed. Loads no store."""

from __future__ import annotations

import re
from typing import NamedTuple

_URL = re.compile(r"(?!file:|local:)[a-z][a-z0-9+.:-]*://", re.IGNORECASE)


class Object(NamedTuple):
    """A file or an object as it is listed.

    Attributes:
        size: in bytes.
        version: changes with the content: a file's time, the store's ETag or version; empty where the path
            names a version.
    """

    size: int
    version: str


def is_url(text: object) -> bool:
    """Whether `text` is a URL of a store (`s3://bucket/run`) rather than a path."""
    return isinstance(text, str) and _URL.match(text) is not None
