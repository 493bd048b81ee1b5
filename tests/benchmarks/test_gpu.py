"""The benchmark for one GPU still runs, tiny and on the CPU. Times are not looked at."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import BARE, CASES, OURS, STRATEGIES, Contestant, main, table, take_turns
from portable.config import load_config
from portable.model.build import build_model, model_config
from portable.model.flops import parameter_count

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "START", "forkserver")


def test_saving_and_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--small", "--json", str(tmp_path / "gpu.json"), "--parts", "saving", "roofline"]
    assert main(given) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    (roofline,), (saving,) = parts["roofline"], parts["saving"]
    assert all(seconds >= 0 for seconds in roofline["bounds_seconds"].values())
    assert min(roofline[kind]["matrix products"] for kind in ("bounds_seconds", "spent_seconds")) > 0
    assert saving["state_bytes"] > 3 * saving["parameter_bytes"]  # weights, two moments, and counts of steps
    assert all(min(seconds) > 0 for seconds in saving["seconds"].values())
    printed = capsys.readouterr().out
    assert "GB/s in a copy" in printed and "save: blocked" in printed
    assert main(given) == 0  # what the file has is not measured again
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"] == parts


@pytest.mark.slow
@pytest.mark.parametrize("part", ["llama-1.2b", "strategies"])
def test_loops_take_turns(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert main(["--small", "--parts", part, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["parts"][part]
    names = CASES[part].loops
    assert [row["name"] for row in rows] == [*names, *names[1:], names[0]]
    last = {row["name"]: row["loss"] for row in rows if row["loss"] is not None}
    assert {OURS, *(STRATEGIES if part == "strategies" else (BARE, "Accelerate"))} <= set(last)
    assert max(last.values()) == pytest.approx(min(last.values()), rel=1e-5)
    assert f"x {'Trainer' if part == 'llama-1.2b' else OURS}" in capsys.readouterr().out


def answers(pipe: Connection) -> None:
    while True:
        pipe.recv()
        pipe.send({"tokens_per_second": 3})


def dies(pipe: Connection) -> None:
    pipe.recv()
    os._exit(7)


def hangs(pipe: Connection) -> None:
    pipe.recv()
    time.sleep(99)


def test_a_loop_that_dies_or_hangs_leaves_the_others() -> None:
    contestants = [Contestant(work.__name__, work) for work in (answers, dies, hangs)]
    rows: list[dict[str, Any]] = []
    take_turns(contestants, 2, 3, rows.append)
    told = [(row["name"], row.get("tokens_per_second") or row["failed"]) for row in rows]
    assert told == [("dies", "ended with 7"), ("hangs", "not ready in time"), ("answers", 3), ("answers", 3)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("llama-1.2b", 1.2e9), ("llama-8b-lora", 8.03e9), ("qwen3-1.7b", 1.72e9), ("strategies", 0.596e9)],
)
def test_the_full_sizes_are_what_they_are_called(name: str, wanted: float) -> None:
    settings = load_config(None, {"model.config": CASES[name].model, "data.source": "x.jsonl"}).model
    assert parameter_count(build_model(model_config(settings), settings)) == pytest.approx(wanted, rel=0.03)


def row(name: str, loss: float, **more: Any) -> dict[str, Any]:
    figures = {"tokens_per_second": 1.0, "step_seconds": 1.0, "mfu": 0.5, "peak_memory": 2**30}
    about = {"case": "x", "tolerance": 1e-5, "planned_memory": None}
    return {"name": name, "loss": loss, **about, **figures, **more}


def test_what_learns_something_else_or_does_not_fit_is_told() -> None:
    names = CASES["llama-1.2b"].loops
    good = table("llama-1.2b", [row(name, 2.0) for name in names])
    assert "50.0%" in good and "WRONG" not in good
    off = table("llama-1.2b", [row(name, 2.1 if name == OURS else 2.0) for name in names])
    assert "WRONG: the loss of portable-train is 2.1" in off
    full = [row(name, 2.0, failed="out of memory") for name in names]
    assert table("llama-1.2b", full).count("out of memory") == 4
