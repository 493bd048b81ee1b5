"""Launch local ranks. No rank outlives its launcher."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.console import print_error
from portable.converters.interrupts import ignore_interrupts
from portable.errors import (
    NOT_EXPORTED,
    REPORTING,
    RUN_ERROR,
    USER_ERROR,
    NotExportedError,
    ReportedElsewhereError,
    RunError,
    StoppedError,
    UserError,
    to_one_line,
)
from portable.formatting import format_count
from portable.ranks import watchdog
from portable.ranks.open_file_limit import prepare_open_files
from portable.ranks.parent_death import bind_spawned_processes, die_with_parent
from portable.ranks.process_exit import set_exit_code
from portable.temporary_folder import create_scratch_folder, redirect_temporary_files
from portable.terminal import shows_run_bars, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

STOP_REQUESTED = "stop-requested"
_scratch: Path | None = None
"""The folder for reports to the launcher, in a rank that :func:`launch` started."""
_failed_at: float | None = None
"""The time of this rank's failure."""
START_METHOD = "spawn"
_LOOPBACK, _MEETING = "127.0.0.1", datetime.timedelta(minutes=10)
OBEYING = 30.0  # seconds that ranks have to obey SIGTERM after the failure of another
POLL = 0.1  # seconds between looks for the reports of other ranks


def check_variables() -> None:
    """Check the variables that a launcher (torchrun, accelerate launch, srun, this program) sets."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None:
        raise _build_incomplete_error("WORLD_SIZE is", "RANK is")
    if world_size is None:
        raise _build_incomplete_error("RANK is", "WORLD_SIZE is")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        variables = to_one_line(f"RANK={rank} and WORLD_SIZE={world_size}")
        raise UserError(f"{variables} are set, but ranks go from 0 to WORLD_SIZE - 1; {_REMEDY}")


def check_meeting_place() -> None:
    """Check that the launcher has set the address at which the ranks connect.

    Raises:
        UserError: If ``MASTER_ADDR`` or ``MASTER_PORT`` is not set, and there are several ranks.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing and int(os.environ["WORLD_SIZE"]) > 1:
        are = "are" if len(missing) > 1 else "is"
        raise _build_incomplete_error("RANK and WORLD_SIZE are", f"{' and '.join(missing)} {are}")


_REMEDY = "`unset RANK WORLD_SIZE`, or start all ranks by a launcher (torchrun ... -m portable.cli)"


def _build_incomplete_error(there: str, missing: str) -> UserError:
    return UserError(f"{there} set, as by a launcher of ranks, but {missing} not; {_REMEDY}")


def format_command(world_size: int, **options: object) -> str:
    """Format a ``portable-train`` command for an error message.

    Ranks on several nodes need their own launcher, for which the text has a placeholder.

    Args:
        world_size: Number of ranks that the command starts.
        options: Options of the command, keyed by name.
    """
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        return f"<the launcher of these {world_size} ranks> -m portable.cli {flags}"
    return f"portable-train {flags}" + (f" --nproc {world_size}" if world_size > 1 else "")


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first, and its error."""

    rank: int
    exit_code: int
    message: str | None
    """Error in one line. None if the rank could not write a report."""
    hang: bool = False
    """Whether ranks hang. The message then describes all of them."""
    traceback: str = ""
    """Traceback of a bug. The tracebacks of later failures are not printed."""


def launch(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    memory_advice: str = "",
    saved: Callable[[], object | None] = lambda: None,
) -> int:
    """Run ``function(*arguments)`` in ``ranks`` local processes.

    Args:
        function: Picklable function that returns the exit code of its rank. If several ranks raise
            ``UserError`` or ``RunError``, only one of the errors is reported.
        arguments: Picklable arguments.
        ranks: Number of ranks.
        memory_advice: Remedy in the error message if a rank is killed because host memory ran out.
        saved: Function that returns the checkpoint from which a stopped run can resume, or None.

    Returns:
        The exit code, which is the same on all ranks.

    Raises:
        UserError: If the first failed rank raised it.
        RunError: If the first failed rank raised it or was killed.
        StoppedError: If signals ended the run before it could save a checkpoint.
    """
    prepare_open_files(ranks)
    if shows_run_bars():  # every rank loads the libraries, which takes seconds
        tell(f"waiting for {format_count(ranks, 'rank')} to load")
    with create_scratch_folder("portable-launch") as folder:
        if sys.platform == "linux":  # otherwise gloo listens on the interface of the host name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        store, meeting_place = _start_store()
        from portable.ranks.oom_kills import has_new_kill, read_oom_kills

        kills_before = read_oom_kills()
        with bind_spawned_processes(), redirect_temporary_files(folder), _forward_signals(folder) as requests:
            context: Any = multiprocessing.get_context(START_METHOD)
            rank_arguments = (
                function,
                arguments,
                str(folder),
                os.getpid(),
                {**meeting_place, **_build_world_variables(ranks)},
            )
            processes = [
                context.Process(target=_rank_main, args=(rank, *rank_arguments)) for rank in range(ranks)
            ]
            try:
                with ignore_interrupts():
                    for process in processes:
                        process.start()
                failed = _wait_for_failure(processes, folder)
            finally:
                _end_processes(processes, folder)
        del store
        if failed is None:
            return max(int(code.read_text()) for code in folder.glob("rank*.code"))
        rank, code = failed
        if requests and (
            code == -signal.SIGTERM or (code == -signal.SIGKILL and _is_second_interrupt(requests))
        ):
            raise _build_stopped_error(requests, saved())
        first = _find_first_failure(folder, rank, code)
        sys.stderr.write(first.traceback)
        raise _as_exception(first, has_new_kill(kills_before, read_oom_kills()), memory_advice)


def _start_store() -> tuple[object, dict[str, str]]:
    """Start the store through which the ranks connect, and return it with the variables that the ranks need.

    The store listens only on the loopback interface, because every process that can connect can write to it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # only here: it loads torch

    listener = socket.create_server((_LOOPBACK, 0), backlog=2048)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        timeout=_MEETING,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    # torchrun sets the same variables, because the store belongs to another process than rank 0.
    joins = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return store, {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port), **joins}


def _build_world_variables(ranks: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


class RankExit(NamedTuple):
    """End of a rank's process without a result."""

    rank: int
    code: int
    """Exit code. Negative if a signal killed the process: the number of the signal."""


def _wait_for_failure(processes: Sequence[BaseProcess], scratch: Path) -> RankExit | None:
    """Wait until all processes have ended or one has failed.

    Returns:
        The failed rank and its exit code, or None if all ranks have succeeded.
    """
    while True:
        codes = [process.exitcode for process in processes]
        if failed := [(code, rank) for rank, code in enumerate(codes) if code]:
            code, rank = min(failed)  # prefer a killed rank, whose code is negative
            return RankExit(rank, code)
        for rank, ended in enumerate(codes):  # code in the rank may have called os._exit(0)
            if ended == 0 and not _get_exit_code_path(scratch, rank).exists():
                return RankExit(rank, ended)
        running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
        if not running:
            return None
        connection.wait(running, timeout=1)
        _kill_silent_ranks(scratch)


def _end_processes(processes: Sequence[BaseProcess], scratch: Path) -> None:
    """Terminate the processes that are still running, and kill those that do not end in time."""
    running = [process for process in processes if process.is_alive()]
    for process in running:
        process.terminate()
    end = time.monotonic() + OBEYING
    while (
        sentinels := [process.sentinel for process in running if process.is_alive()]
    ) and time.monotonic() < end:
        connection.wait(sentinels, timeout=1)
        _kill_silent_ranks(scratch)
    for process in running:
        process.kill()
        process.join()


def _get_exit_code_path(scratch: Path, rank: int) -> Path:
    """Return the path of the file with the exit code that a rank's function returned."""
    return scratch / f"rank{rank}.code"


def _build_stopped_error(requests: list[int], saved: object | None) -> StoppedError:
    """Build the error of a run that signals ended during a step, or before the first step."""
    message = "stopped by a signal before the first step"
    if _is_second_interrupt(requests):
        message = "stopped by a second Ctrl-C without saving"
    if saved is None:
        message += "; there is no checkpoint yet, so the same command starts over"
    else:
        message += f"; the same command resumes from {saved}"
    return StoppedError(message, requests[0])


def _is_second_interrupt(requests: Sequence[int]) -> bool:
    """Return whether Ctrl-C was pressed after another signal had already requested a stop."""
    return signal.SIGINT in requests[1:]


@contextmanager
def _forward_signals(scratch: Path) -> Iterator[list[int]]:
    """Forward signals to the ranks as SIGTERM; Ctrl-C after another signal kills the ranks.

    Yields:
        The received signals.
    """
    requests: list[int] = []

    def forward(number: int, _: object) -> None:
        requests.append(number)
        (scratch / STOP_REQUESTED).touch()  # for ranks that have not started yet
        forwarded = signal.SIGKILL if _is_second_interrupt(requests) else signal.SIGTERM
        for pid in _read_rank_pids(scratch).values():
            with suppress(ProcessLookupError):
                os.kill(pid, forwarded)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _rank_main(
    rank: int,
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    scratch: str,
    launcher: int,
    environment: Mapping[str, str],
) -> None:
    """Run a rank's process: call ``function``, and report its exit code or error to the launcher."""
    die_with_parent(launcher)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # Only the launcher handles Ctrl-C, and forwards it to the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    global _scratch
    _scratch = Path(scratch)
    (Path(scratch) / f"rank{rank}.{os.getpid()}.pid").touch()
    if (Path(scratch) / STOP_REQUESTED).exists():
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        code = function(*arguments)
        _get_exit_code_path(Path(scratch), rank).write_text(str(int(code)))
        set_exit_code(0)  # the code of this process: the launcher reads that of the run from the file
    except ReportedElsewhereError as error:
        error.wait()
        os._exit(error.exit_code)
    except (UserError, RunError) as error:
        _report(Path(scratch), error.exit_code, to_one_line(error))
        # Not sys.exit, which would wait for other threads (a loader, a collective that waits for this rank).
        sys.stdout.flush()
        os._exit(error.exit_code)
    except Exception as error:
        message = f"{type(error).__name__}: {to_one_line(error)} (traceback above)"
        _report(Path(scratch), RUN_ERROR, message, traceback=traceback.format_exc())
        # This error may be a consequence of another rank's failure. The launcher ends all ranks once one
        # exits, so let the other rank report first.
        _wait_for_reports(Path(scratch))
        time.sleep(5 * POLL)
        os._exit(RUN_ERROR)


def is_launched() -> bool:
    """Return whether :func:`launch` started this process as a rank."""
    return _scratch is not None


def record_failure_time() -> None:
    """Record the time of this rank's failure. Its report follows after the cleanup."""
    global _failed_at
    _failed_at = _failed_at or time.time()


def _wait_for_reports(scratch: Path) -> None:
    """Wait until every rank has reported or exited, for at most :data:`REPORTING` seconds."""
    end = time.monotonic() + REPORTING
    while time.monotonic() < end:
        silent = [
            pid
            for rank, pid in _read_rank_pids(scratch).items()
            if not (scratch / f"rank{rank}.json").exists()
        ]
        if not any(map(_is_alive, silent)):
            return
        time.sleep(POLL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def report_hang(message: str) -> None:
    """Report where this rank hangs to the launcher, or print it under another launcher."""
    if _scratch is None:
        print_error(f"error: {message}")
    else:
        _report(_scratch, RUN_ERROR, message, hang=True)


def _report(scratch: Path, code: int, message: str, *, hang: bool = False, traceback: str = "") -> None:
    """Write this rank's report for the launcher, which never reads an incomplete file."""
    rank = int(os.environ["RANK"])
    report = {"rank": rank, "code": code, "message": message, "hang": hang, "traceback": traceback}
    text = json.dumps({**report, "time": _failed_at or time.time()})
    partial = scratch / f"rank{rank}.partial"
    partial.write_text(text, "utf-8")
    partial.rename(scratch / f"rank{rank}.json")


def _kill_silent_ranks(scratch: Path) -> None:
    """Kill ranks that have not reported some time after another rank reported a hang."""
    reports = [json.loads(path.read_text("utf-8")) for path in scratch.glob("rank*.json")]
    if any(report["hang"] and time.time() - report["time"] > 2 * watchdog.GRACE for report in reports):
        for rank, pid in _read_rank_pids(scratch).items():
            if all(report["rank"] != rank for report in reports):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _read_rank_pids(scratch: Path) -> dict[int, int]:
    """Return the process ids of the ranks, keyed by rank."""
    names = [path.name.split(".") for path in scratch.glob("rank*.pid")]
    return {int(rank.removeprefix("rank")): int(pid) for rank, pid, _ in names}


def _find_first_failure(scratch: Path, rank: int, exit_code: int) -> RankFailure:
    """Find the first failure, preferably in the reports of the ranks.

    Later failures may be its consequences.
    """
    reports = [json.loads(path.read_text("utf-8")) for path in scratch.glob("rank*.json")]
    if hung := sorted((report for report in reports if report["hang"]), key=lambda report: report["rank"]):
        silent = sorted(_read_rank_pids(scratch).keys() - {report["rank"] for report in hung})
        lines = [report["message"] for report in hung] + [f"rank {rank} did not respond" for rank in silent]
        return RankFailure(hung[0]["rank"], RUN_ERROR, "; ".join(lines), hang=True)
    # A killed rank writes no report and is the cause of the errors that other ranks report.
    if exit_code < 0 or not reports:
        return RankFailure(rank, exit_code, None)
    # A user error is the cause even if a waiting rank failed slightly earlier.
    first = min(reports, key=lambda report: (report["code"] != USER_ERROR, report["time"]))
    return RankFailure(first["rank"], first["code"], first["message"], traceback=first["traceback"])


def _as_exception(failure: RankFailure, out_of_memory: bool | None, memory_advice: str) -> Exception:
    if failure.message is not None:
        if failure.exit_code == USER_ERROR:
            return UserError(failure.message)
        if failure.exit_code == NOT_EXPORTED:
            return NotExportedError(failure.message)
        if failure.hang:
            return RunError(failure.message)
        return RunError(f"rank {failure.rank} failed first: {failure.message}")
    if failure.exit_code >= 0:
        return RunError(f"rank {failure.rank} failed first: it exited with code {failure.exit_code}")
    name = signal.Signals(-failure.exit_code).name
    cause = _describe_kill(out_of_memory, memory_advice) if name == "SIGKILL" else ""
    return RunError(f"rank {failure.rank} failed first: it was killed by {name}{cause}")


def _describe_kill(out_of_memory: bool | None, advice: str) -> str:
    """Describe the most likely cause of a SIGKILL.

    Args:
        out_of_memory: Whether the kernel's counters of OOM kills have increased, or None if there are no
            counters.
        advice: Remedy if host memory ran out.
    """
    advice = f"; {advice}" if advice else ""
    if out_of_memory:
        return f" by the kernel, which ran out of host memory{advice}"
    if out_of_memory is None:
        return f", most likely by the kernel because host memory ran out{advice}"
    return (
        ", but not by the kernel's OOM killer: by a user, or by a limit on memory or time (a batch system, "
        f"systemd-oomd). If it was for memory{advice}"
    )
