"""Define `ListedFile`, the size and version of a file in a listing."""

from __future__ import annotations

from typing import NamedTuple


class ListedFile(NamedTuple):
    """Entry of a listing: a file on a disk, or an object in a store.

    Attributes:
        size_bytes: Size in bytes.
        version: String that changes with the content: the modification time of a file in
            nanoseconds, or the ETag of an object. If the store reports no ETag, this is the version
            or the modification time of the object. Empty if the path itself contains a version.
    """

    size_bytes: int
    version: str

    def __repr__(self) -> str:
        """Return the text `Object(size=..., version=...)`, whose format must never change.

        Digests of data are computed from this text. A different format, such as one with the name of
        this class, would change the digests.
        """
        return f"Object(size={self.size_bytes!r}, version={self.version!r})"
