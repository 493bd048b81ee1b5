"""A run's logs, one JSON object a line. The files are untrusted: crashes cut lines, disks flip bits.

Invalid lines are skipped and counted, but for a last one that a crash cut short. A value that this program
never writes (NaN, a number of a thousand digits, a nested object that is no confusion matrix) reads as null.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.storage.safe_open import open_without_links, read_small
from portable.evaluation.best_tracker import MOST_CLASSES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

    from portable.converters.storage.path_or_url import Place

# The largest exact integer in JavaScript, which draws the page.
MOST = 1 << 53
# More than the log of a million steps.
_MOST_BYTES = 1 << 30
# Seconds since 1970, up to the year 9999.
_LATEST = 253_402_300_799
_MOST_TEXT = 1000
# Bytes of the end of a log that are read at once: some thousand rows.
_BLOCK = 1 << 20


class LogLine(NamedTuple):
    """A valid line of a log.

    Attributes:
        content: Bytes of the line, without the line feed.
        row: The JSON object, without values that a page cannot show.
    """

    content: bytes
    row: dict[str, Any]


class LogLines(NamedTuple):
    """Valid lines of a log, and the number of its invalid lines."""

    lines: list[LogLine]
    num_invalid: int


class LogRows(NamedTuple):
    """Valid rows of a log, and the number of its invalid lines."""

    rows: list[dict[str, Any]]
    num_invalid: int


class JsonLines:
    """A log that is appended to, through no link."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_without_links(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; a number that is not finite is null."""
        infinite = {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        self._file.write(json.dumps({**row, **dict.fromkeys(infinite)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Place, *needed: str) -> LogRows:
    """Return the rows of a file, and the number of invalid lines; see :func:`read_lines`."""
    lines, num_invalid = read_lines(path, *needed)
    return LogRows([line.row for line in lines], num_invalid)


def read_lines(path: Place, *needed: str) -> LogLines:
    """Return the valid lines of a file with their rows as a page shows them, and the number of invalid lines.

    Args:
        path: of the file.
        needed: keys that a row must have besides ``step``.

    Raises:
        OSError: the file does not exist or is not a regular file.
        CheckpointError: a link leads out of its folder.
    """
    return _parse_lines(read_small(path, limit=_MOST_BYTES).split(b"\n"), *needed)


def drop_later_rows(path: Path, last_step: int) -> LogRows:
    """Remove the rows after a step from the end of a log, and the invalid lines between them.

    Rows are logged in the order of their steps. So the file, which may be large, is read backward in blocks
    of `_BLOCK` bytes, until a whole block has no later row.

    Args:
        path: Path of the file.
        last_step: The last step whose rows stay.

    Returns:
        The rows that stay in the part of the file that was read, and the number of its invalid lines.
    """
    with os.fdopen(open_without_links(path, os.O_RDWR), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        length = 2 * _BLOCK
        while True:
            start = _seek_line(file, max(0, size - length))
            content = file.read()
            lines, num_invalid = _parse_lines(content.split(b"\n"))
            first = content[:_BLOCK].count(b"\n")
            if not start or all(line.row["step"] <= last_step for line in lines[:first]):
                break
            length *= 2
        earlier = [line for line in lines if line.row["step"] <= last_step]
        rest = b"".join(line.content + b"\n" for line in earlier)
        if rest != content:
            same = len(rest) if content.startswith(rest) else 0
            file.truncate(start + same)
            file.seek(start + same)
            file.write(rest[same:])
            file.flush()
            os.fsync(file.fileno())
    return LogRows([line.row for line in earlier], num_invalid)


def _seek_line(file: BinaryIO, offset: int) -> int:
    """Move to the first line that begins at or after an offset, and return its offset."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    return file.tell()


def _parse_lines(lines: list[bytes], *needed: str) -> LogLines:
    valid_lines: list[LogLine] = []
    num_invalid = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
            row = {key: _sanitize_value(value) for key, value in parsed.items()}
        except (ValueError, AttributeError, RecursionError):
            row = {}
        if not is_count(row.get("step")) or any(row.get(key) is None for key in needed):
            num_invalid += number < len(lines)
            continue
        if not is_number(row.get("time")) or not 0 <= row["time"] <= _LATEST:
            row.pop("time", None)
        valid_lines.append(LogLine(line, row))
    return LogLines(valid_lines, num_invalid)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a valid count of steps, samples or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _sanitize_value(value: Any) -> Any:
    """``value``, shortened if it is text; None if a page cannot show it."""
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < MOST else None
    if isinstance(value, dict):
        return value if _is_confusion(**value) else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _is_confusion(classes: Any = None, counts: Any = None, **others: Any) -> bool:
    """Whether these are the names of a few classes, and a square of counts."""
    return (
        not others
        and isinstance(classes, list)
        and 0 < len(classes) <= MOST_CLASSES
        and all(isinstance(name, str) and len(name) <= _MOST_TEXT for name in classes)
        and isinstance(counts, list)
        and len(counts) == len(classes)
        and all(
            isinstance(row, list) and len(row) == len(classes) and all(map(is_count, row)) for row in counts
        )
    )
