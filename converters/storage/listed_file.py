"""Size and version of a listed file."""

from __future__ import annotations

from typing import NamedTuple


class ListedFile(NamedTuple):
    """File on a disk or object in a store, as it is listed.

    Attributes:
        size_bytes: Size in bytes.
        version: Text that changes with the content: the modification time of a file, or the ETag or version
            of an object. Empty if the path itself names a version.
    """

    size_bytes: int
    version: str
