"""What the commands have in common: exit codes, `--version`, and an end without a traceback."""

from __future__ import annotations

import argparse
import os
import select
import sys
from functools import wraps
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Main = Callable[[Sequence[str] | None], int]

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75
BY_SIGNAL = 128
INTERRUPTED = BY_SIGNAL + 2
_BROKEN_PIPE = BY_SIGNAL + 13

EXIT_CODES = {
    DONE: "done, or train.stop_after reached",
    FAILED: "failed, through nothing that the input shows: no memory, no network, a rank that died",
    REFUSED: "refused: one `error:` line names the file or setting and the remedy; nothing was changed",
    STOPPED: "stopped by a signal with a checkpoint saved; the same command goes on",
    BY_SIGNAL: "and the signal's number: ended at once by it, with nothing more saved (130: Ctrl-C)",
}
"""What the exit code of a command means: the one table, which `--help` shows."""


def exit_codes(*codes: int) -> str:
    """The table for `--help`, of `codes` or of all."""
    lines = [
        (f"{code}+" if code == BY_SIGNAL else str(code), EXIT_CODES[code]) for code in codes or EXIT_CODES
    ]
    return "exit codes:\n" + "\n".join(f"  {code:<5} {meaning}" for code, meaning in lines)


def version_line() -> str:
    """What `--version` prints."""
    from importlib.metadata import version

    return f"portable-trainer {version('portable-trainer')}"


class ShowVersion(argparse.Action):
    """`--version` for argparse, which looks for the version only when it is asked."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_line())
        parser.exit()


def command(main: Main) -> Callable[..., int]:
    """Make `main` end quietly where its reader has gone (`... | head`), and on Ctrl-C."""

    @wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()  # what fails now would be told after the end, where nobody can answer
        except BrokenPipeError:
            gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
            if not gone:
                raise
            for stream in gone:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return _BROKEN_PIPE
        except KeyboardInterrupt:
            print("error: interrupted", file=sys.stderr)
            return INTERRUPTED

    return guarded


def _has_no_reader(stream: IO[str]) -> bool:
    try:
        watch = select.poll()
        watch.register(stream.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll here, or no file behind it
        return False
