"""The benchmark of the planner's order still runs. Times are not looked at, but that there are some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

pytest.importorskip("deepspeed")

from benchmarks import order
from gpu import footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.planner.memory_model import Setting
    from tests.ranks import RankPool

OPTIONS = order.Options(backend="cpu", rounds=1, steps=1, small=True)


def few_settings(options: order.Options) -> list[order.Row]:
    """Without those that take their optimizer alone to the host."""
    every = footprint.settings

    def few(*arguments: Any) -> list[Setting]:
        return [
            setting
            for setting in every(*arguments)
            if setting.offload_params == setting.offload_optimizer
            and (setting.offload_params == "none" or setting.strategy == "zero3")
        ]

    with patch.object(footprint, "settings", few):
        return order.measure(options)


@pytest.mark.parametrize("measure", [few_settings, pytest.param(order.measure, marks=pytest.mark.exhaustive)])
def test_every_setting_has_its_line(
    ranks: RankPool, measure: Callable[[order.Options], list[order.Row]]
) -> None:
    rows = ranks.run(2, measure, OPTIONS)
    words = [row.words for row in rows]
    assert words[0] == "no_shard"
    assert {"zero1", "zero2", "zero3", "shard_grad_op", "full_shard"} < set(words)
    assert "zero3 with optimizer+params on the host" in words
    places = [row.place for row in rows]
    assert places == sorted(places)
    assert places[words.index("zero2")] < places[words.index("zero3")]
    assert all(row.measured > 0 and row.reckoned is not None and row.reckoned > 0 for row in rows)
    assert len(order.table(rows).splitlines()) == len(rows) + 2
