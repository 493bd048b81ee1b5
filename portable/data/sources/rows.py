"""The records of a local file, by its format."""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import TYPE_CHECKING, Any

from portable.data.sources.compression import decompressed, format_of
from portable.data.sources.documents import PIECE_CHARS, Document
from portable.data.sources.library import csv_rows
from portable.data.sources.parquet_rows import parquet_file, rows_of
from portable.data.sources.reading import reading
from portable.errors import UserError, one_line
from portable.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from portable.data.sources.records import Fields


def texts_of(path: Path, name: str, split: str) -> Iterator[Document]:
    """The documents of a .txt file."""
    with reading(name), _opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        yield from _whole_text(file, name) if split == "file" else _split_text(file, name, split)


def _whole_text(file: io.TextIOBase, name: str) -> Iterator[Document]:
    """Yield the file as one document, in pieces of whole lines if it is long; nothing if it is empty."""
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


def _split_text(file: io.TextIOBase, name: str, split: str) -> Iterator[Document]:
    """Yield a document per line or paragraph (separated by blank lines), without its line end.

    Very long ones come in pieces.
    """
    held: list[str] = []
    begun = within_line = False  # pieces of the current document were yielded; a line goes on
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


def records_of(path: Path, name: str, fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The place and the columns of each row of a file that is no text.

    Args:
        name: of the file, for messages.
    """
    kind = format_of(path)
    if kind == ".jsonl":
        return _jsonl_rows(path, name, fields)
    if kind == ".json":
        return _json_rows(path, name, fields)
    return _parquet_rows(path, name, fields) if kind == ".parquet" else csv_rows(path, name, fields)


def _opened(path: Path) -> io.BufferedReader:
    """The contents of a local file, decompressed."""
    return decompressed(io.BufferedReader(open_file(path), 1 << 20), path)


def _parquet_rows(path: Path, name: str, fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with reading(name), open_file(path) as raw, parquet_file(raw, name) as file:
        yield from rows_of(file, range(file.metadata.num_row_groups), name, fields)


def _jsonl_rows(path: Path, name: str, fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with reading(name), _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{name}:{number}"
            if (row := json_row(line, where, fields)) is not None:
                yield where, row


def json_row(line: bytes, where: str, fields: Fields) -> Mapping[str, Any] | None:
    """Parse the object in a line; None if the line is blank, or is left out as a bad record.

    Raises:
        RecordError: if the line is not an object, and bad records end the run.
    """
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else one_line(error)
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            reason = "UTF-16, not UTF-8"
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
    fields.reject(refusal)
    return None


_BETWEEN = re.compile(r"[\s,]*")
_UNFINISHED = 16  # characters before the end of a text in which an error may be of its incompleteness


def _json_rows(path: Path, name: str, fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a list, or of a file with one after the other, without reading it whole."""
    decode = json.JSONDecoder().raw_decode
    with reading(name), _opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
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
                refusal = UserError(
                    f"data.source: {name}: row {number}: a {type(row).__name__}, not an object; "
                    'the file must look like [{"text": "..."}, ...] or [{"messages": [...]}, ...]'
                )
                fields.reject(refusal)
                continue
            yield f"{name}: row {number}", row
