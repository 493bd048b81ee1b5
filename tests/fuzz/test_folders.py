"""A sample of the hostile folders, and a check that the observers detect each fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import observed
from tests.fuzz.folders import KINDS, Scratch

CASES = {"tokenizer": 12, "data": 12, "model": 4, "processor": 4, "run": 3}
RARE = ("processor", "run")
"""Kinds that only run with ``--all``."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.exhaustive) if kind in RARE else kind for kind in KINDS]
)
def test_commands_read_hostile_folders(kind: str) -> None:
    # A separate process, because the fuzz forks, and threads of this one may hold locks.
    command = [sys.executable, "-m", "tests.fuzz.folders", kind, "--count", str(CASES[kind]), "--seed", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def copy_by_program(scratch: Scratch) -> int:
    subprocess.run(["cp", scratch.outside / "notes.zip", scratch.out / "copy"], check=True)
    return 0


def read_environment(scratch: Scratch) -> int:
    return len(Path("/proc/self/environ").read_bytes()) * 0


def list_outside(scratch: Scratch) -> int:
    return len(os.listdir(scratch.outside)) * 0  # noqa: PTH208


def print_secret(scratch: Scratch) -> int:
    print(observed.MARKER)
    return 0


def write_outside(scratch: Scratch) -> int:
    (scratch.root / "new").touch()
    return 0


def wait_for_pipe(scratch: Scratch) -> int:
    os.mkfifo(scratch.out / "pipe")
    return len((scratch.out / "pipe").read_bytes())


def compute_for_ever(scratch: Scratch) -> int:
    while True:
        pass


def fail(scratch: Scratch) -> int:
    raise RuntimeError("a fault")


FAULTS: dict[Callable[[Scratch], int], str] = {
    copy_by_program: "opened .*notes.zip .inotify",
    read_environment: "open /proc/self/environ",
    list_outside: "os.listdir",
    print_secret: "printed a secret",
    write_outside: "wrote ",
    wait_for_pipe: "exit code blocked",
    compute_for_ever: "exit code used",
    fail: "a traceback",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_observers_report_each_fault(
    fault: Callable[[Scratch], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "LONGEST", 1.0)
    scratch = Scratch(tmp_path / "scratch")
    scratch.out.mkdir()
    observer = scratch.observer()
    try:
        assert observer.run(lambda: 0)[1] == []
        promises = observer.run(lambda: fault(scratch))[1]
        assert any(re.match(FAULTS[fault], promise) for promise in promises), promises
    finally:
        observer.close()
