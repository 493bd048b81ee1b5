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
from typing import TYPE_CHECKING, Protocol

from portable.converters.storage.safe_open import open_without_links

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

COMPILING = 4.0  # factor on the time limit of the first batch, which includes compilation
GRACE = 3.0  # seconds between a rank's report and its exit, so that other ranks can report, too
SUSPENDED = 30.0  # a longer gap between checks, in seconds, means that the process was suspended
EXIT_CODE = 1
_OURS = Path(__file__).parents[2]


class CountedBatches(Protocol):
    """Iterator of batches that a watchdog observes from its thread."""

    count: int
    """Number of batches returned so far."""
    has_ended: bool
    """Whether the last batch has been returned."""


class _Watched:
    """State of the observation of an iterator.

    Args:
        batches: The iterator.
    """

    def __init__(self, batches: CountedBatches) -> None:
        self._batches = batches
        self._first = self._count = batches.count
        self._is_resting = False
        self.moved = time.monotonic()
        """Time of the last progress."""

    @property
    def factor(self) -> float:
        """Factor on the time limit."""
        return COMPILING if self._count <= self._first + 1 else 1.0

    def suspend(self) -> None:
        """Suspend the time limit until the next batch."""
        self._is_resting = True

    def has_moved(self) -> bool:
        """Return whether there was a batch since the last call, or no batch is expected."""
        if self._batches.count != self._count:
            self._count, self._is_resting = self._batches.count, False
            return True
        return self._is_resting or self._batches.has_ended


class Watchdog:
    """Exits the process if no batch arrives for a while, within a context.

    The watchdog observes the iterators of batches from a thread of its own, so that the training loop does
    not have to call it.

    Args:
        rank: Rank of this process.
        seconds: Time limit without a new batch. None for no limit.
        folder: Folder for the stacks of all threads in ``rank-<r>.txt``. Created when needed.
        report: Function that is called with one line that describes where the rank hangs.
        record: Function that writes the flight record of the device's collectives into a folder, if there is
            one.
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
        self._watched: _Watched | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds < float("inf"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def watch(self, batches: CountedBatches) -> None:
        """Observe an iterator from now on. Each batch that it returns restarts the time limit.

        Args:
            batches: The iterator. There is no time limit after its last batch.
        """
        self._watched = _Watched(batches)

    @contextmanager
    def watch_temporarily(self, batches: CountedBatches) -> Iterator[None]:
        """Observe another iterator within this context, such as the batches of an evaluation."""
        before = self._watched
        self.watch(batches)
        try:
            yield
        finally:
            if before is not None:
                before.suspend()
            self._watched = before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend the time limit within this context, for slow work such as saving a large checkpoint."""
        watched, self._watched = self._watched, None
        try:
            yield
        finally:
            if watched is not None:
                watched.moved = time.monotonic()
            self._watched = watched

    def _watch(self) -> None:
        checked = time.monotonic()
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            before, checked = checked, time.monotonic()
            if (watched := self._watched) is None:
                continue
            # A long gap between two checks means that the process was suspended, as after Ctrl-Z.
            if watched.has_moved() or checked - before > SUSPENDED:
                watched.moved = checked
            elif checked - watched.moved > watched.factor * self._seconds:
                self._exit(checked - watched.moved)

    def _exit(self, idle: float) -> None:
        location = describe_stack(sys._current_frames().get(self._main))
        line = f"no progress for {idle:.0f} s; rank {self._rank} was in {location}"
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


def describe_stack(frame: FrameType | None) -> str:
    """Describe a stack: ``function (file:line), called from function (file:line)`` of this project."""
    if frame is None:
        return "no Python code"
    stack = traceback.extract_stack(frame)
    project_frames = [entry for entry in stack if Path(entry.filename).is_relative_to(_OURS)]
    last = stack[-1]
    description = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    if project_frames and project_frames[-1] is not last:
        path = Path(project_frames[-1].filename).relative_to(_OURS)
        description += f", called from {project_frames[-1].name} ({path}:{project_frames[-1].lineno})"
    return description
