"""Tokenize the next shards of a stream in other processes during training."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from portable.data.tokens.parallel_map import WorkerProcess
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from portable.data.sources.source import SourceShard
    from portable.data.tokens.tokenize import TokenizeJob


class BackgroundTokenizer:
    """Pool of processes that tokenize shards. Each process receives its shards from a separate thread.

    Errors are ignored here. An error occurs again, and is reported, when training needs the shard.

    Args:
        job: Job that tokenizes a shard.
        on_shard_done: Callback for each tokenized shard. It receives the folder of the tokens, and is
            called from one of the threads.
        num_processes: Maximum number of processes.
    """

    def __init__(
        self, job: TokenizeJob, on_shard_done: Callable[[Path], None], num_processes: int = 1
    ) -> None:
        self._job = job
        self._done = on_shard_done
        self._processes = num_processes
        self._requested: list[SourceShard] = []
        # Contains ids of shard objects. They remain valid because the stream keeps its shards.
        self._started: set[int] = set()
        self._condition = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._workers: set[WorkerProcess] = set()

    def request_shards(self, shards: Sequence[SourceShard]) -> None:
        """Set the shards to tokenize in the background. They are tokenized in the given order.

        This method returns immediately. The new list replaces the previous list. A previously
        requested shard that is missing from the new list is dropped, unless a process has already
        started to tokenize it. A shard that is in both lists is tokenized only once. Shards are
        compared by identity, so always pass the same object for a shard.
        """
        with self._condition:
            self._requested = list(shards)
            self._started &= set(map(id, shards))
            while self._requested and len(self._threads) < min(self._processes, len(self._requested)):
                thread = threading.Thread(target=self._run_worker, name="tokenize-ahead", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify_all()

    def close(self) -> None:
        """Kill the processes, even while they tokenize a shard. Nothing is written afterwards."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for worker in tuple(self._workers):
            worker.kill()
        for thread in self._threads:  # each thread waits for its process
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(timeout=5)

    def _run_worker(self) -> None:
        """Send shards to a worker process until :meth:`close` is called.

        This method is the main function of each thread. Every thread has its own worker process.
        """
        while (shard := self._wait_for_shard()) is not None:
            # A process that has died is replaced when another shard is requested.
            with suppress(OSError), WorkerProcess(self._job) as worker:
                self._workers.add(worker)
                if self._closed:  # close() may have been called before this worker was added
                    worker.kill()
                while shard is not None and not worker.has_ended:
                    with suppress(UserError, RunError):
                        worker.send_item(shard)
                        self._done(worker.receive_result())
                    shard = None if worker.has_ended else self._wait_for_shard()
                self._workers.discard(worker)

    def _wait_for_shard(self) -> SourceShard | None:
        """Wait for a requested shard that no process has started to tokenize, and mark it as started.

        Returns:
            The shard. None after :meth:`close`.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._find_unstarted() is not None)
            if self._closed:
                return None
            shard = self._find_unstarted()
            self._started.add(id(shard))
            return shard

    def _find_unstarted(self) -> SourceShard | None:
        """Return the first requested shard that no process has started, or None if there is none."""
        return next((shard for shard in self._requested if id(shard) not in self._started), None)
