"""The sources of a mixture as one, for what is made from all of them: a trained tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.data.sources.documents import Document, digest_of
from portable.data.sources.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Joined(Source):
    """The documents of several sources in turn, one of each, until all have ended."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self.remote = any(source.remote for source in sources)
        self.downloads = any(source.downloads for source in sources)
        super().__init__(", ".join(source.name for source in sources), sources[0].settings)

    def digest(self) -> str:
        return digest_of(repr([source.key for source in self._sources]))

    @property
    def contents(self) -> frozenset[bytes]:
        return frozenset[bytes]().union(*(source.contents for source in self._sources))

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
