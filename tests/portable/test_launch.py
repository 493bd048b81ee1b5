"""Real ranks in real processes: start, failure, signals, and a killed launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.errors import ReportedElsewhereError, RunError, UserError
from portable.loop import StopSignals
from portable.output.output_dir import lock_run_folder
from portable.ranks.launch import launch_ranks, report_hang
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.ranks import free_port, wait_for
from tests.runs import TINY_MODEL, configured, flags, tiny
from tests.zygote import Zygote

AT_MOST = 300  # seconds, for waits that would otherwise never end


def start(zygote: Zygote, scratch: Path, settings: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
    """Start a run whose launcher has this scratch folder."""
    scratch.mkdir(exist_ok=True)
    return zygote.start("portable-train", *flags(settings), *arguments, TMPDIR=str(scratch))


def steps_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(folder)), default=0) if path.exists() else 0


def ranks_of(scratch: Path) -> dict[int, int]:
    """Return the process id of each rank of the launcher that now runs with this scratch folder."""
    newest = max(scratch.glob("portable-launch-*"), key=lambda path: path.stat().st_mtime_ns)
    fields = [path.name.split(".") for path in newest.glob("rank*.pid")]
    return {int(name.removeprefix("rank")): int(pid) for name, pid, _ in fields}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_is_acknowledged_immediately_on_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("portable.terminal.sys.stderr.isatty", lambda: True)
    signals = StopSignals()
    signals.install_handlers()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore_handlers()
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_repeated_sigterm_does_not_terminate_saving_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM and other schedulers send SIGTERM more than once."""
    monkeypatch.setattr("portable.errors._is_end_requested", False)
    handler = signal.getsignal(signal.SIGTERM)
    signals = StopSignals()
    signals.install_handlers()
    try:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested
    finally:
        signals.restore_handlers()
    assert signal.getsignal(signal.SIGTERM) is handler
    # The launcher that sent the signal has already reported the first failure.
    monkeypatch.setattr("portable.errors.time.sleep", None)
    ReportedElsewhereError("another rank failed", 1).wait_for_report()


@pytest.mark.slow
def test_launch_survives_signals_and_killed_launcher(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    """A long run is ended in three ways. No step is lost or repeated."""
    whole, folder, scratch = tmp_path / "whole", tmp_path / "run", tmp_path / "scratch"
    settings = tiny(
        folder,
        corpus,
        train__steps=100_000,
        train__warmup_steps=2,
        train__learning_rate=1e-3,
        train__micro_batch_size=3,
        checkpoint__every_steps=10,
        data__eval_fraction=0,
        log__sample_tokens=0,
    )

    # SIGTERM: the step is finished, a checkpoint saved, exit code 75.
    run = start(zygote, scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) >= 3 or run.poll() is not None)
    for _ in range(3):  # as a scheduler may
        run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=AT_MOST)
    assert run.returncode == 75, errors
    stopped = steps_logged(folder)
    newest = sorted(p.name for p in (folder / "checkpoints").iterdir())[-1]
    assert newest == f"step-{stopped:06d}"
    assert f"stopped at step {stopped}" in errors

    # SIGKILL of the launcher: its ranks end with it, and the folder is free again.
    run = start(zygote, scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) >= stopped + 12 or run.poll() is not None)
    workers = ranks_of(scratch)
    assert sorted(workers) == [0, 1]
    assert all(alive(pid) for pid in workers.values())
    with pytest.raises(UserError, match="in use"), lock_run_folder(folder):
        pass
    os.kill(parent_of(workers[0]), signal.SIGKILL)
    run.communicate(timeout=AT_MOST)
    wait_for(lambda: not any(alive(pid) for pid in workers.values()))
    with lock_run_folder(folder):
        pass

    # One rank is killed: the launcher reports the rank and the signal.
    before = steps_logged(folder)
    run = start(zygote, scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) > before or run.poll() is not None)
    os.kill(ranks_of(scratch)[1], signal.SIGKILL)
    _, errors = run.communicate(timeout=AT_MOST)
    assert run.returncode == 1
    assert "error: rank 1 failed first: it was killed by SIGKILL" in errors
    assert not list(scratch.glob("portable-launch-*"))  # nor files of the killed launcher

    # The run still continues, now on one rank. The losses differ only by rounding.
    end = steps_logged(folder) + 10
    for place in (folder, whole):
        assert run_rank("cpu", configured(place, corpus, **_dunder(settings), train__stop_after=end)) == 0
    ours = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
    theirs = {row["step"]: row["loss"] for row in read_metrics(whole) if "loss" in row}
    assert list(ours) == list(range(1, end + 1))
    # Rounding differences grow with the steps. They are small over the steps with interruptions.
    upto = stopped + 20
    assert [ours[s] for s in range(1, upto)] == pytest.approx([theirs[s] for s in range(1, upto)], rel=1e-5)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _dunder(settings: dict[str, Any]) -> dict[str, Any]:
    return {k.replace(".", "__"): v for k, v in settings.items() if k != "output_dir"}


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "portable.cli")
COMMAND, LAUNCHER = ("portable-train",), ("portable-train", "--nproc", "2")


@pytest.mark.parametrize(
    ("command", "given", "told"),
    [
        (TORCHRUN, {}, "in use by another run"),  # which only rank 0 requests
        (LAUNCHER, {"data__text_field": "nowhere"}, "no field 'nowhere'"),
        (COMMAND, {}, "MASTER_PORT={port}: another program uses this port on 127.0.0.1"),
    ],
    ids=["torchrun", "launcher", "port"],
)
def test_launch_prints_error_once(
    command: tuple[str, ...], given: dict[str, Any], told: str, tmp_path: Path, corpus: Path, zygote: Zygote
) -> None:
    """The error is one line, and no rank prints a traceback. Only torchrun prints its usual one."""
    settings = flags(tiny(tmp_path / "out", corpus, train__micro_batch_size=3, **given))
    environment: dict[str, Any] = {}
    with contextlib.ExitStack() as held:
        port = str(held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
        if command == COMMAND:
            environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if command == TORCHRUN:
            (tmp_path / "out").mkdir()
            held.enter_context(lock_run_folder(tmp_path / "out"))
        done = zygote.run(*command, *settings, **environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and told.format(port=port) in lines[0], done.stderr
    assert f"{Path(__file__).parents[2] / 'portable'}/" not in done.stderr
    assert "onnection" not in done.stderr.split("torch.distributed.elastic")[0]
    assert done.stderr.count("exitcode  : 2 ") == (command == TORCHRUN), "the other rank waited"
    if command != TORCHRUN:
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert command != LAUNCHER or done.stderr.count("\n") == 1
    assert command == TORCHRUN or not (tmp_path / "out").exists()


@pytest.mark.slow
def test_launch_names_rank_that_hangs(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    settings = tiny(
        folder,
        corpus,
        train__steps=1_000_000,
        train__micro_batch_size=3,
        log__hang_timeout=4,
        checkpoint__every_steps=None,
    )
    run = start(zygote, scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) > 3 or run.poll() is not None)
    workers = ranks_of(scratch)
    os.kill(workers[1], signal.SIGSTOP)
    _, errors = run.communicate(timeout=AT_MOST)
    assert run.returncode == 1
    assert not any(alive(pid) for pid in workers.values())
    told = next(line for line in errors.splitlines() if line.startswith("error: "))
    for words in ("no progress for ", "rank 0 was in ", "rank 1 did not respond"):
        assert words in told
    assert "portable/loop.py" in (folder / "hang" / "rank-0.txt").read_text()


KILLED_ONCE: dict[str, Any] = {
    "train__callbacks": ["tests.ranks:KilledOnce"],
    "train__micro_batch_size": 3,
    "checkpoint__every_steps": 2,
    "data__eval_fraction": 0,
    "log__sample_tokens": 0,
}


EXCHANGING: dict[str, Any] = {
    "strategy": "full_shard",
    "expert_parallel_size": 2,
    "model__config": {**TINY_MODEL, "model_type": "mixtral", "num_local_experts": 4},
    "adapter__type": "lora",
    "train__global_batch_size": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "more"),
    [(3, {}), pytest.param(4, EXCHANGING, marks=pytest.mark.exhaustive)],
    ids=["3", "experts"],
)
def test_killed_rank_ends_other_ranks_without_launcher(
    size: int, more: dict[str, Any], tmp_path: Path, corpus: Path, zygote: Zygote
) -> None:
    settings = tiny(tmp_path / "run", corpus, **{**KILLED_ONCE, "train__steps": 100_000, **more})
    settings["train.micro_batch_size"] = 2
    note, port = tmp_path / "note", str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "KILLED_ONCE": str(note)}
    shared["WORLD_SIZE"] = str(size)
    ranks = [
        zygote.start("portable-train", *flags(settings), RANK=str(rank), **shared) for rank in range(size)
    ]
    errors = [rank.communicate(timeout=AT_MOST)[1] for rank in ranks]
    assert time.time() - note.stat().st_mtime < 10
    assert [rank.returncode for rank in (ranks[0], *ranks[2:])] == [1] * (size - 1)
    assert errors[0].splitlines()[-1].startswith(f"error: rank 1 on {socket.gethostname()} failed first: ")
    assert "Traceback" not in "".join(errors) and "error" not in errors[2]


@pytest.mark.slow
def test_torchrun_restarts_ranks(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    settings = flags(tiny(tmp_path / "run", corpus, **KILLED_ONCE, train__steps=5))
    command = [TORCHRUN[0], "--max-restarts", "1", *TORCHRUN[1:]]
    done = zygote.run(*command, *settings, KILLED_ONCE=str(tmp_path / "note"))
    assert done.returncode == 0, done.stderr
    assert steps_logged(tmp_path / "run") == 5 and "resuming" in done.stderr


def _rank_function(how: str) -> int:
    rank = int(os.environ["RANK"])
    if rank == 1 and how == "refuses":
        raise UserError("data.source: nothing there")
    if rank == 1 and how.startswith("breaks"):
        raise ValueError("a bug of ours")
    if how == "killed":
        # Rank 1 is killed, and the other fails in its wake, as soon as it can notice.
        note = Path(os.environ["NOTES"], "1")
        if rank == 1:
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: note.exists() and note.read_text() != "" and not alive(int(note.read_text())))
        raise RuntimeError("connection closed by peer")
    if how == "breaks while awaited":
        folder = Path(os.environ["NOTES"]).parent
        wait_for(lambda: bool([*folder.glob("portable-launch-*/rank1.json")]))
        report_hang("no progress")
    if how == "asked twice":
        notes = Path(os.environ["NOTES"])

        def take_note(*_: object) -> None:
            (notes / f"{rank} was asked").touch()

        signal.signal(signal.SIGTERM, take_note)
        (notes / str(rank)).touch()
    if how == "listens":
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        found = sorted({*listening(os.getpid()), *listening(os.getppid())})
        # in a single write, because the other rank prints too
        os.write(1, f"listening on {' '.join(found)}\n".encode())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return 0
    time.sleep(2 * AT_MOST)
    return 0


def listening(pid: int) -> set[str]:
    """Return the addresses, in hexadecimal, on which a process listens for TCP."""
    sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path(f"/proc/net/{name}"))]
    return {f[1].split(":")[0] for f in lines if f[3] == "0A" and f"socket:[{f[9]}]" in sockets}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def report(how: str, counted: tuple[int | None, ...] = ()) -> None:
    """Run ``how`` on two ranks, and print the result of their launcher.

    Args:
        how: Name of the behavior, for ``_rank_function``.
        counted: Values of the kernel's counter of out-of-memory kills, before and after.
    """
    patch = pytest.MonkeyPatch()  # never undone: this process ends with it
    if counted:
        readings = iter([{} if value is None else {"/proc/vmstat": value} for value in counted])
        patch.setattr("portable.ranks.oom_kills.read_oom_kills", lambda: next(readings))
    if how == "breaks":
        patch.setattr("portable.ranks.launch.REPORT_SECONDS", 1.0)  # the other rank never reports
    if how == "asked twice":
        threading.Thread(target=ask_twice).start()
    try:
        launch_ranks(_rank_function, (how,), ranks=2, memory_advice="set this lower")
    except (UserError, RunError) as error:
        print(f"{type(error).__name__}: {error}")


def ask_twice() -> None:
    notes = Path(os.environ["NOTES"])
    for number in (2, 4):
        wait_for(lambda number=number: sum(1 for _ in notes.iterdir()) == number)  # type: ignore[misc]
        os.kill(os.getpid(), signal.SIGINT)


def reported(zygote: Zygote, folder: Path, *arguments: object) -> tuple[str, str]:
    """Return the output of :func:`report` and the standard error stream."""
    notes = folder / "notes"  # files by which ranks signal each other
    notes.mkdir()
    call = f"from tests.portable.test_launch import report; report(*{arguments!r})"
    done = zygote.run("python", "-c", call, NOTES=str(notes), TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


KILLED = "RunError: rank 1 failed first: it was killed by SIGKILL"
FIRST_LINES = {
    "refuses": "UserError: data.source: nothing there",
    "breaks": "RunError: rank 1 failed first: ValueError: a bug of ours (traceback above)",
    "breaks while awaited": "RunError: rank 1 failed first: ValueError: a bug of ours (traceback above)",
    "killed, counted": f"{KILLED} by the kernel, which ran out of host memory; set this lower",
    "killed, not counted": f"{KILLED}, but not by the kernel's OOM killer",
    "asked twice": "StoppedError: stopped by a second Ctrl-C without saving; there is no checkpoint yet",
}
"""Behavior of the ranks, and the start of the launcher's answer."""
OOM_KILLS = {"killed, counted": (0, 1), "killed, not counted": (3, 3)}
"""Values of the kernel's counter of out-of-memory kills, before and after. The kills are real."""


@pytest.mark.parametrize("how", FIRST_LINES)
def test_launcher_names_first_failing_rank(how: str, tmp_path: Path, zygote: Zygote) -> None:
    """The launcher names the first failing rank, ends the other one without waiting, and loses no signal."""
    told, errors = reported(zygote, tmp_path, how.partition(",")[0], OOM_KILLS.get(how, ()))
    assert told.startswith(FIRST_LINES[how])
    assert ("set this lower" in told) == how.startswith("killed")
    # A traceback appears only for bugs, and not for their effects on other ranks.
    assert errors.count("Traceback (most recent") == how.startswith("breaks")


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ("from portable.ranks.launch import launch_ranks; launch_ranks(leave, (), ranks=2)", 0),
        (
            "from portable.cli import run_as_process; leave(); sys.argv[1:] = ['--nothing']; "
            "sys.exit(run_as_process())",
            2,
        ),
    ],
    ids=["launcher", "torchrun"],
)
def test_ranks_exit_without_freeing_interpreter(rank: str, code: int) -> None:
    """The exit handlers run. The processes are real, because forks of the zygote end differently."""
    words = [sys.executable, "-c", f"import sys; from tests.left import leave; {rank}"]
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=AT_MOST)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("handlers run") == (1 if code else 2)


def test_local_ranks_listen_only_on_loopback(tmp_path: Path, zygote: Zygote) -> None:
    """A process that reaches the store could redirect the connections of the ranks."""
    told, errors = reported(zygote, tmp_path, "listens")
    lines = [line for line in (told + errors).splitlines() if line.startswith("listening on")]
    assert lines == ["listening on 0100007F"] * 2  # 127.0.0.1
