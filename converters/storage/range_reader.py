"""Random access to objects: few requests, little over-reading, bounded memory.

Fetched runs of bytes stay in a cache until they have been read to their end, or are evicted. A run is as long
as the caller says it will read on. Where reads turn out to be sequential, runs are `RUN_BYTES` long and the
next one is prefetched, never beyond the end that the caller gave. Small pieces that lie together (headers,
norms) are fetched in one run of moderate size.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError
from portable.converters.storage.byte_sources import SourceFile
from portable.converters.storage.object_store import check_process, in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from portable.converters.storage.object_store import RemotePath

# The longest run, and the shortest of data and of headers.
RUN_BYTES, DATA_BYTES, HEADER_BYTES = 4 << 20, 512 << 10, 64 << 10
# All cached runs of the process together.
CACHE_BYTES = 160 << 20


@dataclass(eq=False, slots=True)
class _Run:
    """Bytes [start, stop) of an object, fetched or being fetched."""

    file: RemoteFile
    start: int
    stop: int
    data: Future[bytes]


_lock = threading.Lock()  # of all runs
_cached: dict[_Run, None] = {}
"""The runs of all files of this process, least recently used first."""


def _use(run: _Run) -> None:
    """Make a run the one that was used last, and make room for it."""
    _cached.pop(run, None)
    _cached[run] = None
    nbytes = sum(cached.stop - cached.start for cached in _cached)
    for cached in list(_cached):
        if nbytes > CACHE_BYTES and cached is not run and cached.data.done():
            nbytes -= cached.stop - cached.start
            _drop(cached)


def _drop(run: _Run) -> None:
    if run in _cached:
        del _cached[run]
        run.file.runs.remove(run)


class RemoteFile(SourceFile):
    """An object of a checkpoint, read through the cache."""

    path: RemotePath

    def __init__(self, name: str, path: RemotePath, nbytes: int) -> None:
        super().__init__(name, path, nbytes)
        self.runs: list[_Run] = []
        self._ends: set[int] = set()  # of runs at which no other has begun yet

    def read_into(self, buffer: memoryview, at: int, wanted: int = 0, end: int = 0) -> None:
        check_process(self.path)
        done = 0
        least = DATA_BYTES if end else HEADER_BYTES
        wanted = max(wanted, at + len(buffer))
        end = max(end, wanted)
        if wanted > self.nbytes:
            raise CheckpointError(f"{self.path}: the file ends early, at byte {self.nbytes}")
        while done < len(buffer):
            position = at + done
            with _lock:
                run = self._run(position, wanted, end, least)
                _use(run)
                if run.stop < end and (position > run.start or wanted > run.stop):
                    self._run(run.stop, wanted, end, least)
            data = self._data(run)
            offset = position - run.start
            count = min(len(buffer) - done, run.stop - position)
            buffer[done : done + count] = data[offset : offset + count]
            done += count
            if offset + count == run.stop - run.start > least:
                with _lock:
                    _drop(run)

    def _run(self, start: int, wanted: int, end: int, least: int) -> _Run:
        """The run that covers the byte `start`; a new one begins there."""
        known = next((run for run in self.runs if run.start <= start < run.stop), None)
        if known is not None:
            return known
        length = RUN_BYTES if start in self._ends else min(RUN_BYTES, max(wanted - start, least))
        limits = [
            max(end, start + least),
            self.nbytes,
            *(run.start for run in self.runs if run.start > start),
        ]
        stop = min(start + length, *limits)
        run = _Run(self, start, stop, in_thread(partial(self.path.read_range, start, stop)))
        self.runs.append(run)
        self._ends.discard(start)
        self._ends.add(stop)
        _use(run)
        return run

    def _data(self, run: _Run) -> bytes:
        try:
            data = run.data.result()
        except BaseException as error:
            with _lock:
                _drop(run)
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(f"{self.path}: was deleted while it was read") from None
            raise
        if len(data) != run.stop - run.start:
            raise CheckpointError(f"{self.path}: the file ends early, at byte {run.start + len(data)}")
        return data
