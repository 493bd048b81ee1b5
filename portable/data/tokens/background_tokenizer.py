"""Tokenize the next shards of a stream in other processes, while the run trains on the ones before."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from portable.data.tokens.parallel import Worker
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from portable.data.sources.source import Shard
    from portable.data.tokens.tokenize import TokenizeJob


class BackgroundTokenizer:
    """Processes that tokenize shards, each with a thread that tells it which.

    What fails here is tried again, and told, where the shard is needed.

    Args:
        job: what a process does with a shard.
        done: called after each shard with its folder, in a thread.
        processes: how many.
    """

    def __init__(self, job: TokenizeJob, done: Callable[[Path], None], processes: int = 1) -> None:
        self._job = job
        self._done = done
        self._processes = processes
        self._wanted: list[Shard] = []
        self._begun: set[int] = set()  # by id: a stream keeps its shards
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._workers: set[Worker] = set()

    def want(self, shards: Sequence[Shard]) -> None:
        """Tokenize these next, in order, and none of those wanted before."""
        with self._changed:
            self._wanted = list(shards)
            self._begun &= set(map(id, shards))
            while self._wanted and len(self._threads) < min(self._processes, len(self._wanted)):
                thread = threading.Thread(target=self._run, name="tokenize-ahead", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """End the processes, also in the middle of a shard: nothing is written after it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in tuple(self._workers):
            worker.kill()
        for thread in self._threads:  # each waits for its process
            if thread is not threading.current_thread():  # the garbage collector may call from any thread
                thread.join(timeout=5)

    def _run(self) -> None:
        while (shard := self._next()) is not None:
            # A process that died is replaced when there is more to do.
            with suppress(OSError), Worker(self._job) as worker:
                self._workers.add(worker)
                if self._closed:  # and may not have seen this worker
                    worker.kill()
                while shard is not None and not worker.ended:
                    with suppress(UserError, RunError):
                        worker.send(shard)
                        self._done(worker.receive())
                    shard = None if worker.ended else self._next()
                self._workers.discard(worker)

    def _next(self) -> Shard | None:
        """Wait for a shard to tokenize; None after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._left() is not None)
            if self._closed:
                return None
            found = self._left()
            self._begun.add(id(found))
            return found

    def _left(self) -> Shard | None:
        return next((one for one in self._wanted if id(one) not in self._begun), None)
