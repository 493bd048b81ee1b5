"""The benchmark for one GPU still runs, tiny and on the CPU. Times are not looked at."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gpu, gpu_turns
from benchmarks.gpu import main, read_rows, tables
from benchmarks.gpu_cases import CASES, OURS
from benchmarks.gpu_turns import Contestant, Plan, take_turns
from benchmarks.gpu_work import FULL_BERT, ROWS
from portable.config import load_config
from portable.model.build import build_model, model_config
from portable.model.flops import parameter_count

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_every_part_but_the_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    given = ["--small", "--rows", str(path), "--parts"]
    assert main([*given, "guide", "roofline", "saving", "--trace", str(tmp_path / "trace.json.gz")]) == 0
    rows = read_rows(path)

    guide = {row["name"]: row for row in rows if row["part"] == "guide"}
    assert set(guide) == {row.name for row in ROWS}
    assert guide["vanilla"]["guide"] == [57.82, 8.86, 14949]
    assert not any("failed" in row for row in guide.values())
    assert all("seconds" in guide[name] for name in ("vanilla", "Adafactor", "8-bit Adam", "bf16"))

    (roofline,) = (row for row in rows if row["part"] == "roofline")
    assert all(seconds >= 0 for seconds in roofline["bounds_seconds"].values())
    assert roofline["bounds_seconds"]["matrix products"] > 0
    assert roofline["spent_seconds"]["matrix products"] > 0
    assert (tmp_path / "trace.json.gz").stat().st_size > 0

    (saving,) = (row for row in rows if row["part"] == "saving")
    assert saving["state_bytes"] > 3 * saving["parameter_bytes"]  # weights, two moments, and counts of steps
    assert all(min(seconds) > 0 for seconds in saving["seconds"].values())

    printed = capsys.readouterr().out
    assert "14949" in printed
    assert "GB/s in a copy" in printed
    assert "save: blocked" in printed
    assert main([*given, "guide"]) == 0  # the rows are there
    assert len(read_rows(path)) == len(rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_python")
def test_loops_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert main(["--small", "--parts", "llama-1.2b", "--rows", str(path)]) == 0
    rows = read_rows(path)
    assert not any("failed" in row for row in rows), rows
    case = CASES["llama-1.2b"].small()
    assert [row["name"] for row in rows] == [*case.loops, *case.loops[1:], case.loops[0]]
    last = {row["name"]: row["loss"] for row in rows}
    for name in (OURS, "Accelerate"):
        assert last[name] == pytest.approx(last["bare PyTorch"], rel=1e-5)
    assert "x Trainer" in capsys.readouterr().out
    assert "x Trainer" in tables(rows)


def test_a_loop_that_dies_or_hangs_leaves_the_others(tmp_path: Path) -> None:
    answer = json.dumps({"tokens_per_second": 3})
    answers = f"print('noise\\n{gpu_turns.ANSWER}{answer}', flush=True)"
    code = f"import sys, time\nfor line in sys.stdin:\n    {answers}\n"
    ends = {"good": "pass", "dies": "sys.exit('no memory')", "hangs": "time.sleep(99)"}
    contestants = [
        Contestant(name, [sys.executable, "-c", f"{code}    {end}"], tmp_path / f"{name}.txt")
        for name, end in ends.items()
    ]
    rows: list[dict[str, Any]] = []
    take_turns(contestants, Plan(warmup=1, steps=1, rounds=2), 6, lambda: None, rows.append)
    by_name = {name: [row for row in rows if row["name"] == name] for name in ends}
    assert [row["tokens_per_second"] for row in by_name["good"]] == [3, 3]
    assert [row["failed"] for row in by_name["dies"]] == ["no memory"]
    assert [row["failed"] for row in by_name["hangs"]] == ["not ready in time"]


def test_the_full_sizes_are_what_they_are_called() -> None:
    wanted = {"llama-1.2b": 1.2e9, "llama-8b-lora": 8.03e9, "qwen3-1.7b": 1.72e9, "qwen3-0.6b": 0.596e9}
    sizes = {name: (CASES[name].model, "causal-lm") for name in wanted}
    for name, (config, task) in {**sizes, "bert": (FULL_BERT.config, "sequence-classification")}.items():
        given = {"model.config": config, "model.task": task, "data.source": "x.jsonl", "data.packing": False}
        settings = load_config(None, given).model
        count = parameter_count(build_model(model_config(settings), settings))
        assert count == pytest.approx({**wanted, "bert": 335e6}[name], rel=0.03), name


def result(name: str, loss: float, **more: Any) -> dict[str, Any]:
    figures = {"tokens_per_second": 1.0, "step_seconds": 1.0, "mfu": 0.5, "peak_memory": 2**30}
    return {
        "part": "llama-1.2b",
        "case": "x",
        "tolerance": 1e-5,
        "name": name,
        "loss": loss,
        **figures,
        **more,
    }


def test_a_loop_that_learns_something_else_is_told() -> None:
    names = CASES["llama-1.2b"].loops
    good = [result(name, 2.0) for name in names]
    assert "50.0%" in tables(good)
    assert gpu.different(good) is None
    off = [result(name, 2.1 if name == OURS else 2.0) for name in names]
    assert "WRONG: this project's loss is 2.1" in tables(off)


def test_what_does_not_fit_is_named() -> None:
    rows = [{**result(name, 2.0), "failed": "out of memory"} for name in CASES["llama-1.2b"].loops]
    assert tables(rows).count("out of memory") == 4


def test_rows_that_a_kill_cut_short_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"part": "guide"}) + '\n{"part": "gui')
    assert read_rows(path) == [{"part": "guide"}]
    assert read_rows(tmp_path / "none") == []


def test_the_plan_of_turns() -> None:
    assert Plan(warmup=3, steps=4, rounds=2).lengths == [3, 1, 4, 1, 4]
