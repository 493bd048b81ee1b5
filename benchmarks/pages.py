"""Write tables into the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def put_into(page: Path, text: str, begin: str, end: str) -> None:
    """Replace the text between the marks ``begin`` and ``end`` of ``page``.

    Raises:
        ValueError: the page lacks the marks.
    """
    whole = page.read_text("utf-8")
    start, stop = whole.index(begin) + len(begin), whole.index(end)
    page.write_text(f"{whole[:start]}\n{text}\n{whole[stop:]}", "utf-8")
