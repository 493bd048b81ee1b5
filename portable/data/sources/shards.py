"""Files as a stream: listed at the start, and read one after the other when they are needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from converters.storage.object_store import is_url
from portable.data.sources.documents import Document, Source, changed_meanwhile, read_rows
from portable.data.sources.files import LocalFiles, json_row, local_files
from portable.data.sources.remote_files import RemoteFiles, remote_files
from portable.data.sources.token_files import TokenFiles, names_tokens, token_files
from portable.errors import UserError, one_line
from portable.formatting import human_bytes, human_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from portable.data.sources.conversations import Format
    from portable.data.sources.documents import Fields

PART_BYTES = 64 << 20
"""Longer .jsonl files are read in parts of this length, so that the first is soon there."""


@dataclass(frozen=True)
class Shard:
    """A file or a part of one.

    Attributes:
        make: opens it anew, so that a change is seen.
        identity: what tells, without reading it, that it is the same on another machine.
        bytes: its length.
    """

    make: Callable[[], Source]
    identity: str
    bytes: int

    @property
    def source(self) -> Source:
        """Its documents, as they are now."""
        return self.make()


class StreamedFiles(Source):
    """Files that are read one at a time, and of which only the list is known beforehand."""

    def __init__(self, name: str, shards: Sequence[Shard], fields: Fields) -> None:
        self.name = name
        self.shards = tuple(shards)
        self.downloads = self.shards[0].source.downloads
        self._fields = fields
        self.bad = fields.bad

    @property
    def key(self) -> str:
        """A digest of the names, lengths and versions of the files: nothing is read."""
        content = repr(
            (
                self._fields,
                self._fields.format,
                self._fields.bad is None,
                [shard.identity for shard in self.shards],
            )
        )
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def described(self) -> str:
        size = human_bytes(self.size_bytes)
        return f"{self.name} (a stream of {human_count(len(self.shards), 'part')}, {size})"

    @property
    def size_bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def recognised(self, fields: Fields) -> Format:
        return self.shards[0].source.recognised(fields)

    def documents(self) -> Iterator[Document]:
        for shard in self.shards:
            yield from shard.source.documents()

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for shard in self.shards:
            yield from shard.source.rows()

    def check(self) -> None:
        self.shards[0].source.check()


def open_stream(
    source: str | Sequence[str] | None,
    fields: Fields,
    *,
    downloads: Path,
    digests: Path | None,
    remember: bool,
) -> StreamedFiles:
    """List the files that ``data.source`` names, without reading one.

    Raises:
        UserError: if there are none, or it names no files.
    """
    names = [source] if isinstance(source, str) else list(source or ())
    shards: list[Shard] = []
    for name in names:
        if is_url(name):
            for path, found in remote_files(name).items():
                own = partial(RemoteFiles, str(path), {path: found}, fields, None, downloads)
                shards.append(Shard(own, f"{path} {found.size} {found.version}", found.size))
            continue
        if names_tokens(name):
            for file in token_files(name):
                tokens = partial(TokenFiles, str(file), [file], fields)
                shards.append(Shard(tokens, f"{file.name} {file.stat().st_size}", file.stat().st_size))
            continue
        files = local_files(name)
        if files is None:
            raise UserError(
                f"data.stream: {name} is no file, pattern or URL; streaming reads files, such as the Parquet "
                "files of a hub dataset"
            )
        for file in files:
            shards.extend(_of_file(file, fields, digests, remember))
    if not shards:
        raise UserError("data.stream: data.source names no files; set it to files, a pattern or a URL")
    return StreamedFiles(", ".join(names), shards, fields)


def _of_file(file: Path, fields: Fields, digests: Path | None, remember: bool) -> Iterator[Shard]:
    size = file.stat().st_size
    if file.suffix.lower() != ".jsonl" or size <= PART_BYTES:
        whole = partial(LocalFiles, str(file), [file], fields, None, digests, remember)
        yield Shard(whole, f"{file.name} {size}", size)
        return
    parts = -(-size // PART_BYTES)
    for number in range(parts):
        start, stop = size * number // parts, size * (number + 1) // parts
        part = partial(LinesBetween, file, start, stop, fields)
        yield Shard(part, f"{file.name} {size} {start}", stop - start)


def _settings(fields: Fields) -> tuple[Any, ...]:
    """What changes the documents of a file."""
    return fields, fields.format, fields.columns, fields.bad is None


class LinesBetween(Source):
    """The lines of a .jsonl file that begin within ``[start, stop)``."""

    def __init__(self, path: Path, start: int, stop: int, fields: Fields) -> None:
        self.name = f"{path} from byte {start}"
        self._path = path
        self._start = start
        self._stop = stop
        self._fields = fields
        self.bad = fields.bad
        self._key: str | None = None

    @property
    def size_bytes(self) -> int:
        return self._stop - self._start

    @property
    def key(self) -> str:
        if self._key is None:
            self._key = self._digest(line for _, line in self._lines())
        return self._key

    def _digest(self, lines: Iterator[bytes]) -> str:
        digest = hashlib.blake2b(
            repr((self._fields, self._fields.format, self._fields.bad is None)).encode(), digest_size=16
        )
        for line in lines:
            digest.update(line)
        return digest.hexdigest()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._path.open("rb") as file:
                if self._start:
                    file.seek(self._start - 1)
                    file.readline()  # began in the part before, or is the end of its last line
                at = file.tell()
                while at < self._stop and (line := file.readline()):
                    yield at, line
                    at += len(line)
        except OSError as error:
            raise UserError(f"data.source: {self._path}: cannot read it: {one_line(error)}") from error

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for at, line in self._lines():
            where = f"{self._path}, byte {at}"
            if (row := json_row(line, where, self._fields.bad)) is not None:
                yield where, row

    def documents(self) -> Iterator[Document]:
        for where, row in self.rows():
            yield from read_rows(row, self._fields, where)

    def documents_of_key(self) -> Iterator[Document]:
        before = self.key
        yield from self.documents()
        self._key = None
        if self.key != before:
            raise changed_meanwhile(self._path)
