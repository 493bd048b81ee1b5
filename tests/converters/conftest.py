"""Checkpoints that torch wrote, made once a session."""

from __future__ import annotations

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
