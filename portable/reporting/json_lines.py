"""Rows of a run's logs, one JSON object a line, as a page may show them: whatever the file holds.

A crash cuts a line short, a disk flips a bit, and the folder may be somebody else's. A row that is none is
left out and counted; a value that no writer of ours gives (NaN, a number of a thousand digits, a table) is
left out of its row.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from converters.storage.guarded import read_small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.paths import Place

# JavaScript's integers, which draw the page.
MOST = 1 << 53
# A log of a million steps is smaller.
_MOST_BYTES = 1 << 30
# Seconds since 1970, up to the year 9999.
_LATEST = 253_402_300_799
_MOST_TEXT = 1000


def read_rows(path: Place, *needed: str) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file, and how many lines were none.

    Args:
        path: of the file.
        needed: keys that a row must have; ``step`` is one anyway.

    Raises:
        OSError: not there, or no regular file.
        CheckpointError: it lies behind a link that leads out of its folder.
    """
    rows, skipped = [], 0
    for row, _ in json_lines(read_small(path, limit=_MOST_BYTES)):
        if row is not None:
            row = {key: kept for key, value in row.items() if (kept := _kept(value)) is not None}
        if row is None or not count(row.get("step")) or any(key not in row for key in needed):
            skipped += 1
            continue
        if not number(row.get("time")) or not 0 <= row["time"] <= _LATEST:
            row.pop("time", None)
        rows.append(row)
    return rows, skipped


def json_lines(content: bytes) -> Iterator[tuple[dict[str, Any] | None, bool]]:
    """The object in each line that is not empty, None where it is none; and whether the line has an end.

    A number that is not finite reads as null, which stands for it in what this program writes.
    """
    lines = content.split(b"\n")
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            row = None
        yield row if isinstance(row, dict) else None, place < len(lines)


def number(value: Any) -> bool:
    """Whether ``value`` is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(value: Any) -> bool:
    """Whether ``value`` is one of a count of steps, samples or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _kept(value: Any) -> Any:
    """``value`` if a page can show it, else None."""
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < MOST else None
    return value if isinstance(value, float) and math.isfinite(value) else None
