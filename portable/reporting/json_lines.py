"""A run's logs, one JSON object a line. The files are untrusted: crashes cut lines, disks flip bits.

Invalid lines are skipped and counted, but for a last one that a crash cut short. A value that this program
never writes (NaN, a number of a thousand digits, a nested object that is no confusion matrix) reads as null.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.storage.safe_open import open_for_writing, read_small_file
from portable.evaluation.best_tracker import MAX_LOGGED_CLASSES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

    from portable.converters.storage.path_or_url import AnyPath

# The largest exact integer in JavaScript, which draws the page.
MAX_SAFE_INTEGER = 1 << 53
# More than the log of a million steps.
_MAX_LOG_BYTES = 1 << 30
# Seconds since 1970, up to the year 9999.
_MAX_UNIX_TIME = 253_402_300_799
_MAX_TEXT_LENGTH = 1000
# Bytes of the end of a log that are read at once: some thousand rows.
_BLOCK_BYTES = 1 << 20


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


class JsonLinesWriter:
    """A log that is appended to, through no link."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_for_writing(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append a row; a number that is not finite is null."""
        infinite = {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        self._file.write(json.dumps({**row, **dict.fromkeys(infinite)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log_rows(path: AnyPath, *required_keys: str) -> LogRows:
    """Return the rows of a file, and the number of invalid lines; see :func:`read_log_lines`."""
    lines, num_invalid = read_log_lines(path, *required_keys)
    return LogRows([line.row for line in lines], num_invalid)


def read_log_lines(path: AnyPath, *required_keys: str) -> LogLines:
    """Return the valid lines of a file with their rows as a page shows them, and the number of invalid lines.

    Args:
        path: of the file.
        required_keys: keys that a row must have besides ``step``.

    Raises:
        OSError: the file does not exist or is not a regular file.
        CheckpointError: a link leads out of its folder.
    """
    return _parse_lines(read_small_file(path, max_bytes=_MAX_LOG_BYTES).split(b"\n"), *required_keys)


def remove_rows_after_step(path: Path, last_step: int) -> LogRows:
    """Remove the rows after a step from the end of a log, and the invalid lines between them.

    Rows are logged in the order of their steps. So the file, which may be large, is read backward in blocks
    of `_BLOCK_BYTES` bytes, until a whole block has no later row.

    Args:
        path: Path of the file.
        last_step: The last step whose rows stay.

    Returns:
        The rows that stay in the part of the file that was read, and the number of its invalid lines.
    """
    with os.fdopen(open_for_writing(path, os.O_RDWR), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        length = 2 * _BLOCK_BYTES
        while True:
            start = _seek_next_line(file, max(0, size - length))
            content = file.read()
            lines, num_invalid = _parse_lines(content.split(b"\n"))
            num_first_lines = content[:_BLOCK_BYTES].count(b"\n")
            if not start or all(line.row["step"] <= last_step for line in lines[:num_first_lines]):
                break
            length *= 2
        kept_lines = [line for line in lines if line.row["step"] <= last_step]
        kept_content = b"".join(line.content + b"\n" for line in kept_lines)
        if kept_content != content:
            num_equal_bytes = len(kept_content) if content.startswith(kept_content) else 0
            file.truncate(start + num_equal_bytes)
            file.seek(start + num_equal_bytes)
            file.write(kept_content[num_equal_bytes:])
            file.flush()
            os.fsync(file.fileno())
    return LogRows([line.row for line in kept_lines], num_invalid)


def _seek_next_line(file: BinaryIO, offset: int) -> int:
    """Move to the first line that begins at or after an offset, and return its offset."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    return file.tell()


def _parse_lines(lines: list[bytes], *required_keys: str) -> LogLines:
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
        if not is_valid_count(row.get("step")) or any(row.get(key) is None for key in required_keys):
            num_invalid += number < len(lines)
            continue
        if not is_number(row.get("time")) or not 0 <= row["time"] <= _MAX_UNIX_TIME:
            row.pop("time", None)
        valid_lines.append(LogLine(line, row))
    return LogLines(valid_lines, num_invalid)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_valid_count(value: Any) -> bool:
    """Whether ``value`` is a valid count of steps, samples or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SAFE_INTEGER


def _sanitize_value(value: Any) -> Any:
    """``value``, shortened if it is text; None if a page cannot show it."""
    if isinstance(value, str):
        return value[:_MAX_TEXT_LENGTH]
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < MAX_SAFE_INTEGER else None
    if isinstance(value, dict):
        return value if _is_confusion_matrix(**value) else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _is_confusion_matrix(classes: Any = None, counts: Any = None, **other_fields: Any) -> bool:
    """Whether these are the names of a few classes, and a square of counts."""
    return (
        not other_fields
        and isinstance(classes, list)
        and 0 < len(classes) <= MAX_LOGGED_CLASSES
        and all(isinstance(name, str) and len(name) <= _MAX_TEXT_LENGTH for name in classes)
        and isinstance(counts, list)
        and len(counts) == len(classes)
        and all(
            isinstance(row, list) and len(row) == len(classes) and all(map(is_valid_count, row))
            for row in counts
        )
    )
