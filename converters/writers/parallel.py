"""Many jobs on a few threads: reads, checksums, casts and writes all let go of Python's lock."""

from __future__ import annotations

import os
from threading import Event, Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int], object]
    Job = Callable[[Progress], None]

# The kernel lets one thread at a time write to a file, so a few that read, check and cast keep it busy.
_MAX_THREADS = 4


class _StoppedError(Exception):
    """Ends a job whose result nobody waits for any more."""


def threads() -> int:
    """How many threads to use: the processors this process may run on, within reason."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, allowed)


def in_parallel(jobs: Iterator[Job], progress: Progress, workers: int | None = None) -> None:
    """Run every job once, started in order; the first error, or Ctrl-C, ends them all and is raised.

    Args:
        jobs: drawn from one by one, so that a million of them cost no memory. Each is called with a function
            that it calls in turn with the bytes it has dealt with, every few milliseconds: this is where
            a job ends early.
        progress: gets these bytes, from one thread at a time.
        workers: how many threads; None for as many as `threads` says.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed  # not at the top: slow to import

    stop, drawing, telling = Event(), Lock(), Lock()

    def advance(count: int) -> None:
        if stop.is_set():
            raise _StoppedError
        with telling:
            progress(count)

    def work() -> None:
        while not stop.is_set():
            with drawing:
                job = next(jobs, None)
            if job is None:
                return
            job(advance)

    workers = workers or threads()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for ended in as_completed([pool.submit(work) for _ in range(workers)]):
                ended.result()
        finally:
            stop.set()
