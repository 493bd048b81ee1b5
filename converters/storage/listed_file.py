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

    def __repr__(self) -> str:
        """Return a text that must never change, because digests of data contain it."""
        return f"Object(size={self.size_bytes!r}, version={self.version!r})"
