"""Exceptions for expected errors, as opposed to bugs.

Commands report them as an error message without a traceback.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from portable.converters.console import print_error

if TYPE_CHECKING:
    from collections.abc import Sequence

USER_ERROR, RUN_ERROR, NOT_EXPORTED = 2, 1, 74
"""Exit codes of :class:`UserError`, :class:`RunError` and :class:`NotExportedError`."""
REPORT_SECONDS = 15.0
"""Maximum time in seconds that a rank waits for another rank to report an error."""
_POLL_SECONDS = 0.1
_is_end_requested = False
NOTICE_SECONDS, LAUNCHER_SECONDS = 1.0, 5.0
"""Time in seconds that the other ranks wait before they exit after one rank has failed.

``LAUNCHER_SECONDS`` applies if the launcher ends all ranks as soon as one rank exits, and reports only that
rank. ``NOTICE_SECONDS`` applies otherwise.
"""


# Messages of out-of-memory errors that are not MemoryErrors. They come from torch, the host, the driver (for
# kernels and pinned memory), the CUDA libraries and XLA.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc|[Oo]ut of memory|_ALLOC_FAILED"
    r"|RESOURCE_EXHAUSTED"
)


class UserError(Exception):
    """Invalid user input. The message names the file or key and suggests a remedy.

    Commands print the message as one ``error: ...`` line and exit with code 2, without a traceback.
    """

    exit_code: int = USER_ERROR


class MultipleMistakesError(UserError):
    """Several mistakes in one input.

    The ``str()`` of the exception contains only the first line.

    Args:
        lines: Lines to print, usually one for each mistake. If there are many mistakes, some have
            no line, and the last line is a summary.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(lines[0])
        self.lines = tuple(lines)


class ReportedElsewhereError(Exception):
    """Error that another rank reports to the user.

    If the error occurred on several ranks, possibly including this rank, only one of them reports
    it. To avoid duplicate messages, the process that catches this exception should not print
    anything. It should call :meth:`wait_for_report`, and exit with ``exit_code``.

    Args:
        message: Error message of the other rank.
        exit_code: Exit code of the other rank.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def wait_for_report(self) -> None:
        """Wait until the rank that failed has had time to report its error.

        This rank must not exit too early. Some launchers end all ranks as soon as one rank exits,
        and could end the failed rank before its report is complete. With such a launcher, the wait
        lasts at most 15 seconds. With other launchers, it lasts at most 1 second. After SIGTERM,
        this method returns immediately, because the launcher has then already noticed the failure.
        """
        end = time.monotonic() + (REPORT_SECONDS if is_ended_by_launcher() else NOTICE_SECONDS)
        while not _is_end_requested and (seconds_left := end - time.monotonic()) > 0:
            time.sleep(min(seconds_left, _POLL_SECONDS))


def record_end_request() -> None:
    """Record that this process has received SIGTERM, so that it does not wait for reports of other ranks."""
    global _is_end_requested
    _is_end_requested = True


def is_ended_by_launcher() -> bool:
    """Return whether the launcher of this rank ends all ranks as soon as one rank exits.

    True for torchrun and ``portable-train --nproc``, which set ``TORCHELASTIC_USE_AGENT_STORE``.
    """
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ  # set by torchrun and by `portable-train --nproc`


class MissingDataError(UserError):
    """Error raised if data files are not on this machine.

    Commands that only plan a run catch this error, and continue without the data.
    """


class DamagedError(UserError):
    """Error raised if a checkpoint is damaged. The caller may try an older checkpoint."""


def is_memory_error(error: BaseException) -> bool:
    """Return whether an error of Python, NumPy or torch means that the device or the host is out of memory.

    True for :class:`MemoryError`, and for any RuntimeError whose message matches ``_OUT_OF_MEMORY``.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def to_one_line(text: object) -> str:
    """Convert a string or an exception to one printable line.

    Whitespace is collapsed, and characters that cannot be printed are replaced by escape sequences.

    Args:
        text: Any object. An exception without a message is converted to the name of its type.
    """
    unfolded = str(text) or (type(text).__name__ if isinstance(text, BaseException) else "")
    folded = " ".join(unfolded.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in folded)


class RunError(Exception):
    """Failure of a run whose input is valid, such as a full disk.

    Commands print the message as one ``error: ...`` line and exit with :attr:`exit_code`. The exit
    code is 1, but some subclasses set another code.
    """

    exit_code: int = RUN_ERROR


class NotExportedError(RunError):
    """Error raised if a run is complete but its export failed.

    The exit code is 74. The next launch retries the export.
    """

    exit_code = NOT_EXPORTED


class StoppedError(RunError):
    """Error raised if a signal ended the run.

    Args:
        message: Text of the error.
        number: Signal number. The exit code is 128 plus this number, as in a shell.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def print_error_lines(error: Exception) -> None:
    """Print an error to stderr as ``error: ...``. Prints one line per mistake if there are several."""
    for line in error.lines if isinstance(error, MultipleMistakesError) else [error]:
        print_error(f"error: {to_one_line(line)}")


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)
