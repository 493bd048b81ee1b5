"""Random access to objects: few requests, little over-reading, bounded memory.

Fetched runs of bytes stay in a cache until they have been read to their end, or are evicted. A run is as long
as the caller says it will read on. Where reads turn out to be sequential, runs grow up to `RUN_BYTES` and the
next one is prefetched, never beyond the end that the caller gave. Small pieces that lie together (headers,
norms) are fetched in one run of moderate size.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.storage.bytes import SourceFile
from converters.storage.object_store import in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from converters.storage.object_store import RemotePath

# The longest run, and the shortest of data and of headers.
RUN_BYTES, DATA_BYTES, HEADER_BYTES = 8 << 20, 512 << 10, 64 << 10
# All cached runs of the process together.
CACHE_BYTES = 160 << 20
# Recent ends of runs, for detecting sequential reads.
_MAX_ENDS = 64


@dataclass(eq=False, slots=True)
class _Span:
    """Bytes [start, stop) of an object, fetched or being fetched."""

    file: RemoteFile
    start: int
    stop: int
    data: Future[bytes]


_start = attrgetter("start")


class _Cache:
    """The runs of all files of this process, least recently used first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._runs: dict[_Span, None] = {}
        self._nbytes = 0

    def add(self, run: _Span) -> None:
        self._runs[run] = None
        self._nbytes += run.stop - run.start
        for cached in list(self._runs):
            if self._nbytes <= CACHE_BYTES:
                break
            if cached is not run and cached.data.done():
                self.drop(cached)

    def use(self, run: _Span) -> None:
        if run in self._runs:
            self._runs[run] = self._runs.pop(run)

    def drop(self, run: _Span) -> None:
        if run in self._runs:
            del self._runs[run]
            self._nbytes -= run.stop - run.start
            run.file.runs.remove(run)

    def reset_after_fork(self) -> None:
        """A child has none of the threads: what was being fetched would never arrive in it."""
        self.lock = threading.RLock()
        for run in list(self._runs):
            self.drop(run)


_cache = _Cache()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_cache.reset_after_fork)


class RemoteFile(SourceFile):
    """An object of a checkpoint, read through the cache."""

    path: RemotePath

    def __init__(self, name: str, path: RemotePath, nbytes: int) -> None:
        super().__init__(name, path, nbytes)
        self.runs: list[_Span] = []  # by their starts
        self._ends: OrderedDict[int, int] = OrderedDict()  # end of a run -> its length

    def read_into(self, buffer: memoryview, at: int, wanted: int = 0, end: int = 0) -> None:
        done = 0
        least = DATA_BYTES if end else HEADER_BYTES
        wanted = max(wanted, at + len(buffer))
        end = max(end, wanted)
        if wanted > self.nbytes:
            raise CheckpointError(f"{self.path}: the file ends early, at byte {self.nbytes}")
        while done < len(buffer):
            position = at + done
            with _cache.lock:
                run = self._at(position) or self._request(position, wanted, end, least)
                _cache.use(run)
                goes_on = position > run.start or wanted > run.stop
                if goes_on and run.stop < end and self._at(run.stop) is None:
                    self._request(run.stop, wanted, end, least)
            data = self._data(run)
            offset = position - run.start
            count = min(len(buffer) - done, run.stop - position)
            buffer[done : done + count] = data[offset : offset + count]
            done += count
            if offset + count == run.stop - run.start > least:
                with _cache.lock:
                    _cache.drop(run)

    def _at(self, position: int) -> _Span | None:
        """The run that covers the byte `position`."""
        index = bisect_right(self.runs, position, key=_start) - 1
        run = self.runs[index] if index >= 0 else None
        return run if run is not None and position < run.stop else None

    def _request(self, start: int, wanted: int, end: int, least: int) -> _Span:
        """Start to fetch a run at `start`, which no run covers."""
        # A read that begins where a run ended is sequential: double the length.
        length = 2 * self._ends.get(start, 0)
        length = min(RUN_BYTES, max(length, wanted - start, least))
        stop = min(start + length, max(end, start + least), self.nbytes)
        index = bisect_right(self.runs, start, key=_start)
        if index < len(self.runs):
            stop = min(stop, self.runs[index].start)
        run = _Span(self, start, stop, in_thread(partial(self.path.read_range, start, stop)))
        self.runs.insert(index, run)
        self._ends[stop] = stop - start
        if len(self._ends) > _MAX_ENDS:
            self._ends.popitem(last=False)
        _cache.add(run)
        return run

    def _data(self, run: _Span) -> bytes:
        try:
            data = run.data.result()
        except BaseException as error:
            with _cache.lock:
                _cache.drop(run)
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(f"{self.path}: was deleted while it was read") from None
            raise
        if len(data) != run.stop - run.start:
            raise CheckpointError(f"{self.path}: the file ends early, at byte {run.start + len(data)}")
        return data
