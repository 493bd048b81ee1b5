"""Tables that a benchmark writes into the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def put_into(page: Path, text: str, begin: str, end: str) -> None:
    """Replace what stands between the marks ``begin`` and ``end`` of ``page``.

    Raises:
        ValueError: if it has no such marks.
    """
    whole = page.read_text("utf-8")
    start, stop = whole.index(begin) + len(begin), whole.index(end)
    page.write_text(f"{whole[:start]}\n{text}\n{whole[stop:]}", "utf-8")
