"""Printing from a command, also to a closed pipe or a full disk."""

from __future__ import annotations

import os
import sys
import textwrap
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

_LABEL_COLORS = {"error:": "1;31", "warning:": "1;33"}


class OutputError(Exception):
    """Raised if standard output cannot be written, for example to a full disk."""


def escape_control_characters(text: str) -> str:
    """`text` with its control characters written out, but for ends of lines and tabs.

    What is printed may come from anybody's file, and could clear the terminal or change its title.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def print_line(text: str, *, is_colored: bool = False) -> None:
    """Print `text` and flush.

    Args:
        colored: it has colors of ours, and nothing else that is not `escape_control_characters`.

    Raises:
        BrokenPipeError: the reader has exited (`| head`).
        OutputError: writing fails for any other reason.
    """
    with _raise_output_errors():
        print(text if is_colored else escape_control_characters(text))
    flush_stdout()


def flush_stdout() -> None:
    """Flush standard output; raises what `print_line` does."""
    if sys.stdout is not None:  # None if it was closed at start-up
        with _raise_output_errors():
            sys.stdout.flush()


def print_error(line: str) -> None:
    """Print `line` on standard error; ignored if that is closed."""
    with suppress(OSError):
        print(color_error_label(wrap_lines(escape_control_characters(line), sys.stderr)), file=sys.stderr)


def get_terminal_width(stream: TextIO | None) -> int | None:
    """The width of the terminal that `stream` is, as COLUMNS or the terminal has it; None if it is none."""
    if stream is None or not stream.isatty():
        return None
    if (value := os.environ.get("COLUMNS", "")).isdecimal() and int(value) > 0:
        return int(value)
    with suppress(OSError, ValueError):
        if (width := os.get_terminal_size(stream.fileno()).columns) > 0:
            return width
    return 80


def wrap_lines(text: str, stream: TextIO | None) -> str:
    """`text` for `stream`: on a terminal, long lines go on below, indented, with whole words."""
    width = get_terminal_width(stream)
    if width is None:
        return text
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        parts = textwrap.wrap(
            line,
            max(width, 20),
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [line] if len(line) <= width else parts
    return "\n".join(lines)


def color_error_label(line: str) -> str:
    """`line` with the first word of an error or warning in color on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    first = line.split(" ", 1)[0]
    if first not in _LABEL_COLORS or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return line
    if sys.stderr is None or not sys.stderr.isatty():
        return line
    return f"\x1b[{_LABEL_COLORS[first]}m{first}\x1b[0m{line[len(first) :]}"


@contextmanager
def _raise_output_errors() -> Iterator[None]:
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
