"""A watchdog against deadlocks: a rank without progress reports its stack and exits.

If one rank hangs, the others wait for it in their next collective and the log stops without a message. So
each rank watches itself, in a thread that only needs the GIL.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from converters.storage.safe_open import open_without_links

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

COMPILING = 4.0  # factor on the time limit of the first batch, which includes compilation
GRACE = 3.0  # seconds between a rank's report and its exit, so that other ranks can report, too
SUSPENDED = 30.0  # a longer gap between checks, in seconds, means that the process was suspended
EXIT_CODE = 1
_OURS = Path(__file__).parents[2]


class Watchdog:
    """Exits the process if no batch arrives for a while, within a context.

    Args:
        rank: of this process.
        seconds: the time limit without a new batch; None for no limit.
        folder: for the stacks of all threads in ``rank-<r>.txt``. Created when needed.
        report: called with one line that describes where the rank hangs.
        record: writes the flight record of the device's collectives into a folder, if there is one.
    """

    def __init__(
        self,
        *,
        rank: int,
        seconds: float | None,
        folder: Path,
        report: Callable[[str], None],
        record: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._rank = rank
        self._seconds = float("inf") if seconds is None else seconds
        self._folder = folder
        self._report = report
        self._record = record
        self._main = threading.get_ident()
        self._limit = float("inf")
        self._moved = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds < float("inf"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def restart(self, *, compiles: bool = False) -> None:
        """Restart the timer, because a batch is expected or has arrived.

        Args:
            compiles: Whether the next batch may take longer, because the first batch includes compilation.
        """
        self._moved = time.monotonic()
        self._limit = (COMPILING if compiles else 1.0) * self._seconds

    def rest(self) -> None:
        """Stop the timer until the next call of :meth:`restart`."""
        self._limit = float("inf")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the time limit within this context, for slow work such as saving a large checkpoint."""
        limit, self._limit = self._limit, float("inf")
        try:
            yield
        finally:
            self._moved, self._limit = time.monotonic(), limit

    def _watch(self) -> None:
        checked = time.monotonic()
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            before, checked = checked, time.monotonic()
            if checked - before > SUSPENDED:  # as after Ctrl-Z: restart the timer
                self._moved = checked
            elif checked - self._moved > self._limit:
                self._exit(checked - self._moved)

    def _exit(self, idle: float) -> None:
        where = innermost(sys._current_frames().get(self._main))
        line = f"no progress for {idle:.0f} s; rank {self._rank} was in {where}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank-{self._rank}.txt"
            with os.fdopen(open_without_links(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
                file.write(f"{line}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            line += f" (stacks: {path})"
            self._record(self._folder)
        finally:
            self._report(line)
            time.sleep(GRACE)
            os._exit(EXIT_CODE)


def innermost(frame: FrameType | None) -> str:
    """Describe a stack: ``function (file:line), called from function (file:line)`` of this project."""
    if frame is None:
        return "no Python code"
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if Path(entry.filename).is_relative_to(_OURS)]
    last = stack[-1]
    where = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    if own and own[-1] is not last:
        path = Path(own[-1].filename).relative_to(_OURS)
        where += f", called from {own[-1].name} ({path}:{own[-1].lineno})"
    return where
