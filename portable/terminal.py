"""Terminal output: progress of imports, and noise of libraries to suppress."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def quiet_checkpoint_warnings() -> None:
    """Suppress torch's warnings about TypedStorage and about saving in a single process.

    For the whole process, because background saves warn in another thread.
    """
    for message in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=message)


def at_a_terminal() -> bool:
    """Whether this process is rank 0 and stderr is a terminal."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


def columns() -> int | None:
    """The width of the terminal that stderr is, or None if it is none."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


@contextmanager
def loading() -> Iterator[None]:
    """Show on a terminal that libraries are loading, and clear the line at the end."""
    shown = at_a_terminal() and "torch" not in sys.modules
    if shown:
        print("loading torch and transformers ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clear the line


@contextmanager
def native_stdout_closed() -> Iterator[None]:
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
