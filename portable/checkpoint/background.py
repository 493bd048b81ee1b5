"""Background work in a daemon thread."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_background(function: Callable[[], None], *, name: str) -> Future[None]:
    """Call ``function`` in a daemon thread called ``name``; return a future for its end or exception."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name=name, daemon=True).start()
    return future
