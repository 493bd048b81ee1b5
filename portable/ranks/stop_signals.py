"""What SIGTERM and SIGINT do in a rank: finish the step, save, exit with code 75."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from portable.terminal import at_a_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STOPPING = b"\nstopping after this step and saving a checkpoint; again to stop now without saving\n"


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and SIGINT into a request to stop after the step. A second signal has its usual effect."""
    received = False

    def request(number: int, _: object) -> None:
        nonlocal received
        received = True
        signal.signal(number, previous[signal.Signals(number)])
        if at_a_terminal():
            os.write(2, _STOPPING)  # print is not safe in a signal handler

    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, request) for number in ours}
    except ValueError:  # only the main thread can set signal handlers
        yield lambda: False
        return
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
