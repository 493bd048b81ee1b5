"""Join the sources of a mixture into one, so that a single tokenizer can be trained on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.data.sources.documents import Document, compute_text_digest
from portable.data.sources.source import DataSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class InterleavedSource(DataSource):
    """Source that yields the documents of several sources in turn, until all have ended.

    It is used to train a tokenizer on all training sources. It has documents but no rows, so
    :meth:`iter_rows` yields nothing.

    Args:
        sources: Sources to interleave. The interleaved source has the settings of the first source.
    """

    def __init__(self, sources: Sequence[DataSource]) -> None:
        self._sources = tuple(sources)
        self.downloads_to_open = any(source.downloads_to_open for source in sources)
        self.downloads_to_read = any(source.downloads_to_read for source in sources)
        super().__init__(", ".join(source.name for source in sources), sources[0].settings)

    def compute_digest(self) -> str:
        """Compute a digest of the cache keys of all sources."""
        return compute_text_digest(repr([source.cache_key for source in self._sources]))

    @property
    def content_digests(self) -> frozenset[bytes]:
        """Digests of the contents of the local files of all sources."""
        return frozenset[bytes]().union(*(source.content_digests for source in self._sources))

    def iter_documents(self) -> Iterator[Document]:
        """Yield one document of each source in turn, until all sources are exhausted.

        A long document may be divided into pieces. Its pieces are yielded one after the other.
        """
        streams = [source.iter_documents() for source in self._sources]
        while streams:
            for stream in tuple(streams):
                for document in stream:
                    yield document
                    if document.is_last_piece:
                        break
                else:
                    streams.remove(stream)
