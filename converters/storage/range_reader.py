"""Read objects in a store with random access, few requests, and bounded memory.

Fetched bytes are cached. The cache consists of contiguous byte ranges ("runs"). A run stays in
the cache until it is evicted. A run that is longer than the minimum size is also removed when
it has been read to the end.

With each read, the caller announces two positions: the end of the bytes that it will certainly
read, and the end of the bytes that it may read. A new run normally extends to the first
position, but has at most `RUN_BYTES`. If a run starts at the end of an earlier run, reading is
considered sequential, and the new run has `RUN_BYTES`. The next run is prefetched if the first
position is beyond the current run, or if a read starts after the first byte of the current run.
No run extends beyond the second position, except to reach the minimum size.

Each run has a minimum size, so that small pieces that are stored together, such as headers and
norms, are fetched in one run.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError, DamagedCheckpointError
from portable.converters.storage.byte_sources import CheckpointFile
from portable.converters.storage.object_store import check_not_forked, run_in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from portable.converters.storage.object_store import RemotePath

# Sizes of runs in bytes: the maximum, the minimum for tensor data, and the minimum for headers.
RUN_BYTES, DATA_BYTES, HEADER_BYTES = 4 << 20, 512 << 10, 64 << 10
# Maximum size of all cached runs of the process together.
CACHE_BYTES = 160 << 20


@dataclass(eq=False, slots=True)
class _CachedRun:
    """Bytes [start, stop) of an object, which have been fetched or are being fetched."""

    file: RemoteFile
    start: int
    stop: int
    data: Future[bytes]


_lock = threading.Lock()  # Protects the runs of all files
_cached_runs: dict[_CachedRun, None] = {}
"""Runs of all files of this process. The least recently used run is first."""


def _mark_used_and_evict(run: _CachedRun) -> None:
    """Mark a cached byte range ("run") as most recently used, and evict old runs from a full cache.

    The least recently used runs are evicted first. Runs that are still being fetched are kept. The
    caller must hold `_lock`.
    """
    _cached_runs.pop(run, None)
    _cached_runs[run] = None
    nbytes = sum(cached.stop - cached.start for cached in _cached_runs)
    for cached in list(_cached_runs):
        if nbytes > CACHE_BYTES and cached is not run and cached.data.done():
            nbytes -= cached.stop - cached.start
            _remove_from_cache(cached)


def _remove_from_cache(run: _CachedRun) -> None:
    if run in _cached_runs:
        del _cached_runs[run]
        run.file.runs.remove(run)


class RemoteFile(CheckpointFile):
    """Checkpoint file in an object store, read through the cache of this module."""

    path: RemotePath

    def __init__(self, name: str, path: RemotePath, nbytes: int) -> None:
        super().__init__(name, path, nbytes)
        self.runs: list[_CachedRun] = []
        # Offsets at which runs end. A read that begins at one of them continues a run, so it is sequential.
        self._ends: set[int] = set()

    def read_into(self, buffer: memoryview, at: int, certain_end: int = 0, possible_end: int = 0) -> None:
        """Read bytes into a buffer. See `CheckpointFile.read_into`.

        If `possible_end` is 0, the bytes count as a header, so a new run may be shorter than for tensor
        data. It is an error if `certain_end` is beyond the end of the file.
        """
        check_not_forked(self.path)
        done = 0
        min_bytes = DATA_BYTES if possible_end else HEADER_BYTES
        certain_end = max(certain_end, at + len(buffer))
        possible_end = max(possible_end, certain_end)
        if certain_end > self.nbytes:
            raise DamagedCheckpointError(f"{self.path}: the file ends early, at byte {self.nbytes}")
        while done < len(buffer):
            position = at + done
            with _lock:
                run = self._get_or_fetch_run(position, certain_end, possible_end, min_bytes)
                _mark_used_and_evict(run)
                if run.stop < possible_end and (position > run.start or certain_end > run.stop):
                    self._get_or_fetch_run(run.stop, certain_end, possible_end, min_bytes)
            data = self._wait_for_data(run)
            offset = position - run.start
            count = min(len(buffer) - done, run.stop - position)
            buffer[done : done + count] = data[offset : offset + count]
            done += count
            if offset + count == run.stop - run.start > min_bytes:
                with _lock:
                    _remove_from_cache(run)

    def _get_or_fetch_run(
        self, start: int, certain_end: int, possible_end: int, min_bytes: int
    ) -> _CachedRun:
        """Return the cached byte range ("run") that contains `start`, or begin to fetch a new one.

        A new run ends at the end of the file or at the start of the next cached run, if not earlier. The
        caller must hold `_lock`.

        Args:
            start: Offset of a byte in the object.
            certain_end: See `CheckpointFile.read_into`.
            possible_end: See `CheckpointFile.read_into`.
            min_bytes: Minimum size of a new run.
        """
        cached_run = next((run for run in self.runs if run.start <= start < run.stop), None)
        if cached_run is not None:
            return cached_run
        length = RUN_BYTES if start in self._ends else min(RUN_BYTES, max(certain_end - start, min_bytes))
        limits = [
            max(possible_end, start + min_bytes),
            self.nbytes,
            *(run.start for run in self.runs if run.start > start),
        ]
        stop = min(start + length, *limits)
        run = _CachedRun(self, start, stop, run_in_thread(partial(self.path.read_range, start, stop)))
        self.runs.append(run)
        self._ends.discard(start)
        self._ends.add(stop)
        _mark_used_and_evict(run)
        return run

    def _wait_for_data(self, run: _CachedRun) -> bytes:
        """Wait until a byte range ("run") of the object has been fetched, and return its bytes.

        Raises:
            CheckpointError: If the object was deleted or became shorter, or if the request failed. The
                next read of the byte range then requests it again, unless the object became shorter.
        """
        try:
            data = run.data.result()
        except BaseException as error:
            with _lock:
                _remove_from_cache(run)
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(
                    f"{self.path}: was deleted during the read; choose another checkpoint"
                ) from None
            raise
        if len(data) != run.stop - run.start:
            raise DamagedCheckpointError(f"{self.path}: the file ends early, at byte {run.start + len(data)}")
        return data
