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
        """The tokens of a shard, from the cache if possible."""
        return tokenize(
            source, self.tokenizer, self.vocabulary, self.fields, self.framed, self.cache, chat=self.chat
        )

    def __call__(self, source: Source) -> bool:
        os.nice(0 if os.nice(0) >= 5 else 5)  # the step comes first
        self.open(source)
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
        self._wanted: list[Source] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, sources: Sequence[Source]) -> None:
        """Tokenize these next, in order, and none of those wanted before."""
        with self._changed:
            self._wanted = list(sources)
            if self._thread is None and self._wanted:
                self._thread = threading.Thread(target=self._run, name="tokenize-ahead", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        done: set[int] = set()
        while not self._closed:
            with suppress(UserError, RunError, OSError), Worker(self._work) as worker:
                while True:
                    with self._changed:
                        while not self._closed and not (
                            left := [one for one in self._wanted if id(one) not in done]
                        ):
                            done &= {id(one) for one in self._wanted}
                            self._changed.wait()
                        if self._closed:
                            return
                    done.add(id(left[0]))
                    worker.send(left[0])
                    worker.receive()
                    self._done()
