"""Print status lines and progress bars in the terminal, and suppress messages of other libraries.

Importing this module attaches a handler to the logger ``portable``, and a filter to a logger of
huggingface_hub.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from portable.converters.console import (
    color_error_label,
    escape_control_characters,
    is_terminal,
    wrap_lines,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger("portable")
"""Logger of all status lines. The log file of a run has a handler for it as well."""
_WARNING = "warning: "


def print_status(line: str) -> None:
    """Print a line to stderr above the progress bar, through the logger ``portable``.

    A line that begins with ``warning: `` is logged as a warning, so ``log.quiet`` does not hide it.
    """
    LOG.log(logging.WARNING if line.startswith(_WARNING) else logging.INFO, "%s", line)


class TerminalHandler(logging.Handler):
    """Logging handler that prints to stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record, wrapped to the width of the terminal.

        Control characters in the message are escaped. Nothing is printed if stderr is closed.
        """
        if sys.stderr is None:  # closed at start-up, and print() would write to stdout
            return
        line = color_error_label(wrap_lines(escape_control_characters(record.getMessage()), sys.stderr))
        with suppress(OSError, AttributeError):  # stderr is closed
            if "tqdm" in sys.modules:
                sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
            else:
                print(line, file=sys.stderr, flush=True)


class _RetryFilter(logging.Filter):
    """Logging filter that replaces huggingface_hub's messages about retries with one warning per host.

    The warning is printed at the first message about the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reported_hosts: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Suppress huggingface_hub's messages about retries.

        For each host, the first suppressed message is replaced by a warning that the host does not
        respond and that the requests are tried again.

        Returns:
            False if the message is about a retry. True for all other messages.
        """
        text = record.getMessage()
        if match := re.search("thrown while requesting [A-Z]+ https?://([^/]+)", text):
            if match[1] not in self._reported_hosts:
                self._reported_hosts.add(match[1])
                print_status(
                    f"warning: {match[1]} does not respond; trying again, for up to half a minute per file"
                )
            return False
        return not re.match(r"Retrying in [\d.]+s \[Retry", text)


logging.getLogger("huggingface_hub.utils._http").addFilter(_RetryFilter())
TERMINAL_HANDLER = TerminalHandler(logging.INFO)
LOG.addHandler(TERMINAL_HANDLER)
LOG.setLevel(logging.DEBUG)
LOG.propagate = False


def set_quiet(quiet: bool) -> None:
    """Hide or show status lines and progress bars. Warnings and errors are always printed."""
    TERMINAL_HANDLER.setLevel(logging.WARNING if quiet else logging.INFO)


def is_quiet() -> bool:
    """Return whether status lines and progress bars are hidden."""
    return TERMINAL_HANDLER.level > logging.INFO


def silence_checkpoint_warnings() -> None:
    """Suppress torch's warnings about TypedStorage and about saving in a single process.

    The warnings remain suppressed in all threads until the process ends, because background saves
    run in another thread.
    """
    for message in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=message)


def shows_progress_bars() -> bool:
    """Return whether this process may draw progress bars: stderr is a terminal, and the run is not quiet."""
    return not is_quiet() and is_terminal(sys.stderr)


def shows_run_progress_bars() -> bool:
    """Return whether this process draws the progress bars of a run. Only rank 0 draws them.

    The rank is read from the environment variable ``RANK``. A process without this variable is rank
    0.
    """
    return shows_progress_bars() and os.environ.get("RANK", "0") == "0"


@contextmanager
def show_loading_message() -> Iterator[None]:
    """Show a message while libraries are imported within this context, and then clear it.

    The message is shown if :func:`shows_run_progress_bars` returns True and torch is not imported
    yet. Garbage collection is always disabled within this context, because it would account for a
    tenth of the import time, and imports create almost no garbage.
    """
    shown = shows_run_progress_bars() and "torch" not in sys.modules
    if shown:
        print("loading torch and transformers ...", end="", file=sys.stderr, flush=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clear the line


@contextmanager
def discard_native_stdout() -> Iterator[None]:
    """Discard everything that is written to file descriptor 1 within this context.

    Output of native code is also discarded. This hides messages about connections that the C++ code
    of gloo prints to stdout. The descriptor is redirected for all threads. Text that is still in a
    buffer at the end of the context, such as the buffer of ``sys.stdout``, is printed afterward.
    Does nothing if stdout was closed at start-up, because the descriptor may belong to another file.
    """
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
