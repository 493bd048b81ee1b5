"""Handle Ctrl-C in a command and in the processes that it starts. This module is fast to import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it: 128 plus the number of SIGINT."""
_MESSAGE = b"error: interrupted\n"


def install_exit_on_interrupt() -> None:
    """Install a signal handler that exits immediately on SIGINT, without a traceback.

    Call this function at the start of a process. The handler is for the start and the end of the
    process, when nothing has to be cleaned up. In between, `raise_first_interrupt` replaces it. A
    handler other than Python's default one is left unchanged. Outside of the main thread, nothing is
    installed.
    """
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_interrupted)


@contextmanager
def raise_first_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the first SIGINT in this context, and exit at the second.

    If the second SIGINT also raised an exception, it would interrupt the cleanup after the first
    one and print a traceback. The process also exits if the first SIGINT arrives in a destructor or
    callback, because Python discards exceptions that are raised there.

    The context has no effect outside of the main thread. It also has no effect if the current
    SIGINT handler is neither Python's default handler nor `_exit_interrupted`.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or previous_handler not in (signal.default_int_handler, _exit_interrupted):
        yield
        return
    has_interrupted = False

    def handle_interrupt(*_: object) -> None:
        nonlocal has_interrupted
        if has_interrupted:
            _exit_interrupted()
        has_interrupted = True
        raise KeyboardInterrupt

    hook = sys.unraisablehook

    def handle_unraisable(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _exit_interrupted()
        hook(unraisable)

    sys.unraisablehook = handle_unraisable
    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        sys.unraisablehook = hook


@contextmanager
def block_interrupts_in_children() -> Iterator[None]:
    """Block SIGINT in child processes that are started within this context.

    Ctrl-C in a terminal signals every process of the command. Children inherit the signal mask of
    the calling thread. Unless they unblock SIGINT, they ignore Ctrl-C, and the caller has to end
    them. In the calling thread, SIGINT is only blocked until the context ends. On Windows, the
    context has no effect.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if "multiprocessing" in sys.modules:
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # start the tracker now, because starting it unblocks SIGINT
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _exit_interrupted(*_: object) -> None:
    with suppress(OSError):
        os.write(2, _MESSAGE)
    os._exit(INTERRUPTED)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
