"""Tokenize the next shards of a stream in other processes, while the run trains on the ones before."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from portable.data.tokens.parallel import Worker
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from portable.data.sources.source import Shard
    from portable.data.tokens.tokenize import TokenizeJob


class BackgroundTokenizer:
    """Processes that tokenize shards, each with a thread that tells it which.

    What fails here is tried again, and told, where the shard is needed.

    Args:
        work: what a process does with a shard.
        done: called after each shard with its folder, in a thread.
        processes: how many.
    """

    def __init__(self, work: TokenizeJob, done: Callable[[Path], None], processes: int = 1) -> None:
        self._work = work
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
        """End the processes, also in the middle of a shard."""
        with self._changed:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()

    def _run(self) -> None:
        while (shard := self._next()) is not None:
            # A process that died is replaced when there is more to do.
            with suppress(OSError), Worker(self._work) as worker, self._known(worker):
                while shard is not None and not worker.ended:
                    with suppress(UserError, RunError):
                        worker.send(shard)
                        self._done(worker.receive())
                    shard = None if worker.ended else self._next()

    @contextmanager
    def _known(self, worker: Worker) -> Iterator[None]:
        """Within this context, :meth:`close` ends ``worker``."""
        with self._changed:
            self._workers.add(worker)
            if self._closed:
                worker.kill()
        try:
            yield
        finally:
            with self._changed:
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
