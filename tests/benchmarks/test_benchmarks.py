"""The benchmarks still run, tiny and on the CPU, and their comparisons still agree. Times are not checked.

One row of each program is always run. The other rows share its loops and tables, and run with ``--all``.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks import checkpoint_scale, convert, gpu, train_overhead
from benchmarks.__main__ import PROGRAMS
from benchmarks.convert import COPY
from benchmarks.harness import Result, check_losses, table
from benchmarks.train_overhead import BASELINE, SAME_LOSS
from tests.ranks import RankPool


def test_benchmark_programs_are_listed() -> None:
    folder = Path(benchmarks.__file__).parent
    programs = {path.stem for path in folder.glob("*.py") if "argparse.Arg" in path.read_text("utf-8")}
    assert set(PROGRAMS) == programs - {"convert_make", "harness"}


@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize(
    ("kind", "peers", "says"),
    [
        ("dcp", {"accelerate merge-weights", "torch dcp_to_torch"}, "torch DCP, FSDP2"),
        pytest.param(
            *("fp8", {"DeepSeek's loop", "transformers, dequantize"}, "in fp8 by blocks"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_convert_benchmark_agrees_with_frameworks(
    kind: str, peers: set[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    command = ["--small", "--only", kind, "--folder", str(tmp_path / "work"), "--json", str(path)]
    assert convert.main(command) == 0
    measured = {result["name"]: result for result in json.loads(path.read_text())["measured"][kind]}
    assert {COPY, convert.OURS, *peers} <= set(measured)
    assert all(len(result["runs"]) == 1 and not result["failed"] for result in measured.values())
    assert says in capsys.readouterr().out


@pytest.mark.exhaustive
def test_gpu_benchmark_measures_saving_and_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "START", "forkserver")
    given = ["--small", "--json", str(tmp_path / "gpu.json"), "--parts", "saving", "profile"]
    assert gpu.main(given) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    (profile,), (saving,) = parts["profile"], parts["saving"]
    assert profile["spent_seconds"]["matrix products"] > 0
    assert saving["state_bytes"] > 3 * saving["parameter_bytes"]  # weights, two moments, and counts of steps
    assert "ms of a step" in capsys.readouterr().out
    assert gpu.main(given) == 0  # values in the file are not measured again
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"] == parts


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "llama-1.2b",
        *(
            pytest.param(part, marks=pytest.mark.exhaustive)
            for part in ("qwen3-moe", "llama-8b-lora", "llama-8b-qlora", "bert-large", "plan")
        ),
    ],
)
def test_gpu_benchmark_alternates_loops(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "START", "forkserver")
    path = tmp_path / "gpu.json"
    assert gpu.main(["--small", "--parts", part, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["parts"][part]
    case = gpu.CASES[part]
    count = case.together or len(case.loops)
    groups = [case.loops[i : i + count] for i in range(0, len(case.loops), count)]
    turns = [name for group in groups for name in (*group, *group[1:], group[0])]
    assert [row["name"] for row in rows] == turns
    last = {row["name"]: row["loss"] for row in rows if row["loss"] is not None}
    assert set(last) == {name for name in case.loops if not name.startswith((gpu.TRAINER, gpu.TRL))}
    if part in ("llama-1.2b", "qwen3-moe"):
        assert max(last.values()) == pytest.approx(min(last.values()), rel=1e-5)
    base = gpu.TRAINER if gpu.TRAINER in case.loops else case.loops[0]
    assert f"x {base}" in capsys.readouterr().out


def test_gpu_benchmark_continues_with_incomplete_loops() -> None:
    case = gpu.case_of("llama-1.2b", small=True)
    assert case.turns[2] == 2
    ours, trainer, bare, accelerate = case.loops
    rows: list[dict[str, Any]] = [{"name": name, "round": 0} for name in (ours, trainer)]
    rows += [{"name": ours, "round": 1}, {"name": bare, "failed": "OutOfMemoryError: full"}]
    rows += [{"name": accelerate, "failed": "not ready in time"}]
    assert gpu.list_missing_loops(case, rows) == (trainer, accelerate)
    assert gpu.list_missing_loops(case, []) == case.loops


@pytest.mark.exhaustive
def test_checkpoint_scale_benchmark_opens_its_checkpoints() -> None:
    row = checkpoint_scale.measure_growth(2, 4)
    assert row["pieces"] == 4 * 6 and row["same world opens, s"] > 0
    steps = checkpoint_scale.train_with_saves("thread", 8, 1, "cpu")
    assert steps["ratio"] > 0 and steps["save, s"] > 0


def test_gpu_benchmark_table_reports_wrong_loss_and_out_of_memory() -> None:
    about: dict[str, Any] = {"case": "x", "tolerance": 1e-5, "planned_memory": None}
    about |= {"tokens_per_second": 1.0, "step_seconds": 1.0, "mfu": 0.5, "peak_memory": 2**30}
    names = gpu.CASES["llama-1.2b"].loops
    good = [{"name": name, "loss": 2.0, **about} for name in names]
    assert "WRONG" not in gpu.table("llama-1.2b", good)
    off = [{**row, "loss": 2.1 if row["name"] == gpu.OURS else 2.0} for row in good]
    assert "WRONG: the loss of portable-train is 2.1" in gpu.table("llama-1.2b", off)
    full = [{**row, "failed": "out of memory"} for row in good]
    assert gpu.table("llama-1.2b", full).count("out of memory") == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_loss": 1.25 * (1 + 5e-7)}, None),
        ({"final_loss": 1.25 * (1 + 2e-6)}, r"1\.2500\d+ where the bare loop's is 1\.250000000"),
        ({"turn_losses": [2.0, 1.6]}, r"loss is 1\.6"),
    ],
)
def test_check_losses_rejects_different_loss(changes: dict[str, Any], message: str | None) -> None:
    bare = Result(BASELINE, [[0.1]], [2.0, 1.5], 1.25)
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_losses([bare, replace(bare, name="portable-train", **changes)], BASELINE, SAME_LOSS)


def test_train_overhead_loops_take_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads of a tiny step mostly wait for each other
    path = tmp_path / "times.json"
    flags = "--small --backend cpu --steps 3 --warmup 1 --rounds 2 --control --json"
    try:
        assert train_overhead.main([*flags.split(), str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.train_overhead --small")
    for measured in document["measured"]:
        loops = {loop["name"]: loop for loop in measured["loops"]}
        assert set(loops) == {"bare PyTorch", "portable-train", "Accelerate", "bare, again", "Trainer"}
        expected = loops["bare PyTorch"]["final_loss"]
        for loop in loops.values():
            assert [len(turn) for turn in loop["step_seconds"]] == [3, 3]
            assert loop["final_loss"] == pytest.approx(expected, rel=1e-6)
    assert capsys.readouterr().out.count("portable-train") == 2


def zero_loops(strategy: str, settings: dict[str, Any]) -> list[Result]:
    from benchmarks import zero

    return zero.measure(zero.Options(backend="cpu", small=True, **settings), strategy)


# The loops do not depend on the stage, which only DeepSpeed implements.
@pytest.mark.parametrize(
    ("strategy", "count", "offload"),
    [("zero3", 2, False), pytest.param("zero1", 1, True, marks=pytest.mark.exhaustive)],
)
def test_zero_benchmark_loops_take_same_steps(
    strategy: str, count: int, offload: bool, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    from benchmarks import zero

    settings = {"steps": 2, "warmup": 1, "rounds": 2, "control": True}
    settings |= {"ranks": count, "offload": offload, "micro_batch_size": 2}
    found = ranks.run(count, zero_loops, strategy, settings)
    results = {result.name: result for result in found}
    assert list(results) == ["bare DeepSpeed", "portable-train", "bare, again", "Trainer"]
    bare = results["bare DeepSpeed"]
    for name in ("portable-train", "bare, again"):
        assert results[name].turn_losses == pytest.approx(bare.turn_losses, rel=1e-5)
    assert table(list(results.values()), zero.BASELINE).count("\n") == 4
