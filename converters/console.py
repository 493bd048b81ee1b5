"""Print the output and errors of a command.

Errors on standard output, such as a full disk, are raised as `OutputError`. The error of a closed
pipe is raised as `BrokenPipeError`. Errors on standard error are ignored.
"""

from __future__ import annotations

import os
import sys
import textwrap
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, TextIO

_LABEL_COLORS = {"error:": "1;31", "warning:": "1;33"}


class OutputError(Exception):
    """Error raised if standard output cannot be written, for example because the disk is full."""


def escape_control_characters(text: str) -> str:
    r"""Escape all unprintable characters of a string, except line feeds and tabs.

    Otherwise, a string from an untrusted file could clear the terminal or change its title.

    Args:
        text: String to print.

    Returns:
        The string with escape sequences such as `\x1b`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def print_line(text: str, *, is_colored: bool = False) -> None:
    """Print a line to standard output, and flush it.

    Characters that the encoding of standard output does not contain are escaped.

    Args:
        text: String to print. Its control characters are escaped.
        is_colored: Whether the string contains color codes and is printed unchanged. Untrusted parts
            must already be escaped.

    Raises:
        BrokenPipeError: If the reader of the pipe has exited, as in `| head`.
        OutputError: If standard output cannot be written for any other reason.
    """
    text = text if is_colored else escape_control_characters(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with _raise_output_errors():
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    flush_stdout()


def flush_stdout() -> None:
    """Flush standard output.

    Raises:
        BrokenPipeError: If the reader of the pipe has exited, as in `| head`.
        OutputError: If standard output cannot be written for any other reason.
    """
    if sys.stdout is not None:  # None if it was closed at start-up
        with _raise_output_errors():
            sys.stdout.flush()


def print_error(line: str) -> None:
    """Print a line to standard error. If this fails, do nothing.

    Args:
        line: Line to print. Its control characters are escaped. On a terminal, it is wrapped, and
            a leading `error:` or `warning:` is colored.
    """
    if sys.stderr is None:  # print() would write to standard output
        return
    with suppress(OSError):
        print(color_error_label(wrap_lines(escape_control_characters(line), sys.stderr)), file=sys.stderr)


def is_terminal(stream: IO[str] | None) -> bool:
    """Return whether a standard stream is a terminal. It is None if it was closed at start-up."""
    return stream is not None and stream.isatty()


def get_terminal_width(stream: TextIO | None) -> int | None:
    """Return the width of a terminal in columns.

    Args:
        stream: Standard output or standard error. None if it is closed.

    Returns:
        The environment variable `COLUMNS` if it is a positive number, otherwise the width that the
        terminal reports, or 80 if it reports none. None if the stream is not a terminal.
    """
    if stream is None or not is_terminal(stream):
        return None
    if (value := os.environ.get("COLUMNS", "")).isdecimal() and int(value) > 0:
        return int(value)
    with suppress(OSError, ValueError):
        if (width := os.get_terminal_size(stream.fileno()).columns) > 0:
            return width
    return 80


def wrap_lines(text: str, stream: TextIO | None) -> str:
    """Wrap long lines at word boundaries if the stream is a terminal.

    Args:
        text: Lines to wrap.
        stream: Output stream. If it is None or not a terminal, `text` is returned unchanged.

    Returns:
        The wrapped lines. Continuation lines are indented by two additional columns.
    """
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
    """Color the `error:` or `warning:` at the start of a line if standard error is a terminal.

    Returns:
        The line. Unchanged if it has no such label, or if the environment variable NO_COLOR
        (https://no-color.org) or `TERM=dumb` disables colors.
    """
    first = line.split(" ", 1)[0]
    if first not in _LABEL_COLORS or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return line
    if not is_terminal(sys.stderr):
        return line
    return f"\x1b[{_LABEL_COLORS[first]}m{first}\x1b[0m{line[len(first) :]}"


@contextmanager
def _raise_output_errors() -> Iterator[None]:
    """Convert OSError to OutputError within this context. The error of a closed pipe propagates unchanged.

    After any other error, standard output is redirected to `/dev/null`.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # Redirect standard output, because otherwise the interpreter's flush at exit fails as well.
        with suppress(OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, sys.stdout.fileno())
            os.close(descriptor)
        raise OutputError(
            f"standard output: {error.strerror or error}; write the output to another file"
        ) from None
