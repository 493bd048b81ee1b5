"""Nothing waits for ever: a rank on which nothing moves says where it stands, and ends.

When one rank stops, the others wait for it in their next collective, and a person sees only that the log has
gone quiet. Each rank therefore watches itself, from a thread that needs nothing but Python's lock.
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
from typing import TYPE_CHECKING, TypeVar

from converters.storage.guarded import open_own

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from types import FrameType

T = TypeVar("T")

COMPILING = 4.0  # how much longer the first batch may take, for which programs are compiled
GRACE = 3.0  # seconds between a rank's report and its end, in which the other ranks report as well
STOPPED = 30.0  # seconds between two looks of the thread that only a stopped process lets pass
EXIT_CODE = 1
_OURS = Path(__file__).parents[2]


class Watchdog:
    """Watches that batches follow each other, as a context around the training.

    Args:
        rank: of this process.
        seconds: without a new batch after which the rank is given up. None: for ever.
        folder: where the stacks of all threads go, as ``rank-<r>.txt``; made when it is needed.
        report: is told one line on where the rank stood.
        record: writes what the device's collectives did last into a folder, where there is a record of it.
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
        self._seconds = seconds
        self._folder = folder
        self._report = report
        self._record = record
        self._main = threading.get_ident()
        self._limit = float("inf")
        self._moved = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def over(self, batches: Iterable[T]) -> Generator[T, None, None]:
        """``batches`` as they are, watched until the last has been asked for."""
        iterator = iter(batches)
        try:
            self._move(COMPILING)
            for number, batch in enumerate(iterator):
                self._move(COMPILING if number == 0 else 1.0)
                yield batch
            self._limit = float("inf")
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch what takes its time, such as writing a large checkpoint to a slow disk."""
        limit, self._limit = self._limit, float("inf")
        try:
            yield
        finally:
            self._moved, self._limit = time.monotonic(), limit

    def _move(self, patience: float) -> None:
        self._moved = time.monotonic()
        self._limit = patience * (self._seconds or float("inf"))

    def _watch(self) -> None:
        assert self._seconds is not None
        looked = time.monotonic()
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            before, looked = looked, time.monotonic()
            if looked - before > STOPPED:  # the whole process stood still, as after Ctrl-Z
                self._moved = looked
            elif looked - self._moved > self._limit:
                self._give_up(looked - self._moved)

    def _give_up(self, quiet: float) -> None:
        where = innermost(sys._current_frames().get(self._main))
        line = f"nothing has moved for {quiet:.0f} s; rank {self._rank} was in {where}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank-{self._rank}.txt"
            with os.fdopen(open_own(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
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
    """Where a thread stands: ``function (file:line), called from function (file:line)`` of this project."""
    if frame is None:
        return "no Python code"
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if Path(entry.filename).is_relative_to(_OURS)]
    last = stack[-1]
    told = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    if own and own[-1] is not last:
        path = Path(own[-1].filename).relative_to(_OURS)
        told += f", called from {own[-1].name} ({path}:{own[-1].lineno})"
    return told
