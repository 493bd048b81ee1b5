"""Exit code of a rank's process. Import this module first, so that its exit handler runs last."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from portable.converters.console import flush_stdout

_exit_code: int | None = None


def set_process_exit_code(code: int) -> int:
    """Make this process exit with a code after all exit handlers, without finalizing the interpreter.

    Threads of gloo free their last tensors at any time. If the interpreter is being finalized at that time,
    torch aborts the process (pytorch/pytorch#190489).

    Returns:
        The code.
    """
    global _exit_code
    _exit_code = code
    return code


@atexit.register
def _exit_after_handlers() -> None:
    """End the process with the code of :func:`set_process_exit_code`, if it was called."""
    if _exit_code is not None:
        with suppress(Exception):  # the stream may be closed or full
            flush_stdout()
        os._exit(_exit_code)
