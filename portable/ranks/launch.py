"""Launch the ranks on this machine, read their reports, and build the error of a failed launch.

The ranks are child processes of the launcher, and no rank outlives it.
"""

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
from portable.converters.interrupts import block_interrupts_in_children
from portable.errors import (
    NOT_EXPORTED,
    REPORT_SECONDS,
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
from portable.ranks.open_file_limit import raise_open_file_limit
from portable.ranks.parent_death import die_with_parent, kill_spawned_processes_with_parent
from portable.ranks.process_exit import set_process_exit_code
from portable.temporary_folder import create_scratch_folder, redirect_temporary_files
from portable.terminal import print_status, shows_run_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

STOP_FILE = "stop-requested"
_report_folder: Path | None = None
"""Folder for reports to the launcher. None unless :func:`launch_ranks` started this process."""
_failed_at: float | None = None
"""Time of this rank's failure (``time.time()``), or None if it has not failed."""
START_METHOD = "spawn"
_LOOPBACK, _RENDEZVOUS_TIMEOUT = "127.0.0.1", datetime.timedelta(minutes=10)
TERMINATE_SECONDS = 30.0  # time for ranks to end after SIGTERM when another rank has failed
POLL_SECONDS = 0.1  # how often a rank checks for the reports of other ranks


def check_rank_variables() -> None:
    """Check ``RANK`` and ``WORLD_SIZE``, which launchers such as torchrun set.

    Call this function only if at least one of the two variables is set.

    Raises:
        UserError: If only one of the two variables is set, or if their values are not integers with
            ``0 <= RANK < WORLD_SIZE``.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None:
        raise UserError(f"the environment contains WORLD_SIZE, but not RANK; {_REMEDY}")
    if world_size is None:
        raise UserError(f"the environment contains RANK, but not WORLD_SIZE; {_REMEDY}")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        variables = to_one_line(f"RANK={rank} and WORLD_SIZE={world_size}")
        raise UserError(f"{variables} are set, but ranks go from 0 to WORLD_SIZE - 1; {_REMEDY}")


def check_rendezvous_variables() -> None:
    """Check that the launcher has set ``MASTER_ADDR`` and ``MASTER_PORT``, which the ranks need to connect.

    Raises:
        UserError: If a variable is not set although there are several ranks.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"the environment contains RANK and WORLD_SIZE, but not {' or '.join(missing)}; {_REMEDY}"
        )


_REMEDY = "run `unset RANK WORLD_SIZE`, or start all ranks with a launcher (torchrun ... -m portable.cli)"


def format_train_command(world_size: int, **options: object) -> str:
    """Format a ``portable-train`` command for an error message.

    If the ranks of this run are on several nodes, the command contains a placeholder for the user's
    launcher.

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
    """First failure of a launch: the rank and its error."""

    rank: int
    exit_code: int
    message: str | None
    """Error on one line. None if the rank could not write a report."""
    is_hang: bool = False
    """Whether the watchdog reported a hang. If it did, the message describes all hanging ranks."""
    traceback: str = ""
    """Traceback of an unexpected exception, for the launcher to print. Empty for other failures."""


def launch_ranks(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    memory_advice: str = "",
    find_checkpoint: Callable[[], object | None] = lambda: None,
) -> int:
    """Run ``function(*arguments)`` in ``ranks`` local processes, and wait for them.

    If a rank fails, the other ranks are terminated. SIGTERM and SIGINT are forwarded to the ranks,
    so this function must be called in the main thread. The function also raises the limit on open
    files, and sets default values of environment variables such as ``OMP_NUM_THREADS`` in this
    process.

    Args:
        function: Picklable function that returns the exit code of its rank.
        arguments: Picklable arguments.
        ranks: Number of ranks.
        memory_advice: Advice for the error message if a rank is killed because host memory ran out.
        find_checkpoint: Function that returns the checkpoint from which a stopped run can resume,
            or None if there is no checkpoint.

    Returns:
        The largest exit code of all ranks.

    Raises:
        UserError: If the rank that failed first raised it, or if the limit on open files is too
            low.
        RunError: If the rank that failed first raised any other error, hung, or was killed.
        StoppedError: If signals ended the run before it could save a checkpoint.
    """
    raise_open_file_limit(ranks)
    if shows_run_progress_bars():  # every rank loads the libraries, and this takes seconds
        print_status(f"waiting for {format_count(ranks, 'rank')} to load")
    with create_scratch_folder("portable-launch") as folder:
        if sys.platform == "linux":  # otherwise gloo listens on the interface of the host name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        store, meeting_place = _start_rendezvous_store()
        from portable.ranks.oom_kills import has_new_oom_kill, read_oom_kills

        kills_before = read_oom_kills()
        with (
            kill_spawned_processes_with_parent(),
            redirect_temporary_files(folder),
            _forward_signals(folder) as requests,
        ):
            context: Any = multiprocessing.get_context(START_METHOD)
            rank_arguments = (
                function,
                arguments,
                str(folder),
                os.getpid(),
                {**meeting_place, **_build_world_variables(ranks)},
            )
            processes = [
                context.Process(target=_run_rank_process, args=(rank, *rank_arguments))
                for rank in range(ranks)
            ]
            try:
                with block_interrupts_in_children():
                    for process in processes:
                        process.start()
                failed_rank = _wait_for_ranks(processes, folder)
            finally:
                _terminate_ranks(processes, folder)
        del store
        if failed_rank is None:
            return max(int(code.read_text()) for code in folder.glob("rank*.code"))
        rank, code = failed_rank
        if requests and (
            code == -signal.SIGTERM or (code == -signal.SIGKILL and _is_second_interrupt(requests))
        ):
            raise _build_stopped_error(requests, find_checkpoint())
        first_failure = _find_first_failure(folder, rank, code)
        if sys.stderr is not None:
            sys.stderr.write(first_failure.traceback)
        raise _to_exception(first_failure, has_new_oom_kill(kills_before, read_oom_kills()), memory_advice)


def _start_rendezvous_store() -> tuple[object, dict[str, str]]:
    """Start the torch.distributed store through which the ranks connect to each other.

    The store listens only on the loopback interface, because any process that can connect can write
    to it.

    Returns:
        The store, which stops when it is garbage-collected, and environment variables for the
        ranks. The variables contain the address of the store. They also state that rank 0 does not
        host the store, as under torchrun.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # imported here because it loads torch

    listener = socket.create_server((_LOOPBACK, 0), backlog=2048)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        timeout=_RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    # Like under torchrun, these variables state that rank 0 does not host the store.
    torchelastic_variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return store, {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port), **torchelastic_variables}


def _build_world_variables(ranks: int) -> dict[str, str]:
    """Build the environment variables that contain the number of ranks."""
    return {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


class RankExit(NamedTuple):
    """Failed rank and the exit code of its process, as returned by :func:`_wait_for_ranks`."""

    rank: int
    code: int
    """Exit code. If a signal killed the process, the negative signal number."""


def _wait_for_ranks(processes: Sequence[BaseProcess], report_folder: Path) -> RankExit | None:
    """Wait until all processes have ended or one has failed, and kill ranks that hang.

    Each rank is a process that runs a function. When the function returns, the rank writes the
    function's exit code to a file in ``report_folder``. A process that ends without writing this
    file counts as failed, even if the process itself ends with exit code 0.

    Returns:
        The failed rank and its exit code, or None if all ranks have succeeded.
    """
    while True:
        codes = [process.exitcode for process in processes]
        if failed := [(code, rank) for rank, code in enumerate(codes) if code]:
            code, rank = min(failed)  # the minimum prefers a killed rank, whose code is negative
            return RankExit(rank, code)
        for rank, ended in enumerate(codes):  # code in the rank may have called os._exit(0)
            if ended == 0 and not _get_exit_code_path(report_folder, rank).exists():
                return RankExit(rank, ended)
        running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
        if not running:
            return None
        connection.wait(running, timeout=1)
        _kill_silent_ranks(report_folder)


def _terminate_ranks(processes: Sequence[BaseProcess], report_folder: Path) -> None:
    """Terminate the running processes with SIGTERM, and kill processes that do not end in time.

    The time limit is :data:`TERMINATE_SECONDS`. Ranks that hang are killed earlier. See
    :func:`_kill_silent_ranks`.
    """
    running = [process for process in processes if process.is_alive()]
    for process in running:
        process.terminate()
    end = time.monotonic() + TERMINATE_SECONDS
    while (
        sentinels := [process.sentinel for process in running if process.is_alive()]
    ) and time.monotonic() < end:
        connection.wait(sentinels, timeout=1)
        _kill_silent_ranks(report_folder)
    for process in running:
        process.kill()
        process.join()


def _get_exit_code_path(report_folder: Path, rank: int) -> Path:
    """Return the path of the file that contains the exit code returned by a rank's function."""
    return report_folder / f"rank{rank}.code"


def _build_stopped_error(signals: list[int], checkpoint: object | None) -> StoppedError:
    """Build the error for a run that was ended by signals before it could save a checkpoint.

    Args:
        signals: Signal numbers that the launcher received, in order.
        checkpoint: Earlier checkpoint from which the run can resume, or None.
    """
    message = "stopped by a signal before the first step"
    if _is_second_interrupt(signals):
        message = "stopped by a second Ctrl-C without saving"
    if checkpoint is None:
        message += "; there is no checkpoint yet, so the same command starts from the beginning"
    else:
        message += f"; the same command resumes from {checkpoint}"
    return StoppedError(message, signals[0])


def _is_second_interrupt(signals: Sequence[int]) -> bool:
    """Return whether an interrupt (Ctrl-C) followed an earlier signal of any type.

    The earlier signal has already requested a stop.

    Args:
        signals: Numbers of the received signals, in order.
    """
    return signal.SIGINT in signals[1:]


@contextmanager
def _forward_signals(report_folder: Path) -> Iterator[list[int]]:
    """Forward the signals SIGTERM and SIGINT (Ctrl-C) to the ranks within this context.

    The ranks receive them as SIGTERM. If Ctrl-C follows an earlier signal, the ranks are killed.
    Each signal also creates the file :data:`STOP_FILE` in ``report_folder``, so that a rank that
    has not started yet stops as well.

    Yields:
        The numbers of the received signals. The list grows while the context is active.
    """
    received_signals: list[int] = []

    def forward(number: int, _: object) -> None:
        received_signals.append(number)
        (report_folder / STOP_FILE).touch()  # for ranks that have not started yet
        forwarded = signal.SIGKILL if _is_second_interrupt(received_signals) else signal.SIGTERM
        for pid in _read_rank_pids(report_folder).values():
            with suppress(ProcessLookupError):
                os.kill(pid, forwarded)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received_signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_rank_process(
    rank: int,
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    report_folder: str,
    launcher: int,
    environment: Mapping[str, str],
) -> None:
    """Run ``function`` in a rank's process, and report its exit code or error to the launcher.

    If the function returns, its exit code is written to a file, and the process itself exits with
    code 0. A :class:`ReportedElsewhereError` is not reported. After an error, the process ends
    without running exit handlers. The process ignores SIGINT, because the launcher forwards it as
    SIGTERM.

    Args:
        rank: Rank of this process.
        function: Function that returns an exit code.
        arguments: Arguments of the function.
        report_folder: Folder to which the report file is written.
        launcher: Process id of the launcher. This process dies when the launcher dies.
        environment: Environment variables to set, in addition to ``RANK`` and ``LOCAL_RANK``.
    """
    die_with_parent(launcher)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # Only the launcher handles Ctrl-C, and forwards it to the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    global _report_folder
    _report_folder = Path(report_folder)
    (Path(report_folder) / f"rank{rank}.{os.getpid()}.pid").touch()
    if (Path(report_folder) / STOP_FILE).exists():
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        code = function(*arguments)
        _get_exit_code_path(Path(report_folder), rank).write_text(str(int(code)))
        set_process_exit_code(
            0
        )  # the process succeeds, and the launcher reads the exit code of the run from the file
    except ReportedElsewhereError as error:
        error.wait_for_report()
        os._exit(error.exit_code)
    except (UserError, RunError) as error:
        _write_report(Path(report_folder), error.exit_code, to_one_line(error))
        # Do not use sys.exit, because it would wait for other threads (a loader, a collective that waits for
        # this rank).
        if sys.stdout is not None:  # None if it was closed at start-up
            sys.stdout.flush()
        os._exit(error.exit_code)
    except Exception as error:
        message = f"{type(error).__name__}: {to_one_line(error)} (traceback above)"
        _write_report(Path(report_folder), RUN_ERROR, message, traceback=traceback.format_exc())
        # This error may be a consequence of another rank's failure. The launcher ends all ranks once one
        # exits, so let the other rank report first.
        _wait_for_reports(Path(report_folder))
        time.sleep(5 * POLL_SECONDS)
        os._exit(RUN_ERROR)


def is_launched_by_portable() -> bool:
    """Return whether :func:`launch_ranks` started this process as a rank."""
    return _report_folder is not None


def record_failure_time() -> None:
    """Record the current time as the time of this rank's failure, unless a time is already recorded.

    Call this function before the cleanup. The report is written only after the cleanup, and the
    launcher compares these times to find the first failure.
    """
    global _failed_at
    _failed_at = _failed_at or time.time()


def _wait_for_reports(report_folder: Path) -> None:
    """Wait until every rank has written a report or exited, for up to :data:`REPORT_SECONDS` seconds."""
    end = time.monotonic() + REPORT_SECONDS
    while time.monotonic() < end:
        silent = [
            pid
            for rank, pid in _read_rank_pids(report_folder).items()
            if not (report_folder / f"rank{rank}.json").exists()
        ]
        if not any(map(_is_alive, silent)):
            return
        time.sleep(POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def report_hang(message: str) -> None:
    """Report a hang of this rank to the launcher of portable-trainer.

    If another launcher has started this rank, print the message instead.
    """
    if _report_folder is None:
        print_error(f"error: {message}")
    else:
        _write_report(_report_folder, RUN_ERROR, message, hang=True)


def _write_report(
    report_folder: Path, code: int, message: str, *, hang: bool = False, traceback: str = ""
) -> None:
    """Write this rank's report for the launcher, atomically.

    Args:
        report_folder: Folder of the reports.
        code: Exit code of the rank.
        message: Error on one line.
        hang: Whether the rank hangs.
        traceback: Traceback of an unexpected exception. Empty for other failures.
    """
    rank = int(os.environ["RANK"])
    report = {"rank": rank, "code": code, "message": message, "hang": hang, "traceback": traceback}
    text = json.dumps({**report, "time": _failed_at or time.time()})
    partial = report_folder / f"rank{rank}.partial"
    partial.write_text(text, "utf-8")
    partial.rename(report_folder / f"rank{rank}.json")


def _kill_silent_ranks(report_folder: Path) -> None:
    """Kill the ranks that still have no report some time after another rank reported a hang.

    Such ranks cannot report, for example because their watchdog thread waits for the GIL. The time
    is twice :data:`portable.ranks.watchdog.GRACE_SECONDS`.
    """
    reports = [json.loads(path.read_text("utf-8")) for path in report_folder.glob("rank*.json")]
    if any(
        report["hang"] and time.time() - report["time"] > 2 * watchdog.GRACE_SECONDS for report in reports
    ):
        for rank, pid in _read_rank_pids(report_folder).items():
            if all(report["rank"] != rank for report in reports):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _read_rank_pids(report_folder: Path) -> dict[int, int]:
    """Return the process ids of all started ranks, keyed by rank."""
    names = [path.name.split(".") for path in report_folder.glob("rank*.pid")]
    return {int(rank.removeprefix("rank")): int(pid) for rank, pid, _ in names}


def _find_first_failure(report_folder: Path, rank: int, exit_code: int) -> RankFailure:
    """Find the failure that caused the other failures.

    In order of priority, the result is a hang, a killed rank, a user error, or the earliest other
    error. A hang has no priority over an error that was reported before it, because a rank that
    waits for a failed rank also hangs. Only ``rank`` can be the killed rank. If there are no
    reports, the result is the failure of ``rank``, even if no signal killed this rank. The message
    about a hang lists all hanging ranks, and all ranks without a report.

    Args:
        report_folder: Folder of the ranks' reports.
        rank: Rank whose process ended first.
        exit_code: Exit code of that process.
    """
    reports = [json.loads(path.read_text("utf-8")) for path in report_folder.glob("rank*.json")]
    hung = sorted((report for report in reports if report["hang"]), key=lambda report: report["rank"])
    errors = [report for report in reports if not report["hang"]]
    if hung and min(report["time"] for report in hung) <= min(
        (report["time"] for report in errors), default=float("inf")
    ):
        silent = sorted(_read_rank_pids(report_folder).keys() - {report["rank"] for report in reports})
        lines = [report["message"] for report in hung] + [f"rank {rank} did not respond" for rank in silent]
        return RankFailure(hung[0]["rank"], RUN_ERROR, "; ".join(lines), is_hang=True)
    # A killed rank writes no report and is the cause of the errors that other ranks report.
    if exit_code < 0 or not errors:
        return RankFailure(rank, exit_code, None)
    # A user error is the cause even if a waiting rank failed slightly before it.
    first = min(errors, key=lambda report: (report["code"] != USER_ERROR, report["time"]))
    return RankFailure(first["rank"], first["code"], first["message"], traceback=first["traceback"])


def _to_exception(failure: RankFailure, out_of_memory: bool | None, memory_advice: str) -> Exception:
    """Build the exception that the launcher raises for the first failure.

    Args:
        failure: The first failure.
        out_of_memory: Result of :func:`has_new_oom_kill`.
        memory_advice: Advice for the error message if host memory ran out.
    """
    if failure.message is not None:
        if failure.exit_code == USER_ERROR:
            return UserError(failure.message)
        if failure.exit_code == NOT_EXPORTED:
            return NotExportedError(failure.message)
        if failure.is_hang:
            return RunError(failure.message)
        return RunError(f"rank {failure.rank} failed first: {failure.message}")
    if failure.exit_code >= 0:
        return RunError(
            f"rank {failure.rank} failed first: it exited with code {failure.exit_code}; its output may "
            "contain the reason"
        )
    name = signal.Signals(-failure.exit_code).name
    cause = _describe_kill(out_of_memory, memory_advice) if name == "SIGKILL" else ""
    return RunError(f"rank {failure.rank} failed first: it was killed by {name}{cause}")


def _describe_kill(out_of_memory: bool | None, advice: str) -> str:
    """Describe the most likely cause of a SIGKILL, as the end of a sentence.

    Args:
        out_of_memory: Whether the kernel's OOM kill counters have increased, or None if there are no
            counters.
        advice: Advice for the user if host memory ran out.
    """
    remedy = f"; {advice}" if advice else ""
    if out_of_memory:
        return f" by the kernel, which ran out of host memory{remedy}"
    if out_of_memory is None:
        return f", most likely by the kernel because host memory ran out{remedy}"
    return (
        ", but not by the kernel's OOM killer; probably a user stopped the process, or a limit on memory or "
        "time did (a batch system, systemd-oomd)" + (f"; if memory ran out: {advice}" if advice else "")
    )
