"""The measurements of saving and loading still run, at toy size. What they measured, the page tells."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("deepspeed")

from benchmarks import resume, saves

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool
    from tests.xla import XlaPool


@pytest.mark.parametrize("strategy", ["full_shard", "zero2"])
def test_saves_are_timed(strategy: str, tmp_path: Path, ranks: RankPool) -> None:
    seconds, total = ranks.run(2, saves.measure, strategy, 2, 64, 1, str(tmp_path))
    assert total > 12 * 2 * 64 * 384
    peers = {"full_shard": {"torch's async_save: blocked", "torch's save"}, "zero2": {saves.DEEPSPEED}}
    ours = {saves.COPY, saves.WRITE, saves.BEHIND, saves.TOTAL, saves.FOREGROUND}
    assert seconds.keys() == ours | peers[strategy]
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert all(map(float.__le__, seconds[saves.BEHIND], seconds[saves.TOTAL]))
    assert saves.table(seconds).count("\n") == len(seconds) + 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000007"]


def test_saves_on_xla_are_timed(tmp_path: Path, xla: XlaPool) -> None:
    seconds, _ = xla.run(2, saves.measure, "xla", 1, 64, 1, str(tmp_path))
    assert min(len(values) for values in seconds.values()) == 1


@pytest.mark.parametrize("strategy", ["full_shard", "zero2"])
def test_loading_is_timed(strategy: str, tmp_path: Path, ranks: RankPool) -> None:
    nbytes = ranks.run(2, resume.write, strategy, 64, 1, str(tmp_path))
    assert nbytes > 12 * 2 * 64 * 384
    own = ranks.run(2, resume.read, strategy, 64, 1, str(tmp_path), strategy, 2, 1)
    peer = {"full_shard": "torch DCP", "zero2": "DeepSpeed"}[strategy]
    assert list(own["warm"]) == list(own["cold"]) == [resume.OURS, peer]
    other = ranks.run(1, resume.read, "full_shard", 64, 1, str(tmp_path), strategy, 2, 1)
    lines = resume.table([((strategy, 2, strategy, 2), own), ((strategy, 2, "full_shard", 1), other)])
    assert lines.count("\n") == 1 + 2 + len(other["warm"])
    shutil.rmtree(tmp_path / "step-000001")
