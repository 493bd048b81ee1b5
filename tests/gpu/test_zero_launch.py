"""ZeRO under launchers of other programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import subprocess
from pathlib import Path

from tests.ranks import free_port
from tests.runs import flags, tiny
from tests.zygote import Zygote

ENVIRONMENT: dict[str, Any] = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"}
"""Launchers search for an accelerator when they start; there is none."""


def settings_of(folder: Path, corpus: Path, strategy: str) -> list[str]:
    return flags(tiny(folder, corpus, strategy=strategy, train__steps=2, train__micro_batch_size=1))


def check(folder: Path, strategy: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    state = json.loads((folder / "checkpoints" / "step-000002" / "trainer_state.json").read_text())
    assert (state["world_size"], state["strategy"]) == (2, strategy)
    assert done.stderr.count("step 2/2") == 1  # one rank speaks


def test_zero_trains_under_deepspeed_launcher(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    # What the command deepspeed does; it starts a process on each node, which starts the ranks.
    python = str(zygote.folder / "python")
    launcher = f"import sys; from deepspeed.launcher.runner import main; sys.executable = {python!r}; main()"
    command = ["python", "-c", launcher, "--num_gpus", "2", "--master_port", str(free_port())]
    command += ["--module", "portable.cli"]
    done = zygote.run(*command, *settings_of(tmp_path, corpus, "zero2"), **ENVIRONMENT, PYTHON_EXEC=python)
    check(tmp_path, "zero2", done)


def test_zero_trains_under_accelerate_launcher(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    command = ["accelerate", "launch", "--use_deepspeed", "--zero_stage", "3", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), "-m", "portable.cli"]
    done = zygote.run(*command, *settings_of(tmp_path, corpus, "zero3"), **ENVIRONMENT)
    check(tmp_path, "zero3", done)
