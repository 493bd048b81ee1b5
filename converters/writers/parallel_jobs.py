"""Many jobs on a few threads: reads, checksums, casts and writes release the GIL."""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from threading import Event, Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    ReportBytes = Callable[[int], object]
    Job = Callable[[ReportBytes], None]

# Beyond this, the interpreter's lock between two blocks would be the limit.
_MAX_THREADS = 16


class _StoppedError(Exception):
    """Ends a job after another one failed."""


def count_usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_default_thread_count() -> int:
    """The number of threads: a core each, at most 16."""
    return min(_MAX_THREADS, count_usable_cores())


def interleave_job_groups(groups: Iterable[Iterator[Job]], max_active_groups: int) -> Iterator[Job]:
    """The jobs of up to `max_active_groups` groups by turns, each group's in order; one that ends makes way for the next.

    The kernel lets one thread at a time write to a file. With a group for each file, threads do not wait for
    each other.
    """
    waiting = iter(groups)
    active = deque(islice(waiting, max_active_groups))
    while active:
        group = active.popleft()
        job = next(group, None)
        if job is not None:
            active.append(group)
            yield job
        else:
            active.extend(islice(waiting, 1))


def run_jobs_in_threads(
    jobs: Iterator[Job], report_bytes: ReportBytes, num_threads: int | None = None
) -> None:
    """Run every job once, started in order; the first error, or Ctrl-C, stops all and is raised.

    Args:
        jobs: drawn one by one, so that a million of them cost no memory. Each is called with a function that
            it must call with the number of bytes processed every few milliseconds, and that stops the job
            after a failure elsewhere.
        report_bytes: receives these numbers, from one thread at a time.
        num_threads: the number of threads; None for `get_default_thread_count()`.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed  # not at the top: slow to import

    stop_event, jobs_lock, progress_lock = Event(), Lock(), Lock()

    def add_progress(count: int) -> None:
        if stop_event.is_set():
            raise _StoppedError
        with progress_lock:
            report_bytes(count)

    def run_worker() -> None:
        while not stop_event.is_set():
            with jobs_lock:
                job = next(jobs, None)
            if job is None:
                return
            job(add_progress)

    num_threads = num_threads or get_default_thread_count()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for ended in as_completed([pool.submit(run_worker) for _ in range(num_threads)]):
                ended.result()
        finally:
            stop_event.set()
