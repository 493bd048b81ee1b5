"""``benchmarks.plan``, of two strategies of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import plan
from portable.planner.memory_model import Setting

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_figures_are_measured_and_put_into_both_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "SETTINGS", (Setting("no_shard"), Setting("full_shard")))
    monkeypatch.setattr(plan, "LENGTH", 32)
    page, by_strategy = tmp_path / "planning.md", tmp_path / "choosing.md"
    page.write_text("\n".join(("before", *plan.MARKS, "after")))
    by_strategy.write_text("\n".join(("before", *plan.MARKS_BY_STRATEGY, "after")))
    assert plan.main(["--family", "bert", "--docs", str(page), "--by-strategy", str(by_strategy)]) == 0
    capsys.readouterr()
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if "| bert |" in line]
    assert [row[:3] for row in rows] == [
        ["bert", "no_shard", "none"],
        ["bert", "full_shard", "none"],
        ["bert", "no_shard", "full"],
        ["bert", "full_shard", "full"],
    ]
    measured = [float(row[4]) for row in rows]
    assert measured[1] < measured[0] and measured[3] < measured[2]
    shown = [line.strip("| ").split(" | ") for line in by_strategy.read_text().splitlines() if "bert" in line]
    assert shown == [["bert", "none", rows[0][4], rows[1][4]], ["bert", "full", rows[2][4], rows[3][4]]]
