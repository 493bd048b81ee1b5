"""Checkpoints that torch and DeepSpeed wrote, made once a session."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DCP checkpoints from 1 to 4 ranks, with `<name>.ref.pt` beside each."""
    out = tmp_path_factory.mktemp("dcp")
    script = Path(__file__).with_name("make_dcp.py")
    made = subprocess.run(
        [sys.executable, str(script), str(out)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def written_xla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PyTorch/XLA checkpoints, with `<name>.ref.pt` beside each."""
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    out = tmp_path_factory.mktemp("xla")
    script = Path(__file__).with_name("make_xla.py")
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}
    writers = [
        subprocess.Popen(
            [sys.executable, str(script), str(out), kind],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for kind in ("fsdp", "spmd")  # torch_xla cannot do both in one process
    ]
    for writer in writers:
        _, said = writer.communicate()
        assert writer.returncode == 0, said[-4000:]
    return out


@pytest.fixture(scope="session")
def deepspeed_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSpeed checkpoints from 1 to 4 ranks, with `<name>.<step>.ref.pt` beside each."""
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "tests.converters.make_deepspeed", str(out)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert made.returncode == 0, made.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def written_universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSpeed runs, each made universal too, with `<name>.2.ref.pt` beside each."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    out = tmp_path_factory.mktemp("universal")
    command = [sys.executable, "-m", "tests.converters.make_universal", str(out)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert made.returncode == 0, made.stderr[-4000:]
    return out
