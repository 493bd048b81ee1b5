"""The benchmark of merging still runs. Times are not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.merge import main, shapes


@pytest.mark.parametrize("gigabytes", [1.0, 4.0])
def test_bases_are_as_large_as_asked(gigabytes: float) -> None:
    count = sum(rows * (columns or [1])[0] for rows, *columns in shapes(gigabytes)[1].values())
    assert 2 * count == pytest.approx(gigabytes * 1e9, rel=0.1)


def test_memory_mode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    assert main(["--memory", "--small"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.0")]
    assert len(rows) == 2
    assert all(float(row.split("|")[-2]) < 100 for row in rows)
