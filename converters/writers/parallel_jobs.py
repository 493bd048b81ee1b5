"""Run jobs in a few threads.

The threads run in parallel, because reads, checksums, casts and writes release the GIL.
"""

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

# More threads are not faster, because they wait for the GIL between two blocks.
_MAX_THREADS = 16


class _StoppedError(Exception):
    """Error that stops a running job after another job has failed."""


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use, according to its CPU affinity.

    On systems without CPU affinity, such as macOS, all cores are counted.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_default_thread_count() -> int:
    """Return the default number of threads: the number of usable cores, at most 16."""
    return min(_MAX_THREADS, count_usable_cores())


def interleave_job_groups(groups: Iterable[Iterator[Job]], max_active_groups: int) -> Iterator[Job]:
    """Yield jobs from several groups in turn, keeping the order within each group.

    The kernel lets only one thread at a time write to a file. With one group per file, threads do not
    wait for each other.

    Args:
        groups: Groups of jobs.
        max_active_groups: Maximum number of groups to alternate between. When a group ends, the next
            group replaces it.

    Yields:
        The jobs of all groups.
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
    """Run all jobs in several threads, starting them in order.

    The first exception in a job, or Ctrl-C, stops the other jobs and is raised in the calling thread.

    Args:
        jobs: Jobs to run. Jobs are taken from the iterator one at a time, so the memory does not grow
            with the number of jobs. Each job receives a progress function, and must call it every few
            milliseconds with the number of bytes that it has processed. After another job has failed,
            the progress function raises an exception that stops the job.
        report_bytes: Callback that receives the number of processed bytes. Only one thread calls it at
            a time.
        num_threads: Number of threads. The default is `get_default_thread_count()`.
    """
    from concurrent.futures import (
        ThreadPoolExecutor,
        as_completed,
    )  # not at the top, because the import is slow

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
