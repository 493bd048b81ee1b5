"""Exit the process without finalizing the Python interpreter.

Exit handlers run in reverse order of registration. Import this module before others that register
exit handlers, so that its own handler runs last.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from portable.converters.console import flush_stdout

_exit_code: int | None = None


def set_process_exit_code(code: int) -> int:
    """Set the exit code of this process, and make it exit without finalizing the interpreter.

    All exit handlers still run. Finalization is skipped because torch aborts the process if a gloo
    thread frees its last tensors while the interpreter is being finalized (pytorch/pytorch#190489).

    Returns:
        ``code``.
    """
    global _exit_code
    _exit_code = code
    return code


@atexit.register
def _exit_after_handlers() -> None:
    """Exit immediately with the code from :func:`set_process_exit_code`, if one was set.

    This function is itself an exit handler. It is registered first, so it runs after all other exit
    handlers. It skips the finalization of the interpreter.
    """
    if _exit_code is not None:
        with suppress(Exception):  # the stream may be closed or full
            flush_stdout()
        os._exit(_exit_code)
