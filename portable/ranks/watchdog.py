"""Watchdog against deadlocks. A rank that makes no progress reports its stack and exits.

If one rank hangs, the others wait for it in their next collective, and the log stops without a
message. Each rank therefore monitors its own progress from a thread. The thread makes no collective
or device calls, so that it cannot hang as well.
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

from portable.converters.storage.safe_open import open_for_writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

FIRST_BATCH_FACTOR = 4.0
"""Factor by which the time limit is larger for the first batch, because the model is compiled during it."""
GRACE_SECONDS = 3.0
"""Seconds between a rank's report and its exit, so that other ranks can report as well."""
SUSPENDED_SECONDS = 30.0
"""Largest number of seconds between two checks of a running process. After a longer gap, the process must
have been suspended, so that the time without progress does not count."""
EXIT_CODE = 1
_PROJECT_FOLDER = Path(__file__).parents[2]


class CountedBatches(Protocol):
    """Iterator of batches that counts them, so that a watchdog can check its progress from another thread."""

    num_batches: int
    """Number of batches returned so far."""
    has_ended: bool
    """Whether the last batch has been returned."""


class _WatchedBatches:
    """Progress of an iterator of batches since the watchdog started to observe it.

    Args:
        batches: The iterator.
    """

    def __init__(self, batches: CountedBatches) -> None:
        self._batches = batches
        self._first_count = self._last_count = batches.num_batches
        self._is_resting = False
        self.last_progress_time = time.monotonic()
        """``time.monotonic()`` of the last progress."""

    @property
    def time_limit_factor(self) -> float:
        """Factor by which the time limit is multiplied. The first batch gets more time."""
        return FIRST_BATCH_FACTOR if self._last_count <= self._first_count + 1 else 1.0

    def pause_until_next_batch(self) -> None:
        """Suspend the time limit until the iterator returns its next batch."""
        self._is_resting = True

    def has_progressed(self) -> bool:
        """Return whether the iterator has returned a batch since the last call, or no batch is due.

        No batch is due after the last one, or between :meth:`pause_until_next_batch` and the next batch.
        """
        if self._batches.num_batches != self._last_count:
            self._last_count, self._is_resting = self._batches.num_batches, False
            return True
        return self._is_resting or self._batches.has_ended


class Watchdog:
    """Context that exits the process if no batch arrives within a time limit.

    A thread monitors the iterators of batches, so that the training loop does not have to report its
    progress in each step.

    Args:
        rank: Rank of this process.
        timeout_seconds: Maximum time between two batches. None for no limit.
        folder: Folder for the file ``rank-<r>.txt`` with the stacks of all threads. Created when
            needed.
        report: Function that is called with a one-line description of the hang.
        dump_collectives: Function that writes the device's most recent collectives to a folder.
    """

    def __init__(
        self,
        *,
        rank: int,
        timeout_seconds: float | None,
        folder: Path,
        report: Callable[[str], None],
        dump_collectives: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._rank = rank
        self._timeout_seconds = float("inf") if timeout_seconds is None else timeout_seconds
        self._folder = folder
        self._report = report
        self._dump_collectives = dump_collectives
        self._main = threading.get_ident()
        self._watched: _WatchedBatches | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._check_progress_periodically, name="watchdog", daemon=True
        )

    def __enter__(self) -> Watchdog:
        if self._timeout_seconds < float("inf"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def watch_batches(self, batches: CountedBatches) -> None:
        """Observe an iterator from now on. Each batch that it returns restarts the time limit.

        Args:
            batches: The iterator. There is no time limit after its last batch.
        """
        self._watched = _WatchedBatches(batches)

    @contextmanager
    def watch_batches_temporarily(self, batches: CountedBatches) -> Iterator[None]:
        """Monitor another iterator within this context, for example during an evaluation.

        When the context ends, the watchdog returns to the previous iterator. Its time limit starts with its
        next batch.
        """
        before = self._watched
        self.watch_batches(batches)
        try:
            yield
        finally:
            if before is not None:
                before.pause_until_next_batch()
            self._watched = before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend the time limit within this context, for slow work such as saving a large checkpoint.

        The time limit starts again from zero when the context ends.
        """
        watched, self._watched = self._watched, None
        try:
            yield
        finally:
            if watched is not None:
                watched.last_progress_time = time.monotonic()
            self._watched = watched

    def _check_progress_periodically(self) -> None:
        """Check for progress periodically, and exit the process if it stops. Runs in a thread."""
        checked = time.monotonic()
        while not self._ended.wait(min(1.0, self._timeout_seconds / 4)):
            before, checked = checked, time.monotonic()
            if (watched := self._watched) is None:
                continue
            # A long gap between two checks means that the process was suspended, as after Ctrl-Z.
            if watched.has_progressed() or checked - before > SUSPENDED_SECONDS:
                watched.last_progress_time = checked
            elif checked - watched.last_progress_time > watched.time_limit_factor * self._timeout_seconds:
                self._report_and_exit(checked - watched.last_progress_time)

    def _report_and_exit(self, idle: float) -> None:
        """Write the stacks of all threads to a file, report the hang in one line, and exit the process.

        Args:
            idle: Time without progress in seconds.
        """
        location = describe_stack(sys._current_frames().get(self._main))
        line = f"no progress for {idle:.0f} s; rank {self._rank} was in {location}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank-{self._rank}.txt"
            with os.fdopen(open_for_writing(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
                file.write(f"{line}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            line += f" (stacks: {path})"
            self._dump_collectives(self._folder)
        finally:
            self._report(line)
            time.sleep(GRACE_SECONDS)
            os._exit(EXIT_CODE)


def describe_stack(frame: FrameType | None) -> str:
    """Describe the innermost function of a stack and the function of this project that called it.

    Returns:
        A string such as ``function (file:line), called from function (file:line)``. If ``frame`` is
        None, ``no Python code``.
    """
    if frame is None:
        return "no Python code"
    stack = traceback.extract_stack(frame)
    project_frames = [entry for entry in stack if Path(entry.filename).is_relative_to(_PROJECT_FOLDER)]
    last = stack[-1]
    description = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    if project_frames and project_frames[-1] is not last:
        path = Path(project_frames[-1].filename).relative_to(_PROJECT_FOLDER)
        description += f", called from {project_frames[-1].name} ({path}:{project_frames[-1].lineno})"
    return description
