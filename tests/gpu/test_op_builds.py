"""Waiting for torch's lock on the build of an op, by a running process or by a killed one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from portable.gpu.zero import op_builds

OLD = time.time() - 2 * op_builds.ABANDONED_BUILD_SECONDS


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpp_extension, "_get_build_directory", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(op_builds, "_PATIENCE", 0.0)
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)
    return tmp_path / "lock"


def age(lock: Path) -> None:
    for path in (lock, lock.parent):
        os.utime(path, (OLD, OLD))


def test_op_build_waits_for_other_process(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    age(lock)  # it may take long: the process lives
    timer = threading.Timer(0.5, baton.release)
    timer.start()
    op_builds.wait_for_op_build("cpu_adam")
    timer.join()
    printed = capsys.readouterr().err
    assert (
        printed.count("\n") == 1 and "waiting for another process to build DeepSpeed's cpu_adam; " in printed
    )
    assert f"remove {lock}" in printed


def test_op_build_removes_lock_of_killed_process(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; from torch.utils.file_baton import FileBaton as B\n"
    code += "B(sys.argv[1]).try_acquire() and os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(lock)], check=False)
    assert lock.exists()
    age(lock)
    op_builds.wait_for_op_build("cpu_adam")
    assert not lock.exists()
    assert (
        f"removed the lock file {lock}, which an interrupted build of DeepSpeed's cpu_adam left"
        in capsys.readouterr().err
    )
    op_builds.wait_for_op_build("cpu_adam")
    assert not capsys.readouterr().err
