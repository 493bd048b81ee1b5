"""Format numbers and tables as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def format_bytes(count: float) -> str:
    """Format a byte count in binary units, such as ``1.5 GiB``. The units range from B to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 rank`` or ``2,000 ranks``.

    Args:
        count: The count.
        noun: Noun in the singular. Its plural must end in s.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_short_count(count: int) -> str:
    """Format a count with at most three digits, such as ``950``, ``412M`` or ``4.3B``."""
    value, units = float(count), iter(("", "K", "M", "B", "T"))
    unit = next(units)
    while value >= 999.5 and (larger := next(units, None)) is not None:
        value, unit = value / 1000, larger
    digits = 1 if unit and value < 99.95 else 0
    return f"{value:.{digits}f}{unit}"


def format_time(seconds: float) -> str:
    """Format a duration as ``1:02:03``, or as ``2:03`` if it is less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_columns(lines: Sequence[Sequence[str]], num_text_columns: int = 1) -> str:
    """Format rows of cells as aligned columns.

    Args:
        lines: Cells of each row. All rows have the same number of cells.
        num_text_columns: Number of leading columns that are left-aligned. The others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < num_text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def format_table(rows: Sequence[tuple[str, str]], max_width: int | None = None) -> str:
    """Format an indented table with a column of names and a column of values.

    Args:
        rows: Name and value of each row. There must be at least one row.
        max_width: Maximum line width, or None to leave long values on one line. Longer values are
            wrapped between words. A line can still be wider if a word or the column of names is too
            long.
    """
    indent = max(len(name) for name, _ in rows) + 4
    lines = []
    for name, value in rows:
        parts = [value]
        if max_width is not None:
            parts = textwrap.wrap(
                value, max(20, max_width - indent), break_long_words=False, break_on_hyphens=False
            ) or [""]
        lines.append(f"  {name:<{indent - 2}}{parts[0]}")
        lines += [" " * indent + part for part in parts[1:]]
    return "\n".join(lines)
