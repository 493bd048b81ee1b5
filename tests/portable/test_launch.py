"""Real ranks in real processes: started, failing, signalled, orphaned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from portable.errors import RunError, UserError
from portable.launch import failing, launch
from portable.lock import locked
from portable.loop import stop_signals
from portable.metrics import read_metrics
from portable.run import train_leg
from tests.runs import configured, flags, tiny

if TYPE_CHECKING:
    from collections.abc import Callable

BIN = Path(sys.executable).parent


def start(scratch: Path, settings: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
    command = [str(BIN / "portable-train"), *flags(settings), *arguments]
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def steps_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(folder)), default=0) if path.exists() else 0


def ranks_of(scratch: Path) -> dict[int, int]:
    """The process id of each rank of the launcher that now runs with this scratch folder."""
    newest = max(scratch.glob("portable-launch-*"), key=lambda path: path.stat().st_mtime_ns)
    fields = [path.name.split(".") for path in newest.glob("rank*.pid")]
    return {int(name.removeprefix("rank")): int(pid) for name, pid, _ in fields}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("rank", ["0", "1"])
def test_on_a_terminal_ctrl_c_is_answered_at_once(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not only when the step is over, by which time a person would have pressed it again."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("portable.quiet.sys.stderr.isatty", lambda: True)
    with stop_signals() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested()
    assert ("stopping after this step" in capfd.readouterr().err) == (rank == "0")


@pytest.mark.slow
def test_signals_and_a_killed_launcher(tmp_path: Path, corpus: Path) -> None:
    """One run of many steps, ended three ways, and no step lost or done twice."""
    whole, folder, scratch = tmp_path / "whole", tmp_path / "run", tmp_path / "scratch"
    # A larger model than elsewhere, so that a step takes long enough to be interrupted.
    settings = tiny(
        folder,
        corpus,
        train__steps=400,
        train__warmup_steps=2,
        train__learning_rate=1e-3,
        train__micro_batch_size=1,
        checkpoint__every_steps=10,
        data__eval_fraction=0,
        log__sample_tokens=0,
    )

    # SIGTERM: the step is finished, a checkpoint saved, exit code 75.
    run = start(scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) >= 3 or run.poll() is not None)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 75, errors
    stopped = steps_logged(folder)
    newest = sorted(p.name for p in (folder / "checkpoints").iterdir())[-1]
    assert newest == f"step-{stopped:06d}"
    assert f"stopped at step {stopped}" in errors

    # SIGKILL of the launcher: its ranks end with it, and the folder is free again.
    run = start(scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) >= stopped + 12 or run.poll() is not None)
    workers = ranks_of(scratch)
    assert sorted(workers) == [0, 1]
    assert all(alive(pid) for pid in workers.values())
    with pytest.raises(UserError, match="in use"), locked(folder):
        pass
    run.kill()
    run.communicate()
    wait_for(lambda: not any(alive(pid) for pid in workers.values()), 10)
    size = (folder / "metrics.jsonl").stat().st_size
    time.sleep(0.3)
    assert (folder / "metrics.jsonl").stat().st_size == size
    with locked(folder):
        pass

    # One rank killed: the launcher says which, and how it ended.
    before = steps_logged(folder)
    run = start(scratch, settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) > before or run.poll() is not None)
    os.kill(ranks_of(scratch)[1], signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "error: rank 1 failed first: it was killed by SIGKILL" in errors

    # And it still goes on to the end; on one rank now, which moves no loss by more than rounding.
    assert train_leg("cpu", configured(folder, corpus, **_dunder(settings))) == 0
    assert train_leg("cpu", configured(whole, corpus, **_dunder(settings))) == 0
    ours = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
    theirs = {row["step"]: row["loss"] for row in read_metrics(whole) if "loss" in row}
    assert list(ours) == list(range(1, 401))
    # Chaos multiplies rounding differences; over the steps that the interruptions fell into they are small.
    upto = stopped + 20
    assert [ours[s] for s in range(1, upto)] == pytest.approx([theirs[s] for s in range(1, upto)], rel=1e-4)


def _dunder(settings: dict[str, Any]) -> dict[str, Any]:
    return {k.replace(".", "__"): v for k, v in settings.items() if k != "output_dir"}


@pytest.mark.slow
def test_torchrun_is_joined(tmp_path: Path, corpus: Path) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "portable.cli"]
    settings = tiny(tmp_path, corpus, train__steps=2, train__micro_batch_size=1)
    done = subprocess.run([*command, *flags(settings)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "checkpoints" / "step-000002" / "trainer_state.json").read_text())
    assert state["world_size"] == 2


def torchrun(settings: dict[str, Any]) -> subprocess.Popen[str]:
    """Two ranks under torch's own launcher."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "portable.cli"]
    return subprocess.Popen(
        [*command, *flags(settings)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def assert_told_once(errors: str, message: str) -> None:
    """``message`` on one line, and no rank with a traceback of its own; torchrun prints one of its own."""
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, errors
    assert message in told[0]
    assert f"{Path(__file__).parents[2] / 'portable'}/" not in errors, errors
    assert "onnection" not in errors.split("torch.distributed.elastic")[0], errors


def test_a_refusal_on_one_rank_ends_the_others_quietly(tmp_path: Path, corpus: Path) -> None:
    settings = tiny(tmp_path, corpus, train__micro_batch_size=1)
    with locked(tmp_path):  # which rank 0 alone asks for
        begin = time.monotonic()
        _, errors = torchrun(settings).communicate(timeout=120)
    assert_told_once(errors, "in use")
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_failure_on_one_rank_ends_the_others_quietly(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "checkpoints").touch()  # a file, where rank 0 makes a folder
    _, errors = torchrun(tiny(tmp_path, corpus, train__micro_batch_size=1)).communicate(timeout=120)
    assert_told_once(errors, "could not be written")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGKILL, 45), (signal.SIGSTOP, 75)], ids=["killed", "stopped"]
)
def test_all_end_within_a_set_time_under_torchrun(
    number: signal.Signals, seconds: float, tmp_path: Path, corpus: Path
) -> None:
    settings = tiny(
        tmp_path,
        corpus,
        train__steps=100_000,
        train__micro_batch_size=1,
        log__hang_timeout=4,
        checkpoint__every_steps=None,
    )
    run = torchrun(settings)
    wait_for(lambda: steps_logged(tmp_path) > 3 or run.poll() is not None)
    workers = ranks_under(run.pid)
    assert sorted(workers) == [0, 1]
    os.kill(workers[1], number)
    begin = time.monotonic()
    _, errors = run.communicate(timeout=120)
    assert time.monotonic() - begin < seconds
    assert run.returncode != 0
    assert not any(alive(pid) for pid in workers.values())
    if number == signal.SIGSTOP:
        assert "error: nothing has moved for " in errors
        assert "train_step" in (tmp_path / "hang" / "rank-0.txt").read_text()


def ranks_under(launcher: int) -> dict[int, int]:
    """The process id of each rank that ``launcher`` has started."""
    found = {}
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for pid in (task / "children").read_text().split():
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            if b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(pid)
    return found


def _rank_function(how: str) -> int:
    rank = int(os.environ["RANK"])
    if rank == 1 and how == "refuses":
        raise UserError("data.source: nothing there")
    if rank == 1 and how == "breaks":
        raise ValueError("a bug of ours")
    if rank == 1 and how == "exits":
        os._exit(9)
    if how == "killed":
        # Rank 1 is killed, and the other fails in its wake, as soon as it can notice.
        note = Path(os.environ["NOTE_OF_RANK_1"])
        if rank == 1:
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: note.exists() and note.read_text() != "" and not alive(int(note.read_text())))
        raise RuntimeError("connection closed by peer")
    if how == "slow to end":
        # Rank 0 fails, and has much to tear down before it says so; the other fails in its wake meanwhile.
        note = Path(os.environ["NOTE_OF_RANK_0"])
        if rank == 0:
            failing()
            note.touch()
            time.sleep(2)
            raise RunError("the disk is full")
        wait_for(note.exists)
        failing()
        raise RuntimeError("connection closed by peer")
    if how == "asked twice":
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        Path(os.environ["NOTES"], str(rank)).touch()
        time.sleep(60)
    if how == "returns":
        return 75
    time.sleep(60)
    return 0


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("refuses", UserError, "data.source: nothing there"),
        ("breaks", RunError, "rank 1 failed first: ValueError: a bug of ours"),
        ("exits", RunError, "rank 1 failed first: it ended with exit code 9"),
        ("slow to end", RunError, "rank 0 failed first: the disk is full"),
    ],
)
def test_the_first_rank_that_fails_is_reported(
    how: str,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NOTE_OF_RANK_0", str(tmp_path / "fails"))
    begin = time.monotonic()
    with pytest.raises(kind, match=message):
        launch(_rank_function, (how,), ranks=2)
    assert time.monotonic() - begin < 50  # the other rank was ended, not waited for
    # A traceback is for our bugs only, and not for what they led to on other ranks.
    assert capfd.readouterr().err.count("Traceback (most recent") == (how == "breaks")


def test_a_second_signal_acts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path))

    def ask_twice() -> None:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    threading.Thread(target=ask_twice).start()
    with pytest.raises(RunError, match="stopped at once by a second signal"):
        launch(_rank_function, ("asked twice",), ranks=2)


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ([0, 1], "killed by SIGKILL, by the kernel, which ran out of host memory; set this lower"),
        ([3, 3], "though the kernel counts no kill for memory since the start"),
        (
            [None, None],
            "killed by SIGKILL, most likely by the kernel for want of host memory; set this lower",
        ),
    ],
    ids=["counted", "not counted", "no counter"],
)
def test_what_a_kill_most_likely_means(
    counted: list[int | None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill is real; the kernel's counter of kills for memory is emulated."""
    monkeypatch.setenv("NOTE_OF_RANK_1", str(tmp_path / "note"))
    readings = iter([{} if value is None else {"/proc/vmstat": value} for value in counted])
    monkeypatch.setattr("portable.launch.oom_kills", lambda: next(readings))
    with pytest.raises(RunError) as caught:
        launch(_rank_function, ("killed",), ranks=2, memory_advice="set this lower")
    assert str(caught.value).startswith("rank 1 failed first: it was killed by SIGKILL")
    assert words in str(caught.value)
    assert "set this lower" in str(caught.value)


def test_a_refusal_in_a_rank_is_one_line(tmp_path: Path, corpus: Path) -> None:
    settings = tiny(tmp_path / "out", corpus, data__text_field="nowhere", train__micro_batch_size=1)
    run = start(tmp_path / "scratch", settings, "--nproc", "2")
    _, errors = run.communicate(timeout=90)
    assert run.returncode == 2
    assert [line[:7] for line in errors.splitlines()] == ["error: "], errors
    assert not (tmp_path / "out").exists()


def test_a_signal_before_the_ranks_are_up_is_not_lost(tmp_path: Path, corpus: Path) -> None:
    scratch = tmp_path / "scratch"
    run = start(scratch, tiny(tmp_path / "out", corpus, train__micro_batch_size=1), "--nproc", "2")
    wait_for(lambda: bool(list(scratch.glob("portable-launch-*"))) or run.poll() is not None)
    time.sleep(1.0)  # the launcher has its handlers, the ranks are still importing torch
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=90)
    assert run.returncode == 1
    assert errors.splitlines() == ["error: stopped by a signal before the first step; nothing was saved"]


def test_the_ranks_exit_code_is_handed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert launch(_rank_function, ("returns",), ranks=2) == 75
    assert capsys.readouterr().err == "waiting for 2 ranks to load\n"


def test_one_rank_that_stops_ends_all_and_it_is_said_which(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "run"
    settings = tiny(
        folder,
        corpus,
        train__steps=100_000,
        train__micro_batch_size=1,
        log__hang_timeout=4,
        checkpoint__every_steps=None,
    )
    run = start(tmp_path / "scratch", settings, "--nproc", "2")
    wait_for(lambda: steps_logged(folder) > 3 or run.poll() is not None)
    os.kill(ranks_of(tmp_path / "scratch")[1], signal.SIGSTOP)
    _, errors = run.communicate(timeout=90)
    assert run.returncode == 1
    told = next(line for line in errors.splitlines() if line.startswith("error: "))
    assert "nothing has moved for " in told
    assert "rank 0 was in " in told
    assert "rank 1 did not answer" in told
    assert "train_step" in (folder / "hang" / "rank-0.txt").read_text()
