"""The page on JSONs and YAMLs is what the tables in the code say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu.zero.config import compatibility_page as wild

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_page_is_up_to_date() -> None:
    assert wild.main(["--check"]) == 0


def test_a_stale_page_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wild, "PAGE", tmp_path / "wild.md")
    assert wild.main(["--check"]) == 1
    assert wild.main([]) == 0
    assert wild.main(["--check"]) == 0
    assert wild.main(["--wrong"]) == 2
