"""Reading objects at random: few requests, little fetched that nobody asked for, bounded memory.

Fetched runs of bytes are kept until they have been read to their end, or until others need their room. A run
is as long as the reader is known to go on; where it turns out to read in order, runs grow up to `RUN_BYTES`
and the next one is on its way while the last is being read, never beyond what the reader said it may want.
Small pieces that lie together (headers, norms) come in one run of a modest size.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.storage.bytes import SourceFile

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from converters.storage.object_store import RemotePath

# The longest run, and the shortest of data and of headers.
RUN_BYTES, DATA_BYTES, HEADER_BYTES = 8 << 20, 512 << 10, 64 << 10
# What all runs that are kept may take together.
KEPT_BYTES = 160 << 20
_FETCHERS = 16
# Places where some run ended, for finding out whether the reader goes on there.
_MAX_ENDS = 64


class _Run:
    """Bytes [start, stop) of an object, fetched or on their way."""

    __slots__ = ("data", "start", "stop")

    def __init__(self, start: int, stop: int, data: Future[bytes]) -> None:
        self.start = start
        self.stop = stop
        self.data = data


class _Kept:
    """All runs of all files, the least recently used first, within `KEPT_BYTES`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._runs: OrderedDict[tuple[RemoteFile, int], _Run] = OrderedDict()
        self._nbytes = 0

    def add(self, file: RemoteFile, run: _Run) -> None:
        self._runs[file, run.start] = run
        self._nbytes += run.stop - run.start
        for (other, start), kept in list(self._runs.items()):
            if self._nbytes <= KEPT_BYTES:
                break
            if kept is not run and kept.data.done():
                self.drop(other, start)

    def use(self, file: RemoteFile, run: _Run) -> None:
        if (file, run.start) in self._runs:
            self._runs.move_to_end((file, run.start))

    def forget(self) -> None:
        self.lock = threading.RLock()
        for file, start in list(self._runs):
            self.drop(file, start)

    def drop(self, file: RemoteFile, start: int) -> None:
        run = self._runs.pop((file, start), None)
        if run is not None:
            self._nbytes -= run.stop - run.start
            file.starts.remove(start)
            del file.runs[start]


_kept = _Kept()
_pool: ThreadPoolExecutor | None = None


def _fetchers() -> ThreadPoolExecutor:
    """The threads that fetch."""
    global _pool
    if _pool is None:
        from concurrent.futures import ThreadPoolExecutor  # not at the top: slow to import

        _pool = ThreadPoolExecutor(_FETCHERS, "fetch")
    return _pool


def _after_fork() -> None:
    """A child has none of the threads, so that runs on their way would never arrive in it."""
    global _pool
    _pool = None
    _kept.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


class RemoteFile(SourceFile):
    """An object of a checkpoint."""

    path: RemotePath

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.runs: dict[int, _Run] = {}
        self.starts: list[int] = []  # of `runs`, sorted
        self._ends: OrderedDict[int, int] = OrderedDict()  # where a run ended -> its length

    def read_into(self, buffer: memoryview, at: int, wanted: int = 0, end: int = 0) -> None:
        done = 0
        least = DATA_BYTES if end else HEADER_BYTES
        wanted = max(wanted, at + len(buffer))
        end = max(end, wanted)
        if wanted > self.nbytes:
            raise CheckpointError(f"{self.path}: the file ends early, at byte {self.nbytes}")
        while done < len(buffer):
            position = at + done
            with _kept.lock:
                run = self._at(position) or self._request(position, wanted, end, least)
                _kept.use(self, run)
                goes_on = position > run.start or wanted > run.stop
                if goes_on and run.stop < end and self._at(run.stop) is None:
                    self._request(run.stop, wanted, end, least)
            data = self._data(run)
            offset = position - run.start
            count = min(len(buffer) - done, run.stop - position)
            buffer[done : done + count] = data[offset : offset + count]
            done += count
            if offset + count == run.stop - run.start > least:
                with _kept.lock:
                    _kept.drop(self, run.start)

    def _at(self, position: int) -> _Run | None:
        """The run that holds the byte `position`."""
        index = bisect_right(self.starts, position) - 1
        run = self.runs[self.starts[index]] if index >= 0 else None
        return run if run is not None and position < run.stop else None

    def _request(self, start: int, wanted: int, end: int, least: int) -> _Run:
        """Begin to fetch a run from `start` on, where none is."""
        # A reader that goes on where a run ended reads in order: twice as much then.
        length = 2 * self._ends.get(start, 0)
        length = min(RUN_BYTES, max(length, wanted - start, least))
        stop = min(start + length, max(end, start + least), self.nbytes)
        index = bisect_right(self.starts, start)
        if index < len(self.starts):
            stop = min(stop, self.starts[index])
        run = _Run(start, stop, _fetchers().submit(self.path.read_range, start, stop))
        self.starts.insert(index, start)
        self.runs[start] = run
        self._ends[stop] = stop - start
        if len(self._ends) > _MAX_ENDS:
            self._ends.popitem(last=False)
        _kept.add(self, run)
        return run

    def _data(self, run: _Run) -> bytes:
        try:
            data = run.data.result()
        except BaseException as error:
            with _kept.lock:
                _kept.drop(self, run.start)
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(f"{self.path}: has gone while it was read") from None
            raise
        if len(data) != run.stop - run.start:
            raise CheckpointError(f"{self.path}: the file ends early, at byte {run.start + len(data)}")
        return data
