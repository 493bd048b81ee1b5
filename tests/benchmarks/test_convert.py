"""The benchmark of the converter still runs, and its contestants still agree. Times are not looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import PROGRAMS
from benchmarks.convert import COPY, COPY_SYNCED, OURS, Result, Run, main, measure, table
from benchmarks.convert_make import model_config


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


@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize(
    ("kind", "peers", "says"),
    [
        ("dcp", {"accelerate merge-weights", "torch dcp_to_torch"}, "torch DCP, FSDP2"),
        ("fp8", {"DeepSeek's loop", "transformers, dequantize"}, "in fp8 by blocks"),
    ],
)
def test_results_agree_with_the_frameworks(
    kind: str, peers: set[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    command = ["--small", "--only", kind, "--folder", str(tmp_path / "work"), "--json", str(path)]
    assert main(command) == 0
    measured = {result["name"]: result for result in json.loads(path.read_text())["measured"][kind]}
    assert {COPY, OURS, *peers} <= set(measured)
    assert all(len(result["runs"]) == 1 and not result["failed"] for result in measured.values())
    assert says in capsys.readouterr().out


def test_every_program_is_listed() -> None:
    folder = Path(benchmarks.__file__).parent
    programs = {path.stem for path in folder.glob("*.py") if "argparse.Arg" in path.read_text("utf-8")}
    assert set(PROGRAMS) == programs - {"convert_make", "harness"}
