"""The terminal: what the program tells through the logger ``portable``, and the noise of libraries."""

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

from portable.converters.console import color_label, escape_control_characters, wrap_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = logging.getLogger("portable")
"""What :func:`tell` tells. The run's log gets it, too."""
_WARNING = "warning: "


def tell(line: str) -> None:
    """Print ``line`` to stderr, above the progress bar; a warning begins with ``warning: ``."""
    LOG.log(logging.WARNING if line.startswith(_WARNING) else logging.INFO, "%s", line)


class Terminal(logging.Handler):
    """Prints to stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        line = color_label(wrap_lines(escape_control_characters(record.getMessage()), sys.stderr))
        with suppress(OSError, AttributeError):  # stderr is closed
            if "tqdm" in sys.modules:
                sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
            else:
                print(line, file=sys.stderr, flush=True)


class _Retries(logging.Filter):
    """One line where huggingface_hub logs two for each of its attempts to reach the hub."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if match := re.search("thrown while requesting [A-Z]+ https?://([^/]+)", text):
            if match[1] not in self._told:
                self._told.add(match[1])
                tell(f"warning: {match[1]} does not answer; trying again, for up to half a minute a file")
            return False
        return not re.match(r"Retrying in [\d.]+s \[Retry", text)


logging.getLogger("huggingface_hub.utils._http").addFilter(_Retries())
TERMINAL = Terminal(logging.INFO)
LOG.addHandler(TERMINAL)
LOG.setLevel(logging.DEBUG)
LOG.propagate = False


def set_quiet(quiet: bool) -> None:
    """Print only warnings and errors from now on, and no progress bars; or everything again."""
    TERMINAL.setLevel(logging.WARNING if quiet else logging.INFO)


def is_quiet() -> bool:
    return TERMINAL.level > logging.INFO


def silence_checkpoint_warnings() -> None:
    """Suppress torch's warnings about TypedStorage and about saving in a single process.

    For the whole process, because background saves warn in another thread.
    """
    for message in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=message)


def shows_bars() -> bool:
    """Whether this process may draw progress bars: stderr is a terminal, and nobody wants quiet."""
    return not is_quiet() and sys.stderr.isatty()


def shows_run_bars() -> bool:
    """Whether this process draws the bars of a run: as :func:`shows_bars`, on rank 0 alone."""
    return shows_bars() and os.environ.get("RANK", "0") == "0"


@contextmanager
def show_loading() -> Iterator[None]:
    """Show on a terminal that libraries are loading, and clear the line at the end.

    No garbage is collected meanwhile: there is none, and looking for it takes a tenth of the time.
    """
    shown = shows_run_bars() and "torch" not in sys.modules
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
    """Discard the connection messages that gloo's C++ code prints to stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
