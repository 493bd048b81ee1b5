"""Files as a stream: listed at the start, and read one after the other when they are needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from converters.storage.object_store import is_url
from converters.storage.path_or_url import without_file
from converters.storage.places import in_store
from portable.data.sources.compression import format_of, is_compressed
from portable.data.sources.documents import Document, Source
from portable.data.sources.file_parts import LinesBetween, RowGroupsBetween
from portable.data.sources.files import LocalFiles, local_files
from portable.data.sources.hub_files import files_of_folder, hub_files
from portable.data.sources.prepared import prepared_place, prepared_shards, prepared_tokenizer
from portable.data.sources.remote_files import RemoteFiles, remote_files
from portable.data.sources.shard import Shard
from portable.data.sources.sharded_tokens import ShardedTokens, pieces_of, saved_folder, sharded_tokens
from portable.data.sources.token_files import TokenFiles, names_tokens, token_files
from portable.errors import UserError
from portable.formatting import human_bytes, human_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from converters.storage.object_store import Object
    from converters.storage.path_or_url import Place
    from portable.data.sources.conversations import Format
    from portable.data.sources.documents import Fields

PART_BYTES = 16 << 20
"""Longer .jsonl and .parquet files are read in parts of this length, so that the first is soon there."""
_PARTS = 1 << 17
"""Parts of so large a stream are longer, up to four times, so that there are not many more than this."""
_IN_PARTS = {".jsonl": LinesBetween, ".parquet": RowGroupsBetween}


class StreamedFiles(Source):
    """Files that are read one at a time, and of which only the list is known beforehand."""

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        fields: Fields,
        tokenizer: Callable[[Path], Path] | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        """The folder of the tokenizer that made the tokens, if they are made; a copy in a cache."""
        self.shards = tuple(shards)
        self.downloads = self.shards[0].open(fields).downloads
        self.fields = fields
        self.bad = fields.bad

    @cached_property
    def key(self) -> str:
        """A digest of the names, lengths and versions of the files: nothing is read."""
        content = repr((self.fields.key, [shard.identity for shard in self.shards]))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def described(self) -> str:
        size = human_bytes(self.size_bytes)
        return f"{self.name} (a stream of {human_count(len(self.shards), 'part')}, {size})"

    @property
    def size_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def recognised(self, fields: Fields) -> Format:
        first = self.shards[0].open(self.fields)
        return first.recognised(fields) if first.tokenized else super().recognised(fields)

    def reading(self, fields: Fields) -> StreamedFiles:
        """The same files with other fields."""
        return StreamedFiles(self.name, self.shards, fields, self.tokenizer)

    def documents(self) -> Iterator[Document]:
        for shard in self.shards:
            yield from shard.open(self.fields).documents()

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for shard in self.shards:
            yield from shard.open(self.fields).rows()

    def check(self) -> None:
        first = self.shards[0].open(self.fields)
        if first.tokenized:
            first.check()
        elif not self.downloads:
            super().check()


def open_stream(
    source: str | Sequence[str] | None,
    fields: Fields,
    *,
    config_name: str | None = None,
    split: str | None = None,
    downloads: Path,
    digests: Path | None,
    remember: bool,
) -> StreamedFiles:
    """List the files that ``data.source`` names, without reading one.

    Raises:
        UserError: if there are none, or it names no files.
    """
    names = list(map(without_file, [source] if isinstance(source, str) else source or ()))
    shards: list[Shard] = []
    tokenizer = None
    files: list[tuple[Place, Object | None, int]] = []
    whole = _Whole(downloads, digests, remember)
    for name in names:
        if (prepared := prepared_place(name)) is not None:
            shards += prepared_shards(prepared)
            tokenizer = partial(prepared_tokenizer, prepared)
        elif (sharded := sharded_tokens(name)) is not None:
            for piece in pieces_of(sharded[1], name):
                opened = partial(whole.open_tokens, sharded[0], piece)
                shards.append(Shard(opened, repr(piece), int(piece["bytes"] or 0)))
        elif is_url(name):
            files += [(path, found, found.size) for path, found in remote_files(name).items()]
        elif names_tokens(name):
            files += [(path, None, path.stat().st_size) for path in token_files(name)]
        elif saved_folder(name, split or "train") is not None:
            raise UserError(f"data.stream: {name} was saved with save_to_disk; set it to false")
        elif (local := files_of_folder(name, config_name, split or "train") or local_files(name)) is not None:
            files += [(path, None, path.stat().st_size) for path in local]
        else:
            hub = hub_files(name, config_name, split or "train")
            files += [(path, found, found.size) for path, found in hub.items()]
    if shards and files:
        raise UserError(f"data.source: {names[0]}: shards of tokens stand alone; name no other files")
    if not shards and not files:
        raise UserError("data.stream: data.source names no files; set it to files, a pattern or a URL")
    part = min(max(PART_BYTES, sum(size for _, _, size in files) // _PARTS), 4 * PART_BYTES)
    for path, found, size in files:
        shards += _of_file(path, found, size, part, whole)
    return StreamedFiles(", ".join(names), shards, fields, tokenizer)


@dataclass(frozen=True)
class _Whole:
    """How files are opened that cannot be read from the middle."""

    downloads: Path
    digests: Path | None
    remember: bool

    def open(self, path: Place, found: Object | None, fields: Fields) -> Source:
        if in_store(path):
            assert found is not None
            return RemoteFiles(str(path), {path: found}, fields, None, self.downloads)
        if names_tokens(str(path)):
            return TokenFiles(str(path), [path], fields, self.digests, self.remember)
        return LocalFiles(str(path), [path], fields, None, self.digests, self.remember)

    def open_tokens(self, place: Place, piece: dict[str, Any], fields: Fields) -> ShardedTokens:
        return ShardedTokens(place, [piece], fields, self.digests, self.remember)


def _of_file(path: Place, found: Object | None, size: int, part: int, whole: _Whole) -> Iterator[Shard]:
    """The parts of a file, of ``part`` bytes; or the file."""
    kind = None if is_compressed(path) else _IN_PARTS.get(format_of(path))
    if kind is None:
        yield Shard(partial(whole.open, path, found), f"{path.name} {size}", size)
        return
    parts = max(1, -(-size // part))
    for number in range(parts):
        start, stop = size * number // parts, size * (number + 1) // parts
        opened = partial(kind, path, start, stop, found=found)
        yield Shard(opened, f"{path.name} {size} {start}", stop - start)
