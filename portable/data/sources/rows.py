"""Read local files: documents of .txt files, and rows of .jsonl, .json, .parquet and .csv files."""

from __future__ import annotations

import codecs
import io
import json
import re
from typing import TYPE_CHECKING, Any

from portable.data.sources.compression import get_file_format, open_decompressed
from portable.data.sources.datasets_library import iter_csv_rows
from portable.data.sources.documents import PIECE_CHARS, Document
from portable.data.sources.parquet_rows import iter_parquet_rows, open_parquet
from portable.data.sources.read_errors import convert_read_errors
from portable.data.sources.records import LocatedRow
from portable.errors import UserError, to_one_line
from portable.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from portable.data.sources.records import Fields


def iter_text_documents(path: Path, name: str, split: str) -> Iterator[Document]:
    """Yield the documents of a .txt file. Blank documents are left out.

    A document of more than about :data:`PIECE_CHARS` characters is split into pieces.

    Args:
        path: Path of the local file, which may be compressed.
        name: Name of the file, used in error messages.
        split: Unit that becomes a document: ``file``, ``paragraph`` or ``line``.

    Raises:
        UserError: If the file cannot be read or decompressed, or is not UTF-8 text.
    """
    with (
        convert_read_errors(name),
        _open_decompressed(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file,
    ):
        yield from (
            _iter_document_pieces(file, name) if split == "file" else _iter_split_text(file, name, split)
        )


def _iter_document_pieces(file: io.TextIOBase, name: str) -> Iterator[Document]:
    """Yield the pieces of a text file, which together form one document.

    A short text is a single piece. A long text is split, at line ends if possible. Yields nothing
    for a blank file.
    """
    text, has_text = "", False
    piece = file.read(PIECE_CHARS)
    _check_characters(piece, name)
    while piece:
        if len(piece) == PIECE_CHARS:
            piece += file.readline(PIECE_CHARS)
        following = file.read(PIECE_CHARS)
        text += piece
        # Do not yield a blank start yet, because the rest of the file may also be blank. Yield a blank end,
        # because it is the last piece of the document.
        has_text = has_text or bool(piece.strip())
        if has_text:
            yield Document(text, is_last_piece=not following)
            text = ""
        piece = following


def _check_characters(text: str, name: str) -> None:
    """Check that text decoded as UTF-8 is not actually UTF-16 without a byte order mark.

    UTF-16 text of ASCII characters is also valid UTF-8, but with a NUL before or after each
    character.

    Raises:
        UserError: If more than a quarter of the characters are NUL.
    """
    if "\0" in text and 4 * text.count("\0") > len(text):
        raise UserError(
            f"data.source: {name}: is UTF-16 text, not UTF-8; convert the file to UTF-8 (for "
            "example with iconv -t utf-8)"
        )


def _iter_split_text(file: io.TextIOBase, name: str, split: str) -> Iterator[Document]:
    """Yield each line or paragraph of a text file as a document, without the newline at its end.

    Long lines and paragraphs are split into pieces, which are yielded as separate documents. All
    pieces except the last have ``is_last_piece`` set to False. Paragraphs are separated by blank
    lines. A blank line is never a document.

    Args:
        file: The opened text file.
        name: Name of the file, used in error messages.
        split: ``line`` or ``paragraph``.
    """
    document: list[str] = []
    line_start: list[str] = []
    # has_begun: a piece of the current document has been yielded. line_has_text: the current line is not
    # blank so far.
    has_begun = line_has_text = False
    num_chars, previous_part = 0, ""
    while part := file.readline(PIECE_CHARS):
        _check_characters(part, name)
        if part == "\n" and previous_part.endswith("\r"):  # the size limit has separated \r from \n
            document += [part] if has_begun or document else []
            previous_part = part
            continue
        previous_part = part
        line_start.append(part)
        line_has_text = line_has_text or bool(part.strip())
        if line_has_text:
            document += line_start
            num_chars += sum(map(len, line_start))
            line_start = []
        is_line_end = part.endswith(("\n", "\r"))
        if is_line_end and (split == "line" or not line_has_text):
            if has_begun or document:
                yield Document("".join(document).rstrip("\r\n"))
            document, num_chars, has_begun = [], 0, False
        elif num_chars >= PIECE_CHARS:
            yield Document("".join(document), is_last_piece=False)
            document, num_chars, has_begun = [], 0, True
        if is_line_end:
            line_start, line_has_text = [], False
    if has_begun or document:
        yield Document("".join(document).rstrip("\r\n"))


def iter_file_rows(path: Path, name: str, fields: Fields) -> Iterator[LocatedRow]:
    """Yield the rows of a .jsonl, .json, .parquet or .csv file, with their locations.

    Args:
        path: Path of the local file. A .jsonl or .json file may be compressed.
        name: Name of the file, used in locations.
        fields: Names of the columns to read, and whether bad records are skipped.

    Raises:
        UserError: If the file cannot be read or is damaged, or if a row cannot be read and bad
            records are not skipped.
    """
    kind = get_file_format(path)
    if kind == ".jsonl":
        return _iter_jsonl_rows(path, name, fields)
    if kind == ".json":
        return _iter_json_rows(path, name, fields)
    return _iter_parquet_rows(path, name, fields) if kind == ".parquet" else iter_csv_rows(path, name, fields)


def _open_decompressed(path: Path) -> io.BufferedReader:
    """Open a local file for reading, and decompress it if its suffix indicates compression.

    For example, ``a.jsonl.gz`` is decompressed.
    """
    return open_decompressed(io.BufferedReader(open_file(path), 1 << 20), path)


def _iter_parquet_rows(path: Path, name: str, fields: Fields) -> Iterator[LocatedRow]:
    with convert_read_errors(name), open_file(path) as raw, open_parquet(raw, name) as file:
        yield from iter_parquet_rows(file, range(file.metadata.num_row_groups), name, fields)


def _iter_jsonl_rows(path: Path, name: str, fields: Fields) -> Iterator[LocatedRow]:
    with convert_read_errors(name), _open_decompressed(path) as file:
        for number, line in enumerate(file, start=1):
            location = f"{name}:{number}"
            if (row := parse_json_row(line, location, fields)) is not None:
                yield LocatedRow(location, row)


def parse_json_row(line: bytes, location: str, fields: Fields) -> Mapping[str, Any] | None:
    """Parse the JSON object in a line of a .jsonl file.

    Args:
        line: The line, in UTF-8.
        location: Location of the line, used in error messages.
        fields: Settings for reading records. They determine whether bad records are skipped.

    Returns:
        The object. None if the line is blank, or if it is skipped as a bad record.

    Raises:
        RecordError: If the line is not a JSON object, and bad records are not skipped.
    """
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else to_one_line(error)
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            reason = "UTF-16, not UTF-8"
        refusal = UserError(
            f"data.source: {location}: is not valid JSON ({reason}); correct or remove the line"
        )
        refusal.__cause__ = error
    else:
        if isinstance(row, dict):
            return row
        refusal = UserError(
            f"data.source: {location}: is a {type(row).__name__}, not an object; "
            'write each line like {"text": "..."} or {"messages": [...]}'
        )
    fields.skip_record_or_raise(refusal)
    return None


_SEPARATORS = re.compile(r"[\s,]*")
_INCOMPLETE_TAIL_CHARS = 16  # an error this close to the end may mean that more text must be read


def _iter_json_rows(path: Path, name: str, fields: Fields) -> Iterator[LocatedRow]:
    """Yield the rows of a .json file.

    The file contains either one JSON array of objects, or several objects one after another. It is
    read in blocks, so it does not have to fit into memory.

    Raises:
        UserError: If the file is not valid JSON, or if an item is not an object and bad records are
            not skipped.
    """
    decode = json.JSONDecoder().raw_decode
    with (
        convert_read_errors(name),
        _open_decompressed(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig") as file,
    ):
        text, position, number, has_ended, is_in_list = "", 0, 0, False, False
        while True:
            match = _SEPARATORS.match(text, position)
            position = position if match is None else match.end()
            if not is_in_list and text[position : position + 1] == "[":
                is_in_list, position = True, position + 1
                continue
            if position == len(text) and has_ended:
                if is_in_list:
                    raise UserError(
                        f"data.source: {name}: the file ends in the middle of the list of records; copy the "
                        "file again"
                    )
                return
            if is_in_list and text[position : position + 1] == "]":
                is_in_list, position = False, position + 1
                continue
            try:
                row, position = decode(text, position)
            except (ValueError, RecursionError) as error:
                is_cut = isinstance(error, json.JSONDecodeError) and (
                    error.pos >= len(text) - _INCOMPLETE_TAIL_CHARS or error.msg.startswith("Unterminated")
                )
                if is_cut and not has_ended:
                    more = file.read(max(PIECE_CHARS, len(text) - position))
                    text, position, has_ended = text[position:] + more, 0, not more
                    continue
                reason = getattr(error, "msg", None) or to_one_line(error)
                raise UserError(
                    f"data.source: {name}: row {number + 1}: is not valid JSON ({reason}); correct or "
                    "remove the row"
                ) from error
            number += 1
            if not isinstance(row, dict):
                refusal = UserError(
                    f"data.source: {name}: row {number}: is a {type(row).__name__}, not an object; "
                    'write the file like [{"text": "..."}, ...] or [{"messages": [...]}, ...]'
                )
                fields.skip_record_or_raise(refusal)
                continue
            yield LocatedRow(f"{name}: row {number}", row)
