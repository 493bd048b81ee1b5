"""The measurement of ZeRO's memory still runs. How much it is, the page tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("deepspeed")

from benchmarks import zero_memory
from benchmarks.pages import put_into
from benchmarks.zero_memory import BEGIN, END, Case, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def measured(case: Case) -> tuple[Usage, int]:
    return zero_memory.measure(case, 64, 1)


@pytest.mark.parametrize("case", [Case("zero2", False, 2), Case("zero3", True, 2)])
def test_a_rank_is_measured(case: Case, ranks: RankPool) -> None:
    usage, parameters = ranks.run(2, measured, case)
    assert parameters > 64 * 384
    assert 50e6 < usage.resident <= usage.peak * 1.05 < 10e9
    assert usage.saving > 0.9 * usage.resident


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    table = zero_memory.table([(Case("zero1", True, 2), Usage(8.26, 9.0, 12.0))])
    put_into(page, table, BEGIN, END)
    assert page.read_text() == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"
    assert table.endswith("| zero1 with offload to cpu | 2 | 10.0 | 8.3 | 9.0 | 12.0 |")
