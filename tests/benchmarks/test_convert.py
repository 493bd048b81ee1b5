"""The benchmark of the converter still runs, and its contestants still agree. Times are not looked at."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.convert import COPY, COPY_SYNCED, OURS, Result, Run, main, measure, table
from benchmarks.convert_make import model_config

if TYPE_CHECKING:
    from pathlib import Path


def test_a_process_is_measured(tmp_path: Path) -> None:
    code = "import time; held = bytearray(b'x') * (64 << 20); time.sleep(0.5); print('done')"
    run, exit_code = measure([sys.executable, "-c", code], tmp_path / "log")
    assert exit_code == 0
    assert (tmp_path / "log").read_text() == "done\n"
    assert run.wall >= 0.5
    assert 64 <= run.anonymous <= run.rss < 150
    assert measure([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")[1] == 3


def test_the_table_names_medians_and_failures() -> None:
    def took(name: str, *walls: float) -> Result:
        return Result(name, [Run(wall, 1.0, 38.0, 22.0) for wall in walls])

    rows = [took(COPY, 1.0), took(COPY_SYNCED, 9.0, 2.0, 1.0), took(OURS, 3.0), Result("peer", failed="no")]
    said = table("dcp", rows).splitlines()
    assert "| cp, then fsync | 2.00 | 1.00 | 1.00 | 38 | 22 | 1.00 | 0.67 |" in said
    assert "| portable-convert | 3.00 | 3.00 | 1.00 | 38 | 22 | 1.50 | 1.00 |" in said
    assert any("peer | fails: no" in line for line in said)


@pytest.mark.parametrize("gigabytes", [0.002, 1.4, 4.0])
def test_models_are_as_large_as_asked(gigabytes: float) -> None:
    config = model_config(gigabytes)
    hidden = config["hidden_size"]
    layer = 4 * hidden**2 + 3 * hidden * config["intermediate_size"]
    count = config["num_hidden_layers"] * layer + 2 * hidden * config["vocab_size"]
    assert 4 * count == pytest.approx(gigabytes * 1e9, rel=0.1)


def test_memory_mode(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--memory", "--small", "--folder", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "safetensors" in line]
    assert len(rows) == 8
    assert all(float(row.split("|")[-2]) < 100 for row in rows)


def test_cores_mode(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--cores", "--small", "--folder", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| DCP to ")]
    assert len(rows) == 3 and all(row.endswith(" x |") for row in rows)
    assert not (tmp_path / "out").exists()


def test_inspect_mode(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--inspect", "--small", "--folder", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "safe_open" in line or "ours" in line]
    assert len(rows) == 5 and not any("fails" in row for row in rows)


@pytest.mark.usefixtures("quick_python")
def test_results_agree_with_the_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    command = ["--small", "--only", "dcp", "--folder", str(tmp_path / "work"), "--json", str(path)]
    assert main(command) == 0
    measured = {result["name"]: result for result in json.loads(path.read_text())["measured"]["dcp"]}
    assert {COPY, OURS, "accelerate merge-weights", "torch dcp_to_torch"} <= set(measured)
    assert all(len(result["runs"]) == 1 and not result["failed"] for result in measured.values())
    assert "torch DCP, FSDP2" in capsys.readouterr().out
