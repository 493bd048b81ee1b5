"""The parsers under hypothesis: success or one line of refusal, no hang, no more memory than allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fuzz(folder: Path, examples: int, seconds: int) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux, for the memory limit")
    made = subprocess.run(
        [sys.executable, "-m", "tests.converters.fuzz_parsers", str(folder), str(examples)],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-6000:]


def test_fuzz(tmp_path: Path) -> None:
    fuzz(tmp_path, examples=150, seconds=240)


@pytest.mark.exhaustive
def test_fuzz_for_long(tmp_path: Path) -> None:
    fuzz(tmp_path, examples=5000, seconds=1800)
