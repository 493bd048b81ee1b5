"""What a command prints, also where nobody can read it any more."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutputError(Exception):
    """Standard output takes no more: the disk that it goes to is full. `converters.commands` tells it."""


def say(text: str) -> None:
    """Print `text`, all of it, now.

    Raises:
        BrokenPipeError: the reader has gone (`| head`).
        OutputError: it cannot be written for any other reason.
    """
    with _told():
        print(text)
    flush()


def flush() -> None:
    """Have everything written that was printed; raises what `say` does."""
    if sys.stdout is not None:  # it is where standard output was closed from the start
        with _told():
            sys.stdout.flush()


def complain(line: str) -> None:
    """Print `line` on standard error, if anybody can read it."""
    with suppress(OSError):
        print(line, file=sys.stderr)


@contextmanager
def _told() -> Iterator[None]:
    """Turn a failure to write into an `OutputError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # The interpreter flushes standard output once more at its end: then in vain, and in silence.
        with suppress(OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, sys.stdout.fileno())
            os.close(descriptor)
        raise OutputError(f"standard output: {error.strerror or error}") from None
