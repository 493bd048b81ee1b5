"""The sources of a mixture as one, for what is made from all of them: a trained tokenizer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from portable.data.sources.documents import Document, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Joined(Source):
    """The documents of several sources in turn, one of each, until all have ended."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.name = ", ".join(source.name for source in sources)
        self.remote = any(source.remote for source in sources)
        self.downloads = any(source.downloads for source in sources)

    @property
    def key(self) -> str:
        keys = [source.key for source in self._sources]
        return hashlib.blake2b(repr(keys).encode(), digest_size=16).hexdigest()

    @property
    def contents(self) -> frozenset[bytes]:
        return frozenset[bytes]().union(*(source.contents for source in self._sources))

    @property
    def size_bytes(self) -> int | None:
        sizes = [source.size_bytes for source in self._sources]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def documents(self) -> Iterator[Document]:
        left = [source.documents() for source in self._sources]
        while left:
            for stream in tuple(left):
                for document in stream:
                    yield document
                    if document.ends:
                        break
                else:
                    left.remove(stream)
