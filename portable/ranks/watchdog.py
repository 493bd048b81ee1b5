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
"""Factor that extends the time limit of the first batch, because the model is compiled during it."""
GRACE_SECONDS = 3.0
"""Seconds between a rank's report and its exit, so that other ranks can report as well."""
SUSPENDED_SECONDS = 30.0
"""Maximum number of seconds between two checks while the process runs. After a longer gap, the process
must have been suspended, so the time without progress does not count."""
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
        """Factor by which the time limit for the next batch is multiplied.

        The factor is :data:`FIRST_BATCH_FACTOR` until the second batch arrives, because the model
        is compiled for the first batch. Afterward, the factor is 1.
        """
        return FIRST_BATCH_FACTOR if self._last_count <= self._first_count + 1 else 1.0

    def pause_until_next_batch(self) -> None:
        """Suspend the time limit until the iterator returns its next batch."""
        self._is_resting = True

    def has_progressed(self) -> bool:
        """Return True if a batch was returned since the last call, or if no batch is due.

        No batch is due after the iterator is exhausted, or between :meth:`pause_until_next_batch`
        and the next batch.
        """
        if self._batches.num_batches != self._last_count:
            self._last_count, self._is_resting = self._batches.num_batches, False
            return True
        return self._is_resting or self._batches.has_ended


class Watchdog:
    """Context manager that exits the process if no batch arrives within a time limit.

    A thread monitors the iterators of batches, so that the training loop does not have to report
    its progress in each step. There is no time limit before the first call of
    :meth:`watch_batches`. After a hang, the process exits with code 1 and without cleanup. Create
    the object in the thread that trains, because the description of the hang contains the position
    of this thread.

    Args:
        rank: Rank of this process.
        timeout_seconds: Maximum time between two batches in seconds. None for no limit. For the
            first two batches of an iterator, the limit is multiplied by :data:`FIRST_BATCH_FACTOR`.
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
        """Start watching an iterator for hangs.

        The time limit restarts with each batch that the iterator returns. If the next batch does
        not arrive within the time limit, the watchdog exits the process. The iterator replaces the
        previously watched iterator.

        Args:
            batches: The iterator. After its last batch, the time limit still applies until a
                further batch is requested.
        """
        self._watched = _WatchedBatches(batches)

    @contextmanager
    def watch_batches_temporarily(self, batches: CountedBatches) -> Iterator[None]:
        """Monitor another iterator within this context, for example during an evaluation.

        When the context ends, the watchdog monitors the previous iterator again. There is no time
        limit until the previous iterator returns its next batch.
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
        """Check periodically whether the run makes progress, and exit the process if it does not.

        Runs in a thread. The process exits if the run makes no progress within the time limit. The
        timer restarts if the process was suspended, for example by Ctrl-Z.
        """
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
        """Write the stacks of all threads to a file, report the hang, and exit the process.

        Also dumps the most recent collectives. If a file cannot be written, the hang is reported
        anyway. The process exits :data:`GRACE_SECONDS` after the report, so that other ranks can
        report as well.

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
    """Describe the innermost function of a stack, and its nearest caller that belongs to this project.

    Returns:
        A string such as ``function (file:line), called from function (file:line)``. The second part
        is omitted if the innermost function itself belongs to this project, or if no function of
        the stack does. If ``frame`` is None, the result is ``code outside of Python``.
    """
    if frame is None:
        return "code outside of Python"
    stack = traceback.extract_stack(frame)
    project_frames = [entry for entry in stack if Path(entry.filename).is_relative_to(_PROJECT_FOLDER)]
    last = stack[-1]
    description = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    if project_frames and project_frames[-1] is not last:
        path = Path(project_frames[-1].filename).relative_to(_PROJECT_FOLDER)
        description += f", called from {project_frames[-1].name} ({path}:{project_frames[-1].lineno})"
    return description
