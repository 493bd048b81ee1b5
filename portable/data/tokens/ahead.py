"""Tokenize the next shards of a stream in other processes, while the run trains on the ones before."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.data.sources.prepared import PreparedShard
from portable.data.tokens.cache import CacheDamagedError, TokenCache
from portable.data.tokens.parallel import Worker
from portable.data.tokens.tokenize import TOKENS, digest_of_making, tokenize
from portable.errors import RunError, UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from portable.data.sources.documents import Fields
    from portable.data.sources.shard import Shard
    from portable.data.tokens.chat_template import ChatTemplate
    from portable.data.tokens.tokenize import Frame
    from portable.data.tokens.tokenizer import Vocabulary


@dataclass(frozen=True)
class Tokenizing:
    """How the shards of a stream become tokens; the arguments are those of :func:`tokenize`."""

    tokenizer: Any
    vocabulary: Vocabulary
    fields: Fields
    framed: Frame
    cache: Path
    chat: ChatTemplate | None

    @cached_property
    def made(self) -> str:
        """A digest of what decides the tokens of a text."""
        return digest_of_making(self.tokenizer, self.framed, self.chat)

    def open(self, shard: Shard) -> TokenCache:
        """The tokens of a shard, from the cache if possible. No copy of its file stays."""
        source = shard.open(self.fields)
        if isinstance(source, PreparedShard):
            return self._prepared(source)
        try:
            return tokenize(
                source,
                self.tokenizer,
                self.vocabulary,
                self.fields,
                self.framed,
                self.cache,
                chat=self.chat,
                made=self.made,
            )
        finally:
            source.release()

    def _prepared(self, source: PreparedShard) -> TokenCache:
        if source.made != self.made:
            raise UserError(
                f"data.tokenizer: {source.name} was made with another tokenizer, chat template or "
                "data.train_on; set those with which portable-data was run"
            )
        try:
            return TokenCache.open(source.local(self.cache / TOKENS))
        except CacheDamagedError as error:
            raise UserError(f"data.source: {one_line(error)}; run portable-data again") from error

    def __call__(self, shard: Shard) -> Path:
        """The folder of the tokens of a shard."""
        os.nice(0 if os.nice(0) >= 5 else 5)  # the step comes first
        return self.open(shard).folder


class Ahead:
    """Processes that tokenize shards, each with a thread that tells it which.

    What fails here is tried again, and told, where the shard is needed.

    Args:
        work: what a process does with a shard.
        done: called after each shard with its folder, in a thread.
        processes: how many.
    """

    def __init__(self, work: Tokenizing, done: Callable[[Path], None], processes: int = 1) -> None:
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
