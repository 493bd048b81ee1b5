"""What a person at a terminal is told, or not, of the libraries under a training."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def quiet_checkpoint_warnings() -> None:
    """Drop torch's word on its own use of TypedStorage, and on a single process that saves alone.

    For the whole process, since a save in the background warns from another thread.
    """
    for message in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=message)


def at_a_terminal() -> bool:
    """Whether this process is the one rank that speaks, and a person may be watching."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


@contextmanager
def loading() -> Iterator[None]:
    """Say on a terminal what the first seconds go to; the words go when it is done."""
    shown = at_a_terminal() and "torch" not in sys.modules
    if shown:
        print("loading torch and transformers ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # to the start of the line, and wipe it


@contextmanager
def native_stdout_closed() -> Iterator[None]:
    """Keep gloo's C++ code from printing its connections into what a person reads."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
