"""Helpers for all commands: exit codes, `--version`, and errors without a traceback."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from functools import wraps
from typing import IO, TYPE_CHECKING, NoReturn

from portable.converters.console import OutputError, flush_stdout, print_error
from portable.converters.errors import CheckpointError, CommandError, to_printable
from portable.converters.interrupts import INTERRUPTED, raise_first_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    MainFunction = Callable[[Sequence[str] | None], int]

DONE, FAILED, NOT_EXPORTED, STOPPED = 0, 1, 74, 75
REFUSED, DAMAGED = CommandError.exit_code, CheckpointError.exit_code
BY_SIGNAL = 128
_OUT_OF_MEMORY_MESSAGE = re.compile("failed to map segment|annot allocate memory")
"""Matches the errors that the dynamic linker reports if there is too little memory to load a shared
library."""
_BROKEN_PIPE = BY_SIGNAL + 13

EXIT_CODES = {
    DONE: "finished, or reached train.stop_after",
    FAILED: "failed despite valid input (for example, because the disk is full)",
    REFUSED: "invalid input or settings; the `error:` line explains what to change",
    DAMAGED: "damaged, incomplete or unsupported checkpoint; see the `error:` line",
    NOT_EXPORTED: "trained, but not exported to final/; rerun the same command to export",
    STOPPED: "stopped by a signal after saving; rerun the same command to resume",
    BY_SIGNAL: "terminated by signal N without saving; the code is 128 + N (Ctrl-C: 130)",
}
"""Meaning of each exit code, as `--help` shows it."""


def format_exit_codes(*codes: int) -> str:
    """Format the table of exit codes for `--help`.

    Args:
        codes: Exit codes to list. If empty, the exit codes of a training run.

    Returns:
        The table, one line per exit code.
    """
    descriptions = {**EXIT_CODES, DONE: "done"} if codes else EXIT_CODES
    run_codes = [code for code in EXIT_CODES if code != DAMAGED]
    lines = [
        (f"{code}+" if code == BY_SIGNAL else str(code), descriptions[code]) for code in codes or run_codes
    ]
    return "exit codes:\n" + "\n".join(f"  {code:<5} {meaning}" for code, meaning in lines)


def format_version() -> str:
    """Return the line that `--version` prints."""
    from importlib.metadata import version

    return f"portable-trainer {version('portable-trainer')}"


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports an invalid command line as one `error:` line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print one `error:` line to standard error, and exit with the code for invalid usage."""
        print_error(f"error: {to_printable(message)} (see {self.prog} --help)")
        self.exit(REFUSED)


class ShowVersion(argparse.Action):
    """Action of `--version`. The version is looked up only if the option is used."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version to standard output, and exit with code 0."""
        print(format_version())
        parser.exit()


def exit_without_traceback(main: MainFunction) -> Callable[..., int]:
    """Wrap the main function of a command so that known failures do not print a traceback.

    The wrapped function handles Ctrl-C, a closed pipe (`... | head`), write errors on standard
    output, and a lack of memory or threads. Other exceptions propagate, including
    `CheckpointError`. A second Ctrl-C ends the process immediately.

    Args:
        main: Main function of the command. It takes the command-line arguments and returns the
            exit code.

    Returns:
        The wrapped function, which also returns the exit code.
    """

    @wraps(main)
    def run_guarded(argv: Sequence[str] | None = None) -> int:
        with raise_first_interrupt():
            return _run_main_with_exit_codes(main, argv)

    return run_guarded


def _run_main_with_exit_codes(main: MainFunction, argv: Sequence[str] | None) -> int:
    """Call a main function, flush standard output, and convert known exceptions to exit codes.

    An interrupt, an `OutputError`, a lack of memory, and a failure to start a thread are reported
    as one error line. The exit code is 130 for an interrupt, and 1 for the other failures. If
    standard output or standard error is a closed pipe, nothing is printed, the exit code is 141,
    and the stream is redirected to `/dev/null` so that the interpreter can exit without an error.
    Other exceptions propagate.
    """
    try:
        try:
            return main(argv)
        finally:
            flush_stdout()  # flush here, because a failure at interpreter exit could not be handled
    except BrokenPipeError:
        streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
        closed_streams = [stream for stream in streams if _is_closed_pipe(stream)]
        if not closed_streams:
            raise
        for stream in closed_streams:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        print_error("error: interrupted")
        return INTERRUPTED
    except OutputError as error:
        print_error(f"error: {error}")
        return FAILED
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and not _OUT_OF_MEMORY_MESSAGE.search(str(error)):
            raise
        print_error("error: out of memory; close other programs, or use a machine with more memory")
        return FAILED
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        print_error("error: the system cannot start another thread; raise the limit of threads (ulimit -u)")
        return FAILED


def _is_closed_pipe(stream: IO[str]) -> bool:
    """Return whether a stream is a pipe whose reader has exited.

    Returns False if the stream is not a file, or if the system has no `poll`.
    """
    try:
        watch = select.poll()
        watch.register(stream.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    except (AttributeError, OSError, ValueError):  # the system has no poll, or the stream is not a file
        return False
