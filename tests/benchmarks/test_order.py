"""The benchmark of the planner's order still runs. Times are not looked at, but that there are some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("deepspeed")

from benchmarks import order

if TYPE_CHECKING:
    from tests.ranks import RankPool

OPTIONS = order.Options(backend="cpu", rounds=1, steps=1, small=True)


@pytest.mark.slow
def test_every_setting_has_its_line(ranks: RankPool) -> None:
    rows = ranks.run(2, order.measure, OPTIONS)
    words = [row.words for row in rows]
    assert words[0] == "no_shard"
    assert {"zero1", "zero2", "zero3", "shard_grad_op", "full_shard"} < set(words)
    assert "zero3 with optimizer+params on the host" in words
    places = [row.place for row in rows]
    assert places == sorted(places)
    assert places[words.index("zero2")] < places[words.index("zero3")]
    assert all(row.measured > 0 and row.reckoned is not None and row.reckoned > 0 for row in rows)
    assert len(order.table(rows).splitlines()) == len(rows) + 2
