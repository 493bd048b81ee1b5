"""What ends a run without being a bug: input that a person can put right, and what no input shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

USER_ERROR, RUN_ERROR = 2, 1
"""Exit codes."""


class UserError(Exception):
    """Refused input: the message names the file or key and the remedy.

    The command line prints it as a single ``error: ...`` line and exits with code 2. Anything else that
    escapes is a bug of ours and keeps its traceback.
    """


class ToldElsewhereError(Exception):
    """What ends this rank was told, or will be, by another rank: end quietly, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DamagedError(UserError):
    """A checkpoint that was whole once and no longer is; an older one may do."""


def one_line(text: object) -> str:
    """Fold ``text`` into one printable line, so that an error stays exactly one line on stderr."""
    folded = " ".join(str(text).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in folded)


class RunError(Exception):
    """A run that cannot go on, through nothing that its input shows. One ``error: ...`` line, exit code 1."""


class StoppedError(RunError):
    """A signal ended the run at once; ``exit_code`` is 128 and its number, as where a shell tells of one."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def unsupported(settings: Iterable[tuple[bool, str]]) -> None:
    """Raise for the first setting that is in use though it is not supported, with its reason."""
    for used, reason in settings:
        require(not used, reason)
