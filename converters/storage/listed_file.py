"""What is known of a file that is listed, on a disk or in a store."""

from __future__ import annotations

from typing import NamedTuple


class ListedFile(NamedTuple):
    """A file or an object as it is listed.

    Attributes:
        size_bytes: in bytes.
        version: changes with the content: a file's time, the store's ETag or version; empty where the path
            names a version.
    """

    size_bytes: int
    version: str
