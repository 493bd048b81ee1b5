"""Printing from a command, also to a closed pipe or a full disk."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class OutputError(Exception):
    """Standard output cannot be written, for example to a full disk; `converters.commands` reports it."""


def say(text: str) -> None:
    """Print `text` and flush.

    Raises:
        BrokenPipeError: the reader has exited (`| head`).
        OutputError: writing fails for any other reason.
    """
    with _output_errors():
        print(text)
    flush()


def flush() -> None:
    """Flush standard output; raises what `say` does."""
    if sys.stdout is not None:  # None if it was closed at start-up
        with _output_errors():
            sys.stdout.flush()


def complain(line: str) -> None:
    """Print `line` on standard error; ignored if that is closed."""
    with suppress(OSError):
        print(line, file=sys.stderr)


@contextmanager
def _output_errors() -> Iterator[None]:
    """Turn a failure to write into an `OutputError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # The interpreter flushes standard output again at exit: let that succeed silently.
        with suppress(OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, sys.stdout.fileno())
            os.close(descriptor)
        raise OutputError(f"standard output: {error.strerror or error}") from None
