"""Exceptions that end a run without a traceback, because they are not bugs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from portable.converters.console import print_error

if TYPE_CHECKING:
    from collections.abc import Sequence

USER_ERROR, RUN_ERROR, NOT_EXPORTED = 2, 1, 74
"""Exit codes."""
REPORT_SECONDS = 15.0  # seconds that a rank waits at most for the reports of others
_POLL_SECONDS = 0.1
_is_end_requested = False
NOTICE_SECONDS, LAUNCHER_SECONDS = 1.0, 5.0
"""Seconds between the failure of a rank and the exit of the others: without a launcher, and with one that
ends all ranks when the first one exits, and reports that one."""


class UserError(Exception):
    """Invalid input. The message names the file or key and the remedy.

    The command line prints it as one ``error: ...`` line and exits with code 2. Other exceptions are bugs and
    keep their traceback.
    """

    exit_code: int = USER_ERROR


class MultipleMistakesError(UserError):
    """Several mistakes in one input. The text is the first; :attr:`lines` has all that are printed."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(lines[0])
        self.lines = tuple(lines)


class ReportedElsewhereError(Exception):
    """Another rank reports the error. Print nothing, :meth:`wait_for_report`, and exit with its code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def wait_for_report(self) -> None:
        """Let the other rank report: launchers end all ranks when the first one exits, this one as well.

        Returns at once after SIGTERM, because the launcher then knows of the failure.
        """
        end = time.monotonic() + (REPORT_SECONDS if is_ended_by_launcher() else NOTICE_SECONDS)
        while not _is_end_requested and (seconds_left := end - time.monotonic()) > 0:
            time.sleep(min(seconds_left, _POLL_SECONDS))


def record_end_request() -> None:
    """Note that this process has received SIGTERM, so that it does not wait for the reports of others."""
    global _is_end_requested
    _is_end_requested = True


def is_ended_by_launcher() -> bool:
    """Return whether the launcher of this rank ends all ranks when the first one exits."""
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ  # set by torchrun and by `portable-train --nproc`


class MissingDataError(UserError):
    """Files of the data are not on this machine. What only plans does without them."""


class DamagedError(UserError):
    """A damaged checkpoint. An older one may be intact."""


def to_one_line(text: object) -> str:
    """Fold ``text``, or the name of an exception without one, into one printable line for stderr."""
    unfolded = str(text) or (type(text).__name__ if isinstance(text, BaseException) else "")
    folded = " ".join(unfolded.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in folded)


class RunError(Exception):
    """A run failed although its input is valid. Printed as one ``error: ...`` line, with exit code 1."""

    exit_code: int = RUN_ERROR


class NotExportedError(RunError):
    """A run is complete, but its model could not be exported. The next start exports it."""

    exit_code = NOT_EXPORTED


class StoppedError(RunError):
    """A signal ended the run. ``exit_code`` is 128 plus its number, as in a shell."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def print_error_lines(error: Exception) -> None:
    """Print ``error`` to stderr as one ``error: ...`` line, or one for each mistake."""
    for line in error.lines if isinstance(error, MultipleMistakesError) else [error]:
        print_error(f"error: {to_one_line(line)}")


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)
