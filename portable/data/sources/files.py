"""Local files: .txt, .jsonl and .json, also compressed, .csv and .parquet."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.storage.object_store import is_url
from portable.data.sources.compression import decompressed, format_of, is_compressed
from portable.data.sources.documents import (
    PIECE_CHARS,
    BadRecords,
    Document,
    Fields,
    Source,
    changed_meanwhile,
    listed,
    read_rows,
    text_only,
)
from portable.data.sources.library import csv_rows
from portable.data.sources.parquet_rows import parquet_file, rows_of
from portable.errors import MissingDataError, UserError, one_line
from portable.paths import check_link, open_file, place_of, regular_files, storage_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from converters.storage.path_or_url import Place

FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
_DIGEST_MEMO_FROM = 16 << 20  # bytes; smaller files are hashed at every start


def place_with(name: str, file: str) -> Place | None:
    """The folder that ``name`` means, here or in an object store, if ``file`` is in it."""
    if glob.has_magic(name) or (is_url(name) and format_of(name) in FORMATS):
        return None
    place = place_of("data.source", name)
    try:
        with storage_errors("data.source"):
            return place if (place / file).is_file() else None
    except OSError:  # of an impossible name
        return None


def local_files(name: str) -> list[Path] | None:
    """Return the files that ``name`` matches, or ``None`` if it does not look like a local path.

    Raises:
        UserError: if there is no readable file, or the name is invalid.
    """
    try:
        if "\0" in name:
            raise ValueError("it contains a NUL character")
        return _local_files(name)
    except (OSError, ValueError, RuntimeError) as error:  # too long, not encodable, unknown user
        reason = one_line(getattr(error, "strerror", None) or error)
        shown = repr(name if len(name) <= 80 else f"{name[:77]}...")
        raise UserError(f"data.source: {shown}: invalid path ({reason}); check the path") from error


def _local_files(name: str) -> list[Path] | None:
    path = Path(name)
    if path.is_dir():
        found = sorted(file for file in regular_files("data.source", path) if format_of(file) in FORMATS)
        if not found:
            raise UserError(f"data.source: {name} has no {listed(FORMATS)} files; choose another folder")
        return found
    if path.exists():
        found = [path]
    elif glob.has_magic(name):
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 (a pattern may be absolute)
        found = sorted(file for file in map(Path, matches) if file.is_file())
        fixed = takewhile(lambda part: not glob.has_magic(part), path.parts)
        folder = Path(*fixed)
        for file in found:
            check_link("data.source", file, folder)
        if not found:
            raise MissingDataError(f"data.source: no file matches {name}; check the path and the pattern")
    elif name.startswith((".", "/", "~")) or format_of(path) in FORMATS or name.count("/") > 1:
        raise MissingDataError(f"data.source: {name}: no such file or folder; check the path")
    else:
        return None
    for file in found:
        if format_of(file) not in FORMATS:
            raise UserError(f"data.source: {file}: cannot read this kind of file; use {listed(FORMATS)}")
    return found


class LocalFiles(Source):
    """Local files, read in order. ``Fields.text_split`` splits a ``.txt`` file; other formats have a document
    per row."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        fields: Fields | None = None,
        max_samples: int | None = None,
        digests: Path | None = None,
        remember: bool = True,
    ) -> None:
        self.name = name
        self._files = list(files)
        self._fields = fields = fields or Fields()
        self.bad = fields.bad
        self._max_samples = max_samples
        self._digests = digests
        self._remember = remember
        self._key: str | None = None
        self._known: dict[Path, bytes] = {}
        """The digests in the key."""
        for path in self._files:
            if format_of(path) == ".txt":
                text_only(fields, f"{path} and other .txt files")

    @property
    def key(self) -> str:
        if self._key is None:
            digest = hashlib.blake2b(repr(self._settings).encode(), digest_size=16)
            for path in self._files:
                found = self._known[path] = file_digest(path, self._digests, self._remember)
                kind = format_of(path) + (path.suffix.lower() if is_compressed(path) else "")
                digest.update(kind.encode() + b"\0" + found)
            self._key = digest.hexdigest()
        return self._key

    @property
    def contents(self) -> frozenset[bytes]:
        self.key  # noqa: B018  (computes the digests)
        return frozenset(self._known.values())

    @property
    def _settings(self) -> tuple[str, int | None]:
        """What decides the documents besides the files."""
        return self._fields.key, self._max_samples

    @property
    def size_bytes(self) -> int | None:
        if self._max_samples is not None or any(map(unknown_length, self._files)):
            return None
        with _reading(self.name):
            return sum(path.stat().st_size for path in self._files)

    def documents(self) -> Iterator[Document]:
        left = self._max_samples
        for path in self._files:
            if left == 0:
                return
            left = yield from self._documents_of(self._local(path), str(path), left, _open)

    def documents_of_key(self) -> Iterator[Document]:
        """Files are hashed while they are read; those that the library reads are hashed again afterwards."""
        self.key  # noqa: B018  (computes the digests to compare with)
        left = self._max_samples
        for path in self._files:
            if left == 0:
                return
            opened: list[_Hashed] = []

            def hashed(path: Path, opened: list[_Hashed] = opened) -> io.BufferedReader:
                opened.append(_Hashed(path))
                return io.BufferedReader(opened[0], buffer_size=1 << 20)

            refusal = None
            try:
                left = yield from self._documents_of(path, str(path), left, hashed)
            except UserError as error:  # may be an incomplete line of a file that is being written
                refusal = error
            read = opened[0].digest_to_the_end() if opened else file_digest(path, None, remember=False)
            if read != self._known[path]:
                if self._digests is not None and self._remember:
                    _forget(path, self._digests)
                raise changed_meanwhile(path) from refusal
            if refusal is not None:
                raise refusal

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self._files:
            if format_of(path) == ".txt":
                return
            yield from _rows(self._local(path), str(path), _open, self._fields)

    def _documents_of(
        self, path: Path, name: str, left: int | None, opening: _Opening
    ) -> Generator[Document, None, int | None]:
        """Yield the documents of a file, at most ``left``; return the rest of ``left``.

        Args:
            name: of the file, for error messages.
        """
        if format_of(path) == ".txt":
            split = self._fields.text_split
            with _reading(name):
                file = decompressed(opening(path), path)
            texts = _text_file(file, name) if split == "file" else _pieces_of_text(file, name, split)
            for text in texts:
                yield text
                if split != "file" and text.ends and left is not None:
                    left -= 1
                    if left == 0:
                        return left
            return left - 1 if split == "file" and left is not None else left
        for where, row in islice(_rows(path, name, opening, self._fields), left):
            left = None if left is None else left - 1
            yield from read_rows(row, self._fields, where)
        return left

    def _local(self, path: Path) -> Path:
        """The local path of a file."""
        return path


_Opening = Callable[["Path"], io.BufferedReader]


def _open(path: Path) -> io.BufferedReader:
    return io.BufferedReader(open_file(path), 1 << 20)


class _Hashed(io.RawIOBase):
    """A file that is hashed while it is read sequentially."""

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        self._hash = hashlib.blake2b(digest_size=16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        count = self._file.readinto(view) or 0
        self._hash.update(view[:count])
        return count

    def close(self) -> None:
        """A no-op: the rest of the file must be hashed, too."""

    def digest_to_the_end(self) -> bytes:
        """Hash the rest of the file, close it and return the digest."""
        buffer = bytearray(1 << 20)
        with self._file:
            while self.readinto(buffer):
                pass
        return self._hash.digest()


def _memo_file(path: Path, memo: Path) -> Path:
    """The path of the cached digest of a file in its current state."""
    stat = path.stat()
    state = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    key = "\0".join([str(path.resolve()), *map(str, state)])
    return memo / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _forget(path: Path, memo: Path) -> None:
    with suppress(OSError):
        _memo_file(path, memo).unlink()


def file_digest(path: Path, memo: Path | None, remember: bool) -> bytes:
    """The digest of a file's contents. That of a large file is cached in the folder ``memo``."""
    try:
        stat = path.stat()
        # A recently modified file may change again within one tick of the file system's clock.
        settled = time.time_ns() - stat.st_mtime_ns > 2_000_000_000
        remembered = None
        if memo is not None and settled and stat.st_size >= _DIGEST_MEMO_FROM:
            remembered = _memo_file(path, memo)
            if remembered.is_file() and len(digest := remembered.read_bytes()) == 16:
                return digest
        found = content_digest(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if remembered is not None and remember:
        _remember(remembered, found)
    return found


def content_digest(path: Path) -> bytes:
    """The digest of a file's contents, as they are now."""
    hasher = hashlib.blake2b(digest_size=16)
    with open_file(path) as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.digest()


def _remember(path: Path, digest: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_bytes(digest)
        draft.replace(path)
    except OSError:  # the cache only saves time
        return


def unreadable(name: object, error: OSError) -> UserError:
    return UserError(f"data.source: {name}: cannot read it: {one_line(error.strerror or error)}")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert errors of reading the file ``name`` to UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"data.source: {name}: it is not UTF-8 text; convert it (iconv -t utf-8)") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"data.source: {name}: {one_line(error)}; copy the file again") from error
    except OSError as error:
        raise unreadable(name, error) from error


def unknown_length(path: Place) -> bool:
    """Whether the length of a file does not tell that of its text."""
    return format_of(path) == ".parquet" or is_compressed(path)


def _text_file(opened: io.BufferedReader, name: str) -> Iterator[Document]:
    """Yield the file as one document, in pieces of whole lines if it is long; nothing if it is empty."""
    with _reading(name), io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file:
        piece = file.read(PIECE_CHARS)
        _check_characters(piece, name)
        while piece:
            if len(piece) == PIECE_CHARS:
                piece += file.readline(PIECE_CHARS)
            following = file.read(PIECE_CHARS)
            if following or piece.strip():
                yield Document(piece, ends=not following)
            piece = following


def _check_characters(text: str, name: str) -> None:
    """Raise UserError for UTF-16 without a mark at its start, which is valid UTF-8 full of NULs."""
    if "\0" in text and 4 * text.count("\0") > len(text):
        raise UserError(f"data.source: {name}: it is UTF-16 text, not UTF-8; convert it (iconv -t utf-8)")


def _pieces_of_text(opened: io.BufferedReader, name: str, split: str) -> Iterator[Document]:
    """Yield a document per line or paragraph (separated by blank lines), without its line end.

    Very long ones come in pieces.
    """
    held: list[str] = []
    begun = False  # pieces of the current document were yielded
    with _reading(name), io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file:
        within_line = False
        while line := file.readline(PIECE_CHARS):
            _check_characters(line, name)
            blank = not within_line and not line.strip()
            within_line = not line.endswith(("\n", "\r"))
            if not blank:
                held.append(line)
            if blank if split == "paragraph" else not within_line:
                if begun or held:
                    yield Document("".join(held).rstrip("\r\n"))
                held, begun = [], False
            elif sum(map(len, held)) >= PIECE_CHARS:
                yield Document("".join(held), ends=False)
                held, begun = [], True
        if begun or held:
            yield Document("".join(held).rstrip("\r\n"))


def _rows(
    path: Path, name: str, opening: _Opening, fields: Fields
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    suffix = format_of(path)
    if suffix == ".jsonl":
        return _jsonl_rows(path, name, opening, fields.bad)
    if suffix == ".json":
        return _json_rows(path, name, opening)
    if suffix == ".parquet":
        return _parquet_rows(path, name, fields)
    return csv_rows(path, name, fields)


def _parquet_rows(path: Path, name: str, fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with _reading(name), open_file(path) as raw, parquet_file(raw, name) as file:
        yield from rows_of(file, range(file.metadata.num_row_groups), name, fields)


def _jsonl_rows(
    path: Path, name: str, opening: _Opening, bad: BadRecords | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with _reading(name), decompressed(opening(path), path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{name}:{number}"
            if (row := json_row(line, where, bad)) is not None:
                yield where, row


def json_row(line: bytes, where: str, bad: BadRecords | None) -> Mapping[str, Any] | None:
    """The object in a line; None if it is blank, or goes to ``bad``.

    Raises:
        UserError: if it is no object.
    """
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else one_line(error)
        refusal = UserError(
            f"data.source: {where}: not a line of JSON ({reason}); correct or remove it, or set "
            "data.on_bad_record to skip"
        )
        refusal.__cause__ = error
    else:
        if isinstance(row, dict):
            return row
        refusal = UserError(
            f"data.source: {where}: a {type(row).__name__}, not an object; "
            'each line must look like {"text": "..."} or {"messages": [...]}'
        )
    if bad is None:
        raise refusal
    bad.skip(refusal)
    return None


_BETWEEN = re.compile(r"[\s,]*")
_UNFINISHED = 16  # characters before the end of a text in which an error may be of its incompleteness


def _json_rows(path: Path, name: str, opening: _Opening) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a list, or of a file with one after the other, without reading it whole."""
    decode = json.JSONDecoder().raw_decode
    with (
        _reading(name),
        io.TextIOWrapper(decompressed(opening(path), path), encoding="utf-8-sig") as file,
    ):
        text, at, number, ended, listed_rows = "", 0, 0, False, False
        while True:
            found = _BETWEEN.match(text, at)
            at = at if found is None else found.end()
            if not listed_rows and text[at : at + 1] == "[":
                listed_rows, at = True, at + 1
                continue
            if at == len(text) and ended:
                if listed_rows:
                    raise UserError(f"data.source: {name}: its list does not end; copy the file again")
                return
            if listed_rows and text[at : at + 1] == "]":
                listed_rows, at = False, at + 1
                continue
            try:
                row, at = decode(text, at)
            except (ValueError, RecursionError) as error:
                cut = isinstance(error, json.JSONDecodeError) and (
                    error.pos >= len(text) - _UNFINISHED or error.msg.startswith("Unterminated")
                )
                if cut and not ended:
                    more = file.read(max(PIECE_CHARS, len(text) - at))
                    text, at, ended = text[at:] + more, 0, not more
                    continue
                reason = getattr(error, "msg", None) or one_line(error)
                raise UserError(
                    f"data.source: {name}: row {number + 1}: not JSON ({reason}); correct or remove it"
                ) from error
            number += 1
            if not isinstance(row, dict):
                raise UserError(
                    f"data.source: {name}: row {number}: a {type(row).__name__}, not an object; "
                    'the file must look like [{"text": "..."}, ...] or [{"messages": [...]}, ...]'
                )
            yield f"{name}: row {number}", row
