"""State of a rank and its host, and cleanup of files. ``test_launch.py`` tests complete ranks."""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from portable.converters.writers.replace_folder import (
    create_locked_folder,
    release_folder_lock,
    try_lock_folder,
)
from portable.errors import UserError
from portable.ranks import collectives
from portable.ranks.collectives import reduce_any, sum_over_ranks
from portable.ranks.failure_notification import _FailureArbiter
from portable.ranks.oom_kills import has_new_oom_kill, read_oom_kills
from portable.ranks.open_file_limit import raise_open_file_limit
from portable.ranks.rendezvous import agree_on_attempt_name
from portable.ranks.slurm import parse_first_host, read_slurm_rank_variables
from portable.temporary_folder import create_scratch_folder
from tests.ranks import RankPool

STANDS_STILL = """
import sys, time
from pathlib import Path
from portable.ranks import watchdog
from portable.data.samples.loader import BatchIterator

watchdog.GRACE_SECONDS = 0.1
def a_step_that_never_ends():
    time.sleep(60)

dog = watchdog.Watchdog(rank=3, timeout_seconds=1.5, folder=Path(sys.argv[1]), report=print)
with dog:
    batches = BatchIterator(int, range(8), 0, False)
    dog.watch_batches(batches)
    for batch in batches:
        time.sleep(2 if batch == 0 else 0)  # the first may take longer
        if batch == 2:
            with dog.pause():
                time.sleep(2)
        if batch == 5:
            print("standing still", flush=True)
            a_step_that_never_ends()
"""


def test_watchdog_ends_hanging_rank_and_names_function(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STANDS_STILL, str(tmp_path / "hang")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == 1
    first, line = ended.stdout.splitlines()
    assert first == "standing still"
    assert re.match(r"no progress for \d+ s; rank 3 was in a_step_that_never_ends \(<string>:9\)", line)
    stacks = (tmp_path / "hang" / "rank-3.txt").read_text()
    assert "line 9 in a_step_that_never_ends" in stacks


def join_attempt(store: Any, rank: int, world_size: int) -> str:
    return agree_on_attempt_name(store, rank, world_size, datetime.timedelta(seconds=20))


def test_join_attempt_gives_new_name_per_attempt() -> None:
    """The store outlives the attempts. The second one begins before one of its ranks has arrived."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        names = []
        for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
            attempts = []
            for rank in order:
                attempts.append(pool.submit(join_attempt, store, rank, 3))
                time.sleep(0.05)
            names.append({attempt.result() for attempt in attempts})
    assert [len(name) for name in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def sums_of_ranks(ring_ranks: int) -> list[list[float]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_MAX_RING_RANKS", ring_ranks)
        return [sum_over_ranks([rank, 1]), sum_over_ranks([0.5]), [reduce_any(rank == 4), reduce_any(False)]]


@pytest.mark.parametrize("ring_ranks", [0, 64], ids=["tree", "ring"])
def test_rank_sums_are_exact_for_tree_and_ring(ring_ranks: int, ranks: RankPool) -> None:
    assert ranks.run(5, sums_of_ranks, ring_ranks) == [[10, 5], [2.5], [True, False]]


def test_raise_open_file_limit_rejects_low_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 1024)]
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    raise_open_file_limit(100)
    assert limits[-1] == (1024, 1024)
    with pytest.raises(UserError, match=r"RLIMIT_NOFILE: 1024 ranks need up to 4352 .* hard limit is 1024"):
        raise_open_file_limit(1024)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_oom_kills_are_counted_on_every_cgroup_level(tmp_path: Path) -> None:
    """The files have the layout of both versions of cgroups. Without them, nothing is reported."""
    put(tmp_path / "proc/vmstat", "nr_free_pages 7\n")
    assert read_oom_kills(tmp_path) == {} and has_new_oom_kill({}, {}) is None
    put(tmp_path / "proc/vmstat", "nr_free_pages 7\noom_kill 4\n")
    put(tmp_path / "proc/self/cgroup", "4:cpu,memory:/batch/job1\n1:name=systemd:/x\n0::/batch/job1\n")
    put(tmp_path / "sys/fs/cgroup/memory/batch/job1/memory.oom_control", "under_oom 0\noom_kill 2\n")
    put(tmp_path / "sys/fs/cgroup/batch/memory.events", "low 0\noom 3\noom_kill 3\n")
    before = read_oom_kills(tmp_path)
    assert sorted(before.values()) == [2, 3, 4]
    assert has_new_oom_kill(before, read_oom_kills(tmp_path)) is False
    put(tmp_path / "sys/fs/cgroup/batch/memory.events", "low 0\noom 4\noom_kill 4\n")
    assert has_new_oom_kill(before, read_oom_kills(tmp_path)) is True


# -- variables of srun, as its documentation and its source name them; real ones: tests/gpu/test_nodes.py ---

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
}


def test_slurm_task_is_rank() -> None:
    variables = read_slurm_rank_variables(STEP)
    port = int(variables.pop("MASTER_PORT"))
    assert variables == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
    }
    assert 20_000 <= port < 32_000
    other = read_slurm_rank_variables(
        {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    )
    assert other["LOCAL_WORLD_SIZE"] == "4"
    assert (other["MASTER_ADDR"], other["MASTER_PORT"]) == ("gpu007", str(port))
    assert read_slurm_rank_variables({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != str(port)
    given = read_slurm_rank_variables({**STEP, "MASTER_ADDR": "ib0.head", "MASTER_PORT": "29500"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("ib0.head", "29500")
    assert parse_first_host("rack[2,5]n[10-12].example.org,x") == "rack2n10.example.org"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun under srun
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # one task, which starts the ranks of its node
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the script of a batch job
    ],
    ids=["no SLURM", "torchrun", "one task", "batch script"],
)
def test_slurm_variables_are_ignored_outside_of_steps(environment: dict[str, str]) -> None:
    assert read_slurm_rank_variables(environment) == {}


@pytest.mark.parametrize("damage", [{"SLURM_STEP_TASKS_PER_NODE": "many"}, {"SLURM_NODEID": "7"}])
def test_slurm_variables_with_errors_are_rejected(damage: dict[str, str]) -> None:
    with pytest.raises(UserError, match="srun: the variables of srun do not define the rank of this task"):
        read_slurm_rank_variables({**STEP, **damage})


# -- temporary files -------------------------------------------------------------------------------------


KILLED = """
import os, signal
from portable.temporary_folder import create_scratch_folder
with create_scratch_folder("kind") as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the system's folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_scratch_folder_of_killed_process_is_removed(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = temporary.iterdir()
    assert str(left) == killed.stdout.strip()
    with create_scratch_folder("other"):
        assert left.exists()
    with create_scratch_folder("kind") as folder:
        assert [*temporary.iterdir()] == [folder]
        (folder / "file").touch()
    assert [*temporary.iterdir()] == []


def test_scratch_folder_in_use_or_of_other_user_is_kept(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (temporary / "kind-link").symlink_to(kept)
    (temporary / "kind-file").touch()
    with create_scratch_folder("kind") as one, create_scratch_folder("kind") as other:
        assert one != other
        assert one.exists()
        assert other.exists()
    assert kept.exists()
    assert sorted(path.name for path in temporary.iterdir()) == ["kind-file", "kind-link"]
    (temporary / "kind-theirs").mkdir()
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    with create_scratch_folder("kind"):
        assert (temporary / "kind-theirs").exists()


@pytest.mark.parametrize("kind", ["scratch", "output"])
def test_new_folder_removed_as_leftover_is_replaced(
    kind: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process locks the new folder before its creator does, and removes the folder."""
    create = os.mkdir
    removed: list[Path] = []

    def create_and_remove(path: str | Path, mode: int = 0o777) -> None:
        create(path, mode)
        if not removed:
            removed.append(Path(path))
            lock = try_lock_folder(Path(path))

            def remove() -> None:
                shutil.rmtree(path)
                release_folder_lock(lock)

            threading.Timer(0.3, remove).start()

    monkeypatch.setattr(os, "mkdir", create_and_remove)
    if kind == "scratch":
        with create_scratch_folder("kind") as folder:
            assert folder not in removed and try_lock_folder(folder) is None
    else:
        folder, lock = create_locked_folder(temporary / "out")
        assert folder not in removed and try_lock_folder(folder) is None
        release_folder_lock(lock)
    assert not removed[0].exists()


def test_native_stdout_may_be_closed() -> None:
    script = "from portable.terminal import discard_native_stdout\nwith discard_native_stdout(): print(1)"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} >&-"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


# -- notification of failures ------------------------------------------------------------------------------


def connect_to(arbiter: _FailureArbiter, rank: int) -> socket.socket:
    """Connect to rank 0 as another rank does, and wait for the answer."""
    connection = socket.create_connection(tuple(arbiter.addresses[0]), timeout=10)
    hello = {"token": arbiter.token, "rank": rank, "host": "node"}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    assert json.loads(connection.recv(1000)) == {"host": "node-0"}
    return connection


@pytest.fixture
def arbiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[_FailureArbiter]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    arbiter = _FailureArbiter("node-0")
    yield arbiter
    arbiter.close(others_can_continue=True)


@pytest.mark.parametrize(
    "line",
    [b"1", b"[]", '{"token": "\u00e9"}'.encode(), b'{"token": null}', b"[" * 60_000, b"GET / HTTP/1.1"],
    ids=range(6),
)
def test_messages_of_strangers_do_not_end_failure_detection(line: bytes, arbiter: _FailureArbiter) -> None:
    """The port is open to other machines if the run has several nodes."""
    with socket.create_connection(tuple(arbiter.addresses[0]), timeout=10) as stranger:
        stranger.sendall(line + b"\n")
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    connect_to(arbiter, 1).close()


@pytest.mark.parametrize(("others_can_continue", "expected"), [(True, "leaves"), (False, "failure")])
def test_ranks_notice_end_of_rank_0(
    others_can_continue: bool, expected: str, arbiter: _FailureArbiter
) -> None:
    """An interrupt of rank 0 ends all ranks."""
    with connect_to(arbiter, 1) as connection:
        arbiter.close(others_can_continue=others_can_continue)
        assert list(json.loads(connection.recv(1000))) == [expected]
