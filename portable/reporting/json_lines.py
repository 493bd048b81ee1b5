"""Read a run's logs, one JSON object a line. The files are untrusted: crashes cut lines, disks flip bits.

Invalid lines are skipped and counted. A value that this program never writes (NaN, a number of a thousand
digits, a nested object that is no confusion matrix) is dropped from its row.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from converters.storage.safe_open import read_small
from portable.evaluation.standing import MOST_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.paths import Place

# The largest exact integer in JavaScript, which draws the page.
MOST = 1 << 53
# More than the log of a million steps.
_MOST_BYTES = 1 << 30
# Seconds since 1970, up to the year 9999.
_LATEST = 253_402_300_799
_MOST_TEXT = 1000


def read_rows(path: Place, *needed: str) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file, and the number of invalid lines.

    Args:
        path: of the file.
        needed: keys that a row must have besides ``step``.

    Raises:
        OSError: the file does not exist or is not a regular file.
        CheckpointError: a link leads out of its folder.
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
    """Yield each non-empty line's object, or None if it is not one, and whether the line ends in a newline.

    Non-finite numbers read as null, as this program writes them.
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
    """Whether ``value`` is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(value: Any) -> bool:
    """Whether ``value`` is a valid count of steps, samples or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _kept(value: Any) -> Any:
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
        and all(isinstance(row, list) and len(row) == len(classes) and all(map(count, row)) for row in counts)
    )
