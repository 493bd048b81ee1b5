"""Tokenize the next shards of a stream in another process, while the run trains on the ones before."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.data.tokens.parallel import Worker
from portable.data.tokens.tokenize import tokenize
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from portable.data.sources.documents import Fields, Source
    from portable.data.sources.shards import Shard
    from portable.data.tokens.cache import TokenCache
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

    def open(self, source: Source) -> TokenCache:
        """The tokens of a shard, from the cache if possible. No copy of its file stays."""
        try:
            return tokenize(
                source, self.tokenizer, self.vocabulary, self.fields, self.framed, self.cache, chat=self.chat
            )
        finally:
            source.release()

    def __call__(self, shard: Shard) -> bool:
        os.nice(0 if os.nice(0) >= 5 else 5)  # the step comes first
        self.open(shard.source)
        return True


class Ahead:
    """A process that tokenizes shards, and a thread that tells it which.

    What fails here is tried again, and told, where the shard is needed.

    Args:
        work: what the process does with a shard.
        done: called after each shard, in the thread.
    """

    def __init__(self, work: Tokenizing, done: Callable[[], None]) -> None:
        self._work = work
        self._done = done
        self._wanted: list[Shard] = []
        self._tried: list[Shard] = []
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def want(self, shards: Sequence[Shard]) -> None:
        """Tokenize these next, in order, and none of those wanted before."""
        with self._changed:
            self._wanted = list(shards)
            self._tried = [one for one in self._tried if any(one is wanted for wanted in shards)]
            if self._thread is None and self._wanted:
                self._thread = threading.Thread(target=self._run, name="tokenize-ahead", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def _run(self) -> None:
        shard = self._next()
        while shard is not None:
            # A process that died is replaced when there is more to do.
            with suppress(UserError, RunError, OSError), Worker(self._work) as worker:
                while shard is not None:
                    worker.send(shard)
                    worker.receive()
                    self._done()
                    shard = self._next()
            shard = shard and self._next()

    def _next(self) -> Shard | None:
        """Wait for a shard to tokenize; None after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed.is_set() or self._left())
            if self._closed.is_set():
                return None
            self._tried.append(self._left()[0])
            return self._tried[-1]

    def _left(self) -> list[Shard]:
        return [one for one in self._wanted if all(one is not tried for tried in self._tried)]
