"""Call untrusted code, such as a chat template, with time and memory limits.

The calls run in a separate process, which is started by the first call and reused. In a worker
process of :mod:`portable.data.tokens.parallel_map`, they run in the worker itself, because it is
already separate from the main process.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.data.tokens import parallel_map
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_CALL_SECONDS = 20.0
"""Maximum CPU time of a call in seconds. A call renders a batch of up to about 256 KiB of text."""
_MAX_CALL_BYTES = 1 << 30
"""Maximum memory in bytes that a call may allocate."""
_lock = threading.Lock()
_workers: dict[int, parallel_map.WorkerProcess] = {}
"""Process that executes the calls, keyed by the ID of the process that started it.

A forked child process finds no entry for its own ID, so it starts another process.
"""


def call_within_limits(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with time and memory limits, and return its result.

    The limits are :data:`MAX_CALL_SECONDS` of CPU time and :data:`_MAX_CALL_BYTES` of memory. The
    function runs in a separate process, so it cannot change objects of the current process. The
    first call starts this process, and later calls reuse it. In a worker process of
    :mod:`portable.data.tokens.parallel_map`, the function runs in the worker process itself.

    Args:
        function: Function to call. It must be picklable, and so must its result.
        arguments: Arguments of the function. They must be picklable.

    Raises:
        UserError: If the function raises any exception or exceeds a limit. A UserError of the
            function is raised unchanged. For all other exceptions, the message says that the
            template takes too much time or memory. In a worker process, the exceptions of the
            function are not converted, and exceeding a limit raises TimeoutError or
            MemoryError.
    """
    if parallel_map.is_worker_process:
        return _apply_limits_and_call((MAX_CALL_SECONDS, function, arguments))
    with _lock:
        try:
            if os.getpid() not in _workers:
                _workers[os.getpid()] = parallel_map.WorkerProcess(_apply_limits_and_call)
                atexit.register(_workers[os.getpid()].__exit__)
            worker = _workers[os.getpid()]
            worker.send_item((MAX_CALL_SECONDS, function, arguments))
            return worker.receive_result()
        except UserError:
            raise
        except BaseException as error:  # stop the process, otherwise the next call would receive this result
            if os.getpid() in _workers:
                _workers.pop(os.getpid()).__exit__()
            if not isinstance(error, RunError):
                raise
            raise UserError(
                "data.chat_template: the template takes too much time or memory; use another template"
            ) from error


def _apply_limits_and_call(item: tuple[float, Callable[..., Any], tuple[Any, ...]]) -> Any:
    """Call a function in the current process, with a CPU time limit and a memory limit.

    The memory limit is the constant :data:`_MAX_CALL_BYTES`.

    Args:
        item: Maximum CPU time in seconds, the function and its arguments.

    Raises:
        TimeoutError: If the function exceeds the CPU time limit.
        MemoryError: If the function exceeds the memory limit.
    """
    seconds, function, arguments = item
    with _limit_time(seconds), _limit_memory():
        return function(*arguments)


@contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the code within this context exceeds ``seconds`` of CPU time.

    A SIGPROF handler raises the exception, but it can only interrupt Python code. If native code is
    running, a second timer kills the process after twice the time. Use this context manager
    only in the main thread, because other threads cannot set signal handlers.
    """

    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"the call takes more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, raise_timeout)
    # Repeat the signal, because the code may catch the exception.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 20)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _limit_memory() -> Iterator[None]:
    """Apply the memory limit :data:`_MAX_CALL_BYTES` to the code within this context.

    If the limit is exceeded, Python code raises MemoryError. There is no limit on systems other than
    Linux.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    import resource

    now = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if "VmData" in line)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (now + _MAX_CALL_BYTES, soft) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
