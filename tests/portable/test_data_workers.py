"""No data worker outlives the rank that began it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.portable.test_launch import alive
from tests.ranks import wait_for
from tests.zygote import Zygote


def load_and_wait(folder: str) -> None:
    """Be a rank with two data workers."""
    from pathlib import Path

    from portable.data.samples.base import PackedCausalSamples, SampleRange
    from portable.data.samples.loader import TrainLoader
    from tests.portable.data_support import token_cache

    samples = PackedCausalSamples(
        token_cache(Path(folder) / "cache", [list(range(200))]), SampleRange(0, 20), 8
    )
    batches = iter(TrainLoader(samples, global_batch_size=2, micro_batch_size=2, num_workers=2, seed=0))
    next(batches)
    (Path(folder) / "loading").write_text(str(os.getpid()))
    time.sleep(600)


def below(pid: int) -> list[int]:
    """Return the descendants of the process `pid`."""
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    children = [int(child) for child in done.stdout.split()]
    return children + [process for child in children for process in below(child)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no such order to the system")
def test_data_workers_end_with_a_killed_rank(tmp_path: Path, zygote: Zygote) -> None:
    call = f"from tests.portable.test_data_workers import load_and_wait; load_and_wait({str(tmp_path)!r})"
    started = zygote.start("python", "-c", call)
    note = tmp_path / "loading"
    wait_for(lambda: (note.exists() and note.read_text() != "") or started.poll() is not None)
    rank = int(note.read_text())
    processes = below(rank)
    assert len(processes) >= 3  # the server and two workers
    os.kill(rank, signal.SIGKILL)
    started.communicate(timeout=60)
    wait_for(lambda: not any(map(alive, processes)), 5)
