"""A few of the files that `python -m tests.converters.fuzz` mutates at scale: no traceback, time, memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.converters.fuzz import LARGEST, LONGEST, a_run, run
from tests.converters.make_full import SAMPLES


@pytest.mark.parametrize("name", ["torch-one-file", "torch-sharded", "safetensors-shards", "report"])
def test_a_sample_of_what_runs_at_scale(name: str, tmp_path: Path) -> None:
    """`python -m tests.converters.fuzz` takes thousands of files a format; these few keep it working."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux, to measure memory")
    folder = tmp_path / "made" / name
    if name == "report":
        a_run(folder)
    else:
        folder.mkdir(parents=True)
        (sample,) = (sample for sample in SAMPLES if sample.name == name)
        assert sample.make is not None
        sample.make(folder)
    (tmp_path / "work").mkdir()
    figures = run(name, folder, tmp_path / "work", files=60)
    assert figures.tracebacks == []
    assert figures.files == 60 and (figures.refused > 10 or name == "report")
    assert figures.longest < LONGEST and figures.largest < LARGEST
