"""The benchmark of the training step still runs, and its loops still do the same. Times are not looked at."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import train_overhead
from benchmarks.harness import Result, check_losses
from benchmarks.train_overhead import BASELINE, SAME_LOSS, main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that share a tiny step mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_all_loops_take_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    flags = "--small --backend cpu --steps 3 --warmup 1 --rounds 2 --control --clock cpu --json"
    assert main([*flags.split(), str(path)]) == 0

    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.train_overhead --small")
    assert {"cpu", "torch", "transformers", "accelerate"} <= document["machine"].keys()
    assert [measured["micro_batch_size"] for measured in document["measured"]] == [8, 4]
    for measured in document["measured"]:
        loops = {loop["name"]: loop for loop in measured["loops"]}
        assert set(loops) == {"bare PyTorch", "portable-train", "Accelerate", "bare, again", "Trainer"}
        expected = loops["bare PyTorch"]["final_loss"]
        for loop in loops.values():
            assert [len(turn) for turn in loop["step_seconds"]] == [3, 3]
            assert loop["final_loss"] == pytest.approx(expected, rel=1e-6)
        for name in ("portable-train", "Accelerate", "bare, again"):
            assert loops[name]["turn_losses"] == pytest.approx(loops["bare PyTorch"]["turn_losses"], rel=1e-6)
        losses = loops["bare PyTorch"]["turn_losses"]
        assert losses[-1] < losses[0]

    printed = capsys.readouterr().out
    assert printed.count("portable-train") == 2
    assert "fp32, 2 x 4 sequences a step" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_loss": 1.25 * (1 + 5e-7)}, None),
        ({"final_loss": 1.25 * (1 + 2e-6)}, r"1\.2500\d+ where the bare loop's is 1\.250000000"),
        ({"turn_losses": [2.0, 1.6]}, r"loss is 1\.6"),
        ({"turn_losses": [None, 1.5]}, None),
    ],
)
def test_a_loss_that_differs_fails(changes: dict[str, Any], message: str | None) -> None:
    bare = Result(BASELINE, [[0.1]], [2.0, 1.5], 1.25)
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_losses([bare, replace(bare, name="portable-train", **changes)], BASELINE, SAME_LOSS)


def test_a_step_cannot_be_cut_in_unequal_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_overhead.parse(["--micro-batch", "3"])
    assert "must divide the 8 sequences" in capsys.readouterr().err
