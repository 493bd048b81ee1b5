"""Read and write the log files of a run, which contain one JSON object per line.

Logs are untrusted, because crashes truncate lines and disks flip bits. Invalid lines are skipped
and counted. Only an invalid last line is not counted, because a crash may have truncated it. Values
that this program never writes are read as None. Examples are NaN, an integer with a thousand
digits, and a nested object that is not a confusion matrix.
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

# Larger integers are not exact in JavaScript, the language of the report's charts.
MAX_SAFE_INTEGER = 1 << 53
# A log of a million steps is smaller.
_MAX_LOG_BYTES = 1 << 30
# Seconds since 1970, up to the year 9999.
_MAX_UNIX_TIME = 253_402_300_799
_MAX_TEXT_LENGTH = 1000
# Block size for reading the end of a log. A block contains several thousand rows.
_BLOCK_BYTES = 1 << 20


class LogLine(NamedTuple):
    """Valid line of a log.

    Attributes:
        content: Bytes of the line, without the line feed.
        row: JSON object of the line. Values that the report cannot show are None.
    """

    content: bytes
    row: dict[str, Any]


class LogLines(NamedTuple):
    """Valid lines of a log, and the number of invalid lines."""

    lines: list[LogLine]
    num_invalid: int


class LogRows(NamedTuple):
    """Valid rows of a log, and the number of invalid lines."""

    rows: list[dict[str, Any]]
    num_invalid: int


class JsonLinesWriter:
    """Writer that appends rows to a log file.

    Args:
        path: Path of the file. Created if it does not exist.

    Raises:
        OSError: If the file cannot be opened, or if the path is a symlink or not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_for_writing(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append a row and flush it to the operating system.

        Args:
            row: JSON object. NaN and infinite values at the top level are written as null.
        """
        infinite = {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        self._file.write(json.dumps({**row, **dict.fromkeys(infinite)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log_rows(path: AnyPath, *required_keys: str) -> LogRows:
    """Read the rows of a log.

    Args:
        path: Path or URL of the log.
        required_keys: Keys that a valid row must contain in addition to ``step``.

    Returns:
        The valid rows, and the number of invalid lines.

    Raises:
        OSError: If the file does not exist, is not a regular file, or is larger than 1 GiB.
        CheckpointError: If a symlink points outside the folder of the log, or if a request to the
            object store fails.
    """
    lines, num_invalid = read_log_lines(path, *required_keys)
    return LogRows([line.row for line in lines], num_invalid)


def read_log_lines(path: AnyPath, *required_keys: str) -> LogLines:
    """Read the lines of a log, both as bytes and as parsed rows.

    Args:
        path: Path or URL of the log.
        required_keys: Keys that a valid row must contain in addition to ``step``.

    Returns:
        The valid lines, and the number of invalid lines.

    Raises:
        OSError: If the file does not exist, is not a regular file, or is larger than 1 GiB.
        CheckpointError: If a symlink points outside the folder of the log, or if a request to the
            object store fails.
    """
    return _parse_lines(read_small_file(path, max_bytes=_MAX_LOG_BYTES).split(b"\n"), *required_keys)


def remove_rows_after_step(path: Path, last_step: int) -> LogRows:
    """Remove the rows of a log whose step is later than ``last_step``.

    The log may be large, but its rows are ordered by step. This function therefore reads only the
    end of the file. It begins with the last two blocks of ``_BLOCK_BYTES`` bytes. While the first
    block that was read contains a row later than ``last_step``, it doubles the number of bytes and
    reads again. Invalid lines in the part that was read are also removed.

    Args:
        path: Path of the log.
        last_step: Last step whose rows are kept.

    Returns:
        The kept rows in the part that was read, and the number of invalid lines in this part.
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
    """Seek to the first line that begins at or after a byte offset, and return the offset of this line."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()
    return file.tell()


def _parse_lines(lines: list[bytes], *required_keys: str) -> LogLines:
    """Parse the lines of a log.

    A line is valid if it is a JSON object with a valid count as ``step``, and with a value other
    than null for each required key. An invalid ``time`` is removed from the row. Blank lines are
    skipped. The text after the last line feed may have been truncated by a crash, so it is not
    counted if it is invalid.

    Args:
        lines: Contents of the log, split at line feeds.
        required_keys: Keys that a valid row must contain in addition to ``step``.
    """
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
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_valid_count(value: Any) -> bool:
    """Return whether a value is a valid count of steps, samples, or tokens.

    A valid count is an int from 0 to 2**53 - 1, and not a bool.
    """
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SAFE_INTEGER


def _sanitize_value(value: Any) -> Any:
    """Return the value if the report can show it, and None otherwise.

    Long strings are truncated. None replaces integers with an absolute value of at least
    ``MAX_SAFE_INTEGER``, non-finite floats, lists, and objects other than confusion matrices.
    """
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
    """Return whether the fields of a JSON object represent a valid confusion matrix.

    Args:
        classes: Names of the classes, at least one and at most ``MAX_LOGGED_CLASSES``.
        counts: Square matrix of counts, as a list of rows, with one row per class.
        other_fields: Other fields of the object. If there are any, the result is False.
    """
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
