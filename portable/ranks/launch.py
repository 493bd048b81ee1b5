"""Starting local ranks, and making sure that none outlives its launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.errors import (
    RUN_ERROR,
    USER_ERROR,
    ReportedElsewhereError,
    RunError,
    StoppedError,
    UserError,
    one_line,
)
from portable.formatting import human_count
from portable.ranks import watchdog
from portable.ranks.oom_kills import killed_since, oom_kills
from portable.ranks.parent_death import die_with_parent, spawned_bound
from portable.temporary_folder import scratch_folder, temporary_files_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STOP_REQUESTED = "stop-requested"
_scratch: Path | None = None
"""Where this process, a rank that :func:`launch` started, leaves word for the launcher."""
_failed_at: float | None = None
"""When this rank began to fail."""
POLL = 0.1  # seconds between two looks at the ranks
REPORTING = 15.0  # seconds that a rank which failed for no known reason waits for the others' reports


def joined() -> bool:
    """Whether a launcher (torchrun, accelerate launch, srun, our own) has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def command(world_size: int, **options: object) -> str:
    """A ``portable-train`` command with ``options`` on as many ranks, for a person to type.

    Where the ranks are on several nodes, only their launcher can start them.
    """
    told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        return f"<the launcher of these {world_size} ranks> -m portable.cli {told}"
    return f"portable-train {told}" + (f" --nproc {world_size}" if world_size > 1 else "")


@dataclass(frozen=True)
class RankFailure:
    """The first rank that failed, and how."""

    rank: int
    exit_code: int
    message: str | None
    """One line for a person, where the rank could still write one."""
    hang: bool = False
    """Whether the message is of all ranks, on which nothing moved."""
    traceback: str = ""
    """Of what is a bug of ours. Those of ranks that failed in its wake are never shown."""


def launch(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    memory_advice: str = "",
    saved: Callable[[], object | None] = lambda: None,
) -> int:
    """Run ``function(*arguments)`` in ``ranks`` local processes under torch's elastic agent.

    Args:
        function: picklable; returns the exit code of its rank. ``UserError`` and ``RunError`` that it raises
            are reported once, whichever ranks raised them.
        arguments: picklable.
        ranks: how many.
        memory_advice: what to change where host memory runs out, for the message on a rank that the system
            killed.
        saved: looks for the checkpoint that a run which is stopped now can go on from.

    Returns:
        the exit code, which is the same on all ranks.

    Raises:
        UserError, RunError: what the first failing rank raised, or which one died and how.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from portable.ranks import rendezvous  # only here: it brings torch

    if sys.stderr.isatty():  # each loads the libraries anew, which takes seconds
        print(f"waiting for {human_count(ranks, 'rank')} to load", file=sys.stderr, flush=True)
    with scratch_folder("portable-launch") as folder:
        scratch = str(folder)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.register(),
            rdzv_endpoint=rendezvous.LOOPBACK,
            local_addr=rendezvous.LOOPBACK,
            max_restarts=0,
            monitor_interval=POLL,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        if sys.platform == "linux":  # gloo would listen where the machine's name leads
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        # The agent would answer a signal by ending the ranks within 30 seconds. Off the main thread it leaves
        # signals alone, and we pass them on: the ranks finish their step, save, and the agent sees them end.
        for chatty in ("torch.distributed.elastic", "torch.multiprocessing"):  # what failed, we say ourselves
            logging.getLogger(chatty).setLevel(logging.CRITICAL)
        kills_before = oom_kills()
        agent = ThreadPoolExecutor(1)
        with spawned_bound(), temporary_files_in(folder), _signals_passed_on(folder) as requests:
            running = agent.submit(
                elastic_launch(config, _rank_main), function, arguments, scratch, os.getpid()
            )
            try:
                while not wait([running], timeout=1).done:
                    _end_ranks_that_do_not_answer(Path(scratch))
                codes = running.result()
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                if failure.exitcode == -signal.SIGTERM and requests:
                    raise _stopped(requests, saved()) from None
                first = _first_failure(Path(scratch), rank, failure.exitcode)
                sys.stderr.write(first.traceback)
                for_memory = killed_since(kills_before, oom_kills())
                raise _as_exception(first, for_memory, memory_advice) from None
        return max(int(code) for code in codes.values())


def _stopped(requests: list[int], saved: object | None) -> StoppedError:
    """What to tell of a run that signals ended in the middle of a step, or before the first."""
    message = "stopped by a signal before the first step"
    if len(requests) > 1:
        message = "stopped at once by a second signal, without another save"
    if saved is None:
        message += "; there is no checkpoint yet, so the same command begins anew"
    else:
        message += f"; the same command goes on from {saved}"
    return StoppedError(message, requests[0])


@contextmanager
def _signals_passed_on(scratch: Path) -> Iterator[list[int]]:
    """Pass signals on to the ranks; yields a list of those that have come."""
    requests: list[int] = []

    def pass_on(number: int, _: object) -> None:
        requests.append(number)
        (scratch / STOP_REQUESTED).touch()  # for ranks that are still to come
        for pid in _processes(scratch).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _rank_main(function: Callable[..., int], arguments: tuple[Any, ...], scratch: str, launcher: int) -> int:
    die_with_parent(launcher)
    # A terminal's Ctrl-C reaches every process; the launcher alone answers it, and tells the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _scratch
    _scratch = Path(scratch)
    (Path(scratch) / f"rank{os.environ['RANK']}.{os.getpid()}.pid").touch()
    if (Path(scratch) / STOP_REQUESTED).exists():
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        return function(*arguments)
    except ReportedElsewhereError as error:
        time.sleep(5 * POLL)  # the rank that tells shall end first
        os._exit(error.exit_code)
    except (UserError, RunError) as error:
        code = USER_ERROR if isinstance(error, UserError) else RUN_ERROR
        _report(Path(scratch), code, one_line(error))
        # Not sys.exit: other threads (a loader, a collective that waits for this rank) must not hold us up.
        sys.stdout.flush()
        os._exit(code)
    except Exception as error:
        message = f"{type(error).__name__}: {one_line(error)} (traceback above)"
        _report(Path(scratch), RUN_ERROR, message, traceback=traceback.format_exc())
        # Where another rank failed or was killed, this one failed in its wake: the agent ends all as soon as
        # it sees one end, and the other shall have had its say.
        _wait_for_reports(Path(scratch))
        time.sleep(5 * POLL)
        os._exit(RUN_ERROR)


def failing() -> None:
    """Note that this rank fails, now: what ends is ended in order first, and only then is there a report."""
    global _failed_at
    _failed_at = _failed_at or time.time()


def _wait_for_reports(scratch: Path) -> None:
    """Wait until each rank has left word or is gone, for a while at most."""
    end = time.monotonic() + REPORTING
    while time.monotonic() < end:
        silent = [
            pid for rank, pid in _processes(scratch).items() if not (scratch / f"rank{rank}.json").exists()
        ]
        if not any(map(_exists, silent)):
            return
        time.sleep(POLL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def report_hang(message: str) -> None:
    """Leave word on where this rank stands, for the launcher, or for a person where another launcher is."""
    if _scratch is None:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        _report(_scratch, RUN_ERROR, message, hang=True)


def _report(scratch: Path, code: int, message: str, *, hang: bool = False, traceback: str = "") -> None:
    rank = int(os.environ["RANK"])
    about = {"rank": rank, "code": code, "message": message, "hang": hang, "traceback": traceback}
    text = json.dumps({**about, "time": _failed_at or time.time()})
    partial = scratch / f"rank{rank}.partial"
    partial.write_text(text, "utf-8")
    partial.rename(scratch / f"rank{rank}.json")


def _end_ranks_that_do_not_answer(scratch: Path) -> None:
    """Kill the ranks that left no word some time after another reported a hang: they may be stopped."""
    reports = [json.loads(path.read_text("utf-8")) for path in scratch.glob("rank*.json")]
    if any(report["hang"] and time.time() - report["time"] > 2 * watchdog.GRACE for report in reports):
        for rank, pid in _processes(scratch).items():
            if all(report["rank"] != rank for report in reports):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _processes(scratch: Path) -> dict[int, int]:
    """The process of each rank, by rank."""
    names = [path.name.split(".") for path in scratch.glob("rank*.pid")]
    return {int(rank.removeprefix("rank")): int(pid) for rank, pid, _ in names}


def _first_failure(scratch: Path, rank: int, exit_code: int) -> RankFailure:
    """Prefer what a rank wrote itself: once one has failed, others fail in its wake."""
    reports = [json.loads(path.read_text("utf-8")) for path in scratch.glob("rank*.json")]
    if hung := sorted((report for report in reports if report["hang"]), key=lambda report: report["rank"]):
        silent = sorted(_processes(scratch).keys() - {report["rank"] for report in hung})
        told = [report["message"] for report in hung] + [f"rank {rank} did not answer" for rank in silent]
        return RankFailure(hung[0]["rank"], RUN_ERROR, "; ".join(told), hang=True)
    # A rank that a signal killed writes nothing, and is the cause of what others then report.
    if exit_code < 0 or not reports:
        return RankFailure(rank, exit_code, None)
    # A refusal of input is the cause even if another rank, waiting for the refuser, failed a moment earlier.
    first = min(reports, key=lambda report: (report["code"] != USER_ERROR, report["time"]))
    return RankFailure(first["rank"], first["code"], first["message"], traceback=first["traceback"])


def _as_exception(failure: RankFailure, for_memory: bool | None, memory_advice: str) -> Exception:
    if failure.message is not None:
        if failure.exit_code == USER_ERROR:
            return UserError(failure.message)
        if failure.hang:
            return RunError(failure.message)
        return RunError(f"rank {failure.rank} failed first: {failure.message}")
    if failure.exit_code >= 0:
        return RunError(f"rank {failure.rank} failed first: it ended with exit code {failure.exit_code}")
    name = signal.Signals(-failure.exit_code).name
    cause = _why_killed(for_memory, memory_advice) if name == "SIGKILL" else ""
    return RunError(f"rank {failure.rank} failed first: it was killed by {name}{cause}")


def _why_killed(for_memory: bool | None, advice: str) -> str:
    """What a SIGKILL most likely means.

    Args:
        for_memory: whether the kernel's counters of kills for memory rose meanwhile; None: there are none.
        advice: what to change where host memory runs out.
    """
    advice = f"; {advice}" if advice else ""
    if for_memory:
        return f", by the kernel, which ran out of host memory{advice}"
    if for_memory is None:
        return f", most likely by the kernel for want of host memory{advice}"
    return (
        ", though the kernel counts no kill for memory since the start: by a person, or by what guards "
        f"memory or time here (a batch system, systemd-oomd). If it was for memory{advice}"
    )
