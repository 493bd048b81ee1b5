"""Size and version of a listed file."""

from __future__ import annotations

from typing import NamedTuple


class ListedFile(NamedTuple):
    """Listed file on a disk, or listed object in a store.

    Attributes:
        size_bytes: Size in bytes.
        version: String that changes with the content: the modification time of a file, or the ETag or
            version of an object. Empty if the path itself contains a version.
    """

    size_bytes: int
    version: str

    def __repr__(self) -> str:
        """Return a string whose format must never change, because digests of data contain it."""
        return f"Object(size={self.size_bytes!r}, version={self.version!r})"
