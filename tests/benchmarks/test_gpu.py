"""The benchmark for one GPU still runs, tiny and on the CPU. Times are not looked at."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.gpu import in_process_of_its_own, main, step_table
from benchmarks.gpu_work import CONTESTANTS, FULL, ROWS, SMALL, write_texts
from portable.config import load_config
from portable.model.build import build_model, model_config
from portable.model.flops import parameter_count

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert main(["--small", "--rounds", "1", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.gpu --small")
    assert {"cpu", "torch", "transformers", "accelerate"} <= document["machine"].keys()

    step = {result["name"]: result for result in document["step"]}
    assert set(step) == set(CONTESTANTS)
    for result in step.values():
        assert result["tokens_per_second"] > 0
    for name in ("portable-train", "Accelerate"):
        assert step[name]["loss"] == pytest.approx(step["bare PyTorch"]["loss"], rel=1e-5)

    rows = {row["name"]: row for row in document["guide"]}
    assert set(rows) == {row.name for row in ROWS}
    assert rows["vanilla"]["guide"] == [57.82, 8.86, 14949]
    assert not any("failed" in row for row in rows.values())
    assert all("seconds" in rows[name] for name in ("vanilla", "Adafactor", "8-bit Adam", "bf16"))

    roofline = document["roofline"]
    assert all(seconds >= 0 for seconds in roofline["bounds_seconds"].values())
    assert roofline["bounds_seconds"]["matrix products"] > 0
    assert roofline["spent_seconds"]["matrix products"] > 0

    printed = capsys.readouterr().out
    assert "x Trainer" in printed
    assert "14949" in printed
    assert "GB/s in a copy" in printed


@pytest.mark.usefixtures("quick_python")
def test_a_piece_in_a_process_of_its_own(tmp_path: Path) -> None:
    write_texts(tmp_path, SMALL)
    found = in_process_of_its_own("step", 1, "small", "cpu", tmp_path)
    assert found["name"] == "portable-train"
    assert found["tokens_per_second"] > 0


def test_the_full_sizes_are_what_they_are_called() -> None:
    sizes = {}
    for name, config, task in (
        ("llama", FULL.llama, "causal-lm"),
        ("bert", FULL.bert, "sequence-classification"),
    ):
        given = {"model.config": config, "model.task": task, "data.source": "x.jsonl", "data.packing": False}
        settings = load_config(None, given).model
        sizes[name] = parameter_count(build_model(model_config(settings), settings))
    assert sizes["llama"] == pytest.approx(1.2e9, rel=0.03)
    assert sizes["bert"] == pytest.approx(335e6, rel=0.01)


def test_a_loop_that_learns_something_else_fails() -> None:
    def result(name: str, loss: float) -> dict[str, Any]:
        figures = {"tokens_per_second": 1.0, "step_seconds": [1.0], "mfu": 0.5, "peak_memory": 2**30}
        return {"name": name, "loss": loss, **figures}

    good = [result(name, 2.0) for name in CONTESTANTS]
    _, text = step_table([good], "fp32")
    assert "50.0%" in text
    off = [result(name, 2.1 if name == "portable-train" else 2.0) for name in CONTESTANTS]
    with pytest.raises(AssertionError, match=r"loss is 2\.1"):
        step_table([off], "fp32")


def test_a_contestant_that_does_not_fit_is_named() -> None:
    _, text = step_table([[{"name": name, "failed": "out of memory"} for name in CONTESTANTS]], "bf16")
    assert text.count("out of memory") == 4
