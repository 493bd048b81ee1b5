"""``benchmarks.plan``, of two strategies of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import plan
from portable.planner.memory_model import Setting

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_figures_are_measured_and_put_into_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "SETTINGS", (Setting("no_shard"), Setting("full_shard")))
    monkeypatch.setattr(plan, "LENGTH", 32)
    page = tmp_path / "strategies.md"
    page.write_text("\n".join(("before", *plan.MARKS, "after")))
    assert plan.main(["--family", "bert", "--docs", str(page)]) == 0
    capsys.readouterr()
    head, _, *rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if "|" in line]
    assert head[2:] == ["`no_shard`", "`full_shard`"]
    assert [row[:2] for row in rows] == [["bert", "none"], ["bert", "full"]]
    for row in rows:
        (alone, planned), (sharded, _) = ([float(x) for x in cell.strip(")").split(" (")] for cell in row[2:])
        assert sharded < alone and 0.8 < planned < 1.25
