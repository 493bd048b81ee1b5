"""What a compiled pass has in memory; ``tests/tpu/test_planned_steps.py`` holds the rest to compilers."""

from __future__ import annotations

from portable.planner.fused import Value, peaks


def test_what_leaves_the_pass_is_gone() -> None:
    values = [Value(10, (), "written"), Value(3, (), "written"), Value(3, (0,), "written")]
    assert [peaks(values, [3], left) for left in (set(), {0})] == [[13], [10]]
