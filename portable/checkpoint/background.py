"""Work beside the training, in a thread that does not keep the process alive."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_background(function: Callable[[], None], *, name: str) -> Future[None]:
    """Call ``function`` in a thread called ``name``; the future ends with it, and raises what it raised."""
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
