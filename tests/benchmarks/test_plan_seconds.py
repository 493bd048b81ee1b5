"""The benchmark of how long a plan takes still runs. Times are not looked at, but that there are some."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from benchmarks import plan_seconds
from tests.runs import TINY_MODEL


@pytest.mark.usefixtures("quick_python")
def test_every_command_has_its_line() -> None:
    seconds = plan_seconds.measure(1, {**TINY_MODEL, "max_position_embeddings": 4096})
    assert len(seconds) == 4
    assert all(took > 0 for took in seconds.values())
    assert len(plan_seconds.table(seconds).splitlines()) == 4 + 2
