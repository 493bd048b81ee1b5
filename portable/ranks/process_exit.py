"""How the process of a rank ends. Loaded before what registers exit handlers, which so run first."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from portable.converters.console import flush

_code: int | None = None


def set_exit_code(code: int) -> int:
    """Have this process end with ``code`` once all exit handlers have run, without freeing the interpreter.

    Threads of gloo free their last tensors when they get to it, and torch aborts the process if the
    interpreter is going by then (pytorch/pytorch#190489).
    """
    global _code
    _code = code
    return code


@atexit.register
def _exit_process() -> None:
    if _code is not None:
        with suppress(Exception):  # of a stream that is closed or full
            flush()
        os._exit(_code)
