"""What a command prints, also where nobody can read it any more."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from converters.errors import CheckpointError


class OutputError(CheckpointError):
    """Standard output takes no more: the disk that it goes to is full."""


def say(text: str) -> None:
    """Print `text`, all of it, now. A reader who has gone (`| head`) has read what they wanted.

    Raises:
        OutputError: it cannot be written for any other reason.
    """
    try:
        print(text)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard()
    except OSError as error:
        _discard()
        raise OutputError(f"standard output: {error.strerror or error}") from None


def complain(line: str) -> None:
    """Print `line` on standard error, if anybody can read it."""
    with suppress(OSError):
        print(line, file=sys.stderr)


def _discard() -> None:
    """Let the interpreter, which flushes standard output at its end, do so in vain and in silence."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
    except (OSError, ValueError):  # it is no file
        pass
