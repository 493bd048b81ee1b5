"""Exit of a rank's process without finalizing the interpreter.

Import this module before modules that register exit handlers, so that its own exit handler runs last.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from portable.converters.console import flush_stdout

_exit_code: int | None = None


def set_process_exit_code(code: int) -> int:
    """Set the exit code of this process, and make it exit without finalizing the interpreter.

    The process still runs all exit handlers when it ends. The interpreter is not finalized, because threads
    of gloo free their last tensors at any time, and if they do so during finalization, torch aborts the
    process (pytorch/pytorch#190489).

    Returns:
        ``code``.
    """
    global _exit_code
    _exit_code = code
    return code


@atexit.register
def _exit_after_handlers() -> None:
    """End the process at once with the code of :func:`set_process_exit_code`, if that function was called."""
    if _exit_code is not None:
        with suppress(Exception):  # the stream may be closed or full
            flush_stdout()
        os._exit(_exit_code)
