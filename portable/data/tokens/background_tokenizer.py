"""Tokenize the next shards of a stream in other processes, while the run trains on the ones before."""

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
    """Processes that tokenize shards, each with a thread that tells it which.

    What fails here is tried again, and told, where the shard is needed.

    Args:
        job: what a process does with a shard.
        on_shard_done: called after each shard with its folder, in a thread.
        num_processes: how many.
    """

    def __init__(
        self, job: TokenizeJob, on_shard_done: Callable[[Path], None], num_processes: int = 1
    ) -> None:
        self._job = job
        self._done = on_shard_done
        self._processes = num_processes
        self._requested: list[SourceShard] = []
        self._started: set[int] = set()  # by id: a stream keeps its shards
        self._condition = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._workers: set[WorkerProcess] = set()

    def request_shards(self, shards: Sequence[SourceShard]) -> None:
        """Tokenize these next, in order, and none of those wanted before."""
        with self._condition:
            self._requested = list(shards)
            self._started &= set(map(id, shards))
            while self._requested and len(self._threads) < min(self._processes, len(self._requested)):
                thread = threading.Thread(target=self._run_worker, name="tokenize-ahead", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify_all()

    def close(self) -> None:
        """End the processes, also in the middle of a shard: nothing is written after it."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for worker in tuple(self._workers):
            worker.kill()
        for thread in self._threads:  # each waits for its process
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(timeout=5)

    def _run_worker(self) -> None:
        while (shard := self._wait_for_shard()) is not None:
            # A process that died is replaced when there is more to do.
            with suppress(OSError), WorkerProcess(self._job) as worker:
                self._workers.add(worker)
                if self._closed:  # and may not have seen this worker
                    worker.kill()
                while shard is not None and not worker.has_ended:
                    with suppress(UserError, RunError):
                        worker.send_item(shard)
                        self._done(worker.receive_result())
                    shard = None if worker.has_ended else self._wait_for_shard()
                self._workers.discard(worker)

    def _wait_for_shard(self) -> SourceShard | None:
        """Wait for a shard to tokenize; None after :meth:`close`."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._find_unstarted() is not None)
            if self._closed:
                return None
            shard = self._find_unstarted()
            self._started.add(id(shard))
            return shard

    def _find_unstarted(self) -> SourceShard | None:
        return next((shard for shard in self._requested if id(shard) not in self._started), None)
