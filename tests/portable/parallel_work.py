"""What the test of processes lets them do; they import this module, so it imports little."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from portable.errors import UserError


def work(item: int) -> int:
    if item == -1:
        raise UserError("refused")
    if item == -2:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == -3:
        raise OSError("no\nroom")
    return item * item


def wait_for_the_last(item: tuple[int, str]) -> int:
    """The first of seven waits for the last."""
    number, file = item
    if number == 6:
        Path(file).touch()
    end = time.monotonic() + 60
    while number == 0 and not Path(file).exists() and time.monotonic() < end:
        time.sleep(0.05)
    return number if Path(file).exists() or number else -1
