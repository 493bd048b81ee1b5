"""The benchmark of ZeRO steps still runs, and its loops still do the same. Times are not looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("deepspeed")

from benchmarks import zero
from benchmarks.harness import Result, table

if TYPE_CHECKING:
    from tests.ranks import RankPool

OPTIONS = zero.Options(steps=2, warmup=1, rounds=2, backend="cpu", small=True, clock="cpu", control=True)


def measured(options: zero.Options, strategy: str) -> list[Result]:
    return zero.measure(options, strategy)


# The loops are the same whatever the stage, which is DeepSpeed's.
@pytest.mark.parametrize(
    ("strategy", "ranks_", "offload"),
    [
        pytest.param("zero2", 2, False, marks=pytest.mark.exhaustive),
        ("zero3", 2, False),
        ("zero1", 1, True),
    ],
)
def test_all_loops_take_the_same_steps(strategy: str, ranks_: int, offload: bool, ranks: RankPool) -> None:
    options = replace(OPTIONS, ranks=ranks_, offload=offload, micro_batch_size=2)
    results = {result.name: result for result in ranks.run(ranks_, measured, options, strategy)}
    assert list(results) == ["bare DeepSpeed", "portable-train", "bare, again", "Trainer"]
    bare = results["bare DeepSpeed"]
    for result in results.values():
        assert [len(turn) for turn in result.step_seconds] == [2, 2]
    for name in ("portable-train", "bare, again"):
        assert results[name].turn_losses == pytest.approx(bare.turn_losses, rel=1e-5)
    first, last = bare.turn_losses[0], bare.turn_losses[-1]
    assert first is not None
    assert last is not None
    assert last < first
    assert table(list(results.values()), zero.BASELINE).count("\n") == 4


def test_a_batch_that_cannot_be_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zero.parse(["--batch", "6"])
    assert "no multiple of --micro-batch x --ranks" in capsys.readouterr().err
