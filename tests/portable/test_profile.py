"""``--profile``: a trace that a viewer can open, from every rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from portable.reporting.profiling import RECORDED
from portable.run.rank import run_rank
from tests.ranks import RankPool
from tests.runs import configured


def profiled(folder: Path, corpus: Path) -> int:
    return run_rank("cpu", configured(folder, corpus, train__micro_batch_size=3), profile=True)


def test_every_rank_writes_a_trace(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    assert ranks.run(2, profiled, tmp_path / "run", corpus) == 0
    for rank in range(2):
        with gzip.open(tmp_path / "run" / "profile" / f"rank{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert len({name for name in names if str(name).startswith("ProfilerStep")}) == RECORDED
        assert any("all_gather" in str(name) for name in names)
        assert "aten::mm" in names
