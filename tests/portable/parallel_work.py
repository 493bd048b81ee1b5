"""Work functions for the test of processes. The processes import this module, so it imports little."""

from __future__ import annotations

import os
import signal

from portable.errors import UserError


def work(item: int) -> int:
    if item == -1:
        raise UserError("refused")
    if item == -2:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == -3:
        raise OSError("no\nroom")
    return item * item
