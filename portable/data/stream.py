"""Samples of a stream, whose files are tokenized during training with limited disk space.

The shards are files, or parts of long files. Each epoch visits the shards in a shuffled order.
Consecutive shards form windows of ``data.shuffle_window`` shards, and the samples within each
window are shuffled. The sample at a given position therefore depends only on the seed and on the
sample counts of the shards up to the end of its window.

The manifest stores these counts. A shard is added to it when it is first read. Each checkpoint
contains the manifest, so a resumed run does not have to read the shards that it has already
consumed.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portable.data.samples.base import Arrays, Samples
from portable.data.samples.order import EpochIndex, derive_seed, get_epoch_permutation
from portable.data.sources.documents import NoTextError, compute_text_digest
from portable.data.tokens.background_tokenizer import BackgroundTokenizer
from portable.data.tokens.tokenize import TOKENS_FOLDER
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from portable.data.sources.source import SourceShard
    from portable.data.sources.source_kinds import StreamSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.tokenize import TokenizeJob

_INDEX_BITS = 32
"""Number of bits of a sample's index within its shard."""
_WINDOWS_AHEAD = 2
_SPARE_DIVISOR = 20  # one part in this many of the limit is kept free
_FINGERPRINT_CHARS = 16  # characters of each fingerprint in the manifest


class ShardEntry(NamedTuple):
    """Entry of a shard in the manifest of a stream.

    Attributes:
        num_samples: Number of samples in the shard.
        fingerprint: Prefix of the fingerprint of its tokens. Empty for a shard without text.
    """

    num_samples: int
    fingerprint: str


class StreamSamples(Samples):
    """Samples of a stream. Sample *s* of shard *k* has the index ``k << 32 | s``.

    Args:
        name: Name of the source, used in error messages.
        source: Source that provides the shards of the stream.
        job: Job that tokenizes a shard.
        build_samples: Function that builds the samples of a shard from its tokens. Returns None if the
            shard is too short for one sample.
        count_samples: Function that returns the number of samples in a shard without reading it.
            Returns None if the shard must be read.
        seed: Seed of the sample order.
        window_shards: Number of shards per window.
        limit_bytes: Maximum size of the tokens on disk in bytes. Tokens in use may exceed it. None for
            no limit.
        num_processes: Number of processes that tokenize the next shards. 0 if another process on this
            machine tokenizes them and enforces the limit.
    """

    def __init__(
        self,
        name: str,
        source: StreamSource,
        job: TokenizeJob,
        build_samples: Callable[[TokenCache], Samples | None],
        count_samples: Callable[[SourceShard], int | None],
        *,
        seed: int,
        window_shards: int = 1,
        limit_bytes: int | None = None,
        num_processes: int = 1,
    ) -> None:
        self._name = name
        self._shards = source.shards
        self._job = job
        self._samples = build_samples
        self._seed = seed
        self._window = window_shards
        self._processes = num_processes
        self._disk = _TokenCacheLimiter(
            job.cache / TOKENS_FOLDER, limit_bytes if num_processes else None, window_shards
        )
        self.num_samples = len(self._shards) << _INDEX_BITS
        self._manifest: dict[int, ShardEntry] = {}
        """Entry of each shard whose number of samples is known, keyed by the shard's number."""
        for number, shard in enumerate(source.shards):
            if (num_samples := count_samples(shard)) is not None:
                self._manifest[number] = ShardEntry(num_samples, shard.fingerprint[:_FINGERPRINT_CHARS])
        self._open: OrderedDict[int, Samples | None] = OrderedDict()
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._ends: list[int] = []
        """Cumulative number of samples of the epoch's shards, up to the last shard whose number is known."""
        self._total: int | None = None
        self._read_ahead_window = -1
        self._ahead: BackgroundTokenizer | None = None
        self._lock = threading.RLock()
        self.fingerprint = ""
        """Digest of the list of files and of the settings for reading them. The caller sets it."""
        first = self._load_shard_samples(self._get_shard_at(0, 0))
        if first is not None:
            self.valid_labels_per_sample, self.mean_context_length, self.sequences_per_sample = (
                first.valid_labels_per_sample,
                first.mean_context_length,
                first.sequences_per_sample,
            )
            self.padding_share = first.padding_share

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without open shards, threads and locks, which a worker creates itself.

        A worker process neither tokenizes shards in advance nor limits the cache.
        """
        return {
            **self.__dict__,
            "_open": OrderedDict(),
            "_disk": _TokenCacheLimiter(self._job.cache / TOKENS_FOLDER, None, self._window),
            "_ahead": None,
            "_processes": 0,
            "_lock": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def load_first_tokens(self) -> TokenCache:
        """Load the tokens of the first shard in stream order that contains a sample.

        Also tokenizes the shards before it, to find out that they contain no samples.

        Raises:
            UserError: If no shard contains a sample.
        """
        # Do not tokenize ahead, because a resumed run begins elsewhere.
        processes, self._processes = self._processes, 0
        shard = self.locate_sample(0, self._seed)[1] >> _INDEX_BITS
        self._processes = processes
        return _load_shard_tokens(self._job, self._shards[shard], self._disk)

    # -- the order --------------------------------------------------------------------------------------

    def _get_shard_at(self, epoch: int, position: int) -> int:
        """Return the number of the shard at a position in the shuffled order of an epoch."""
        return get_epoch_permutation(len(self._shards), self._seed, epoch)(position)

    def _begin_epoch(self, epoch: int) -> None:
        """Compute the order of the shards in an epoch. Does nothing if ``epoch`` is the current epoch."""
        if epoch != self._epoch:
            order = get_epoch_permutation(len(self._shards), self._seed, epoch)
            self._order = order.permute_array(np.arange(len(self._shards)))
            self._epoch, self._ends, self._read_ahead_window = epoch, [], -1

    def _extend_ends(self, number: int) -> None:
        """Extend the cumulative sample counts of the epoch's shards, up to the shard at position ``number``.

        Reads the shards that are not in the manifest.
        """
        while len(self._ends) <= min(number, len(self._order) - 1):
            shard = int(self._order[len(self._ends)])
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + self._get_num_samples(shard))

    def _get_num_samples(self, shard: int) -> int:
        """Return the number of samples in a shard. Reads the shard if it is not in the manifest."""
        entry = self._manifest.get(shard)
        if entry is None:
            self._load_shard_samples(shard)
            entry = self._manifest[shard]
        return entry.num_samples

    def _count_epoch_samples(self) -> int | None:
        """Return the number of samples in an epoch. None until all shards are in the manifest.

        Raises:
            UserError: If there are no samples in an epoch.
        """
        if self._total is None and len(self._manifest) == len(self._shards):
            self._total = sum(length for length, _ in self._manifest.values())
            if not self._total:
                raise UserError(f"{self._name}: no file has enough text for one sample; lower data.seq_len")
        return self._total

    def locate_sample(self, position: int, seed: int) -> EpochIndex:
        """Return the epoch and index of the sample at a position of the stream.

        See :meth:`Samples.locate_sample`. ``seed`` is ignored, because the seed of the stream determines
        the order. May tokenize shards to count their samples.
        """
        with self._lock:
            return self._locate_position(position)

    def _locate_position(self, position: int) -> EpochIndex:
        """Locate the sample at a position of the stream. The caller must hold the lock.

        Opens or tokenizes the shards up to the end of the sample's window, unless they are in the manifest.
        Requests the shards of later windows from background processes.
        """
        total = self._count_epoch_samples()
        epoch, offset = (0, position) if total is None else divmod(position, total)
        self._begin_epoch(epoch)
        last = len(self._order) - 1
        while (not self._ends or self._ends[-1] <= offset) and len(self._ends) <= last:
            self._extend_ends(len(self._ends))
        # Locate the position again: it is in a later epoch, and the size of an epoch is known now.
        if self._ends[-1] <= offset:
            return self._locate_position(position)
        window = bisect_right(self._ends, offset) // self._window
        first, end = window * self._window, min((window + 1) * self._window, len(self._order))
        self._extend_ends(end - 1)
        before = self._ends[first - 1] if first else 0
        shuffle = get_epoch_permutation(self._ends[end - 1] - before, self._derive_window_seed(window), epoch)
        shuffled_offset = before + shuffle(offset - before)
        number = bisect_right(self._ends, shuffled_offset, first, end)
        within = shuffled_offset - (self._ends[number - 1] if number else 0)
        self._request_shards_ahead(epoch, window)
        return EpochIndex(epoch, int(self._order[number]) << _INDEX_BITS | within)

    def _derive_window_seed(self, window: int) -> int:
        """Derive the seed for the order of the samples in a window."""
        return derive_seed(f"window {window}", self._seed)

    def find_early_sample(self) -> EpochIndex:
        """Return the first sample of the first epoch. Its shard is tokenized first."""
        return self.locate_sample(0, self._seed)

    def count_epochs(self, num_samples: int) -> float | None:
        """Convert a number of samples to epochs.

        Returns:
            Number of epochs, possibly fractional. None until all shards are in the manifest.
        """
        return None if self._total is None else num_samples / self._total

    # -- the shards -------------------------------------------------------------------------------------

    def _request_shards_ahead(self, epoch: int, window: int) -> None:
        """Request that background processes tokenize the shards after a window, within the cache limit.

        Does nothing if this process does not tokenize in advance, or if the last call had the same window.
        """
        if not self._processes or window == self._read_ahead_window:
            return
        self._read_ahead_window = window
        if self._ahead is None:
            # Do not pass a method of this object, otherwise the tokenizer's threads would keep it alive.
            self._ahead = BackgroundTokenizer(self._job, self._disk.add_prefetched_folder, self._processes)
            weakref.finalize(self, self._ahead.close)
        first = (window + 1) * self._window
        numbers = range(
            first, first + min(_WINDOWS_AHEAD * self._window, self._disk.compute_num_shards_ahead())
        )
        count = len(self._order)
        coming = [self._get_shard_at(epoch + number // count, number % count) for number in numbers]
        self._ahead.request_shards([self._shards[shard] for shard in coming])

    def _load_shard_samples(self, shard: int) -> Samples | None:
        """Load the samples of a shard, and add the shard to the manifest.

        Tokenizes the shard if its tokens are not in the cache. The most recently used shards stay open.

        Returns:
            The samples. None if the shard has no text or is too short for one sample.

        Raises:
            RunError: If the tokens differ from the manifest because the file has changed.
        """
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
            try:
                tokens = _load_shard_tokens(self._job, self._shards[shard], self._disk)
            except NoTextError:
                self._manifest[shard] = ShardEntry(0, "")
                return None
            samples = self._samples(tokens)
            length = 0 if samples is None else len(samples)
            fingerprint = tokens.fingerprint[:_FINGERPRINT_CHARS]
            entry = self._manifest.setdefault(shard, ShardEntry(length, fingerprint))
            if entry != (length, fingerprint):
                raise _build_changed_error(self._name, self._get_shard_name(shard), "the run read the file")
            self._open[shard] = samples
            self._disk.used_folders[shard] = tokens.folder
            while len(self._open) > 2 * self._window:
                closed, _ = self._open.popitem(last=False)
                del self._disk.used_folders[closed]
            self._disk.enforce_limit(tokens.folder)
            return samples

    # -- samples ----------------------------------------------------------------------------------------

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build all columns of the samples. Loads (and tokenizes if necessary) shards that are not open."""
        rows: dict[int, list[int]] = {}
        for row, (_, index) in enumerate(indices):
            rows.setdefault(index >> _INDEX_BITS, []).append(row)
        out: Arrays = {}
        for shard, taken in rows.items():
            samples = self._load_shard_samples(shard)
            assert samples is not None
            arrays = samples.build_arrays_with_columns(
                [
                    EpochIndex(indices[row].epoch, indices[row].sample_index & ((1 << _INDEX_BITS) - 1))
                    for row in taken
                ]
            )
            for column, values in arrays.items():
                if column not in out:
                    out[column] = np.zeros((len(indices), *values.shape[1:]), dtype=values.dtype)
                out[column][taken] = values
        return out

    def list_document_numbers(self, index: int) -> Sequence[int]:
        """Return the numbers of the documents in a sample, counted from 0 within the shard."""
        samples = self._load_shard_samples(index >> _INDEX_BITS)
        assert samples is not None
        return samples.list_document_numbers(index & ((1 << _INDEX_BITS) - 1))

    def get_source_name(self, index: int) -> str:
        """Return the name of the file that contains a sample."""
        return self._get_shard_name(index >> _INDEX_BITS)

    def _get_shard_name(self, shard: int) -> str:
        """Return the name of a shard's file. Used in error messages."""
        return self._shards[shard].open_source(self._job.settings).name

    # -- the manifest -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the manifest for a checkpoint.

        Returns:
            A list of ``[shard, samples, fingerprint]`` for all known shards, keyed by source name.
        """
        manifest = dict(self._manifest)
        return {self._name: [[shard, *manifest[shard]] for shard in sorted(manifest)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add the manifest in a checkpoint to the manifest of this stream.

        Args:
            state: Manifests, keyed by source name. Manifests of other sources are ignored.

        Raises:
            ValueError: If the manifest is invalid.
            RunError: If a shard has changed since the checkpoint.
        """
        for shard, length, fingerprint in state.get(self._name, ()):
            if not 0 <= shard < len(self._shards) or length < 0:
                raise ValueError(
                    f"{self._name}: shard index {shard} or its length {length} is out of range for "
                    f"{len(self._shards)} shards"
                )
            entry = self._manifest.setdefault(shard, ShardEntry(length, fingerprint))
            if entry != (length, fingerprint):
                raise _build_changed_error(
                    self._name, self._get_shard_name(shard), ("the checkpoint was saved")
                )

    def close(self) -> None:
        """Stop the processes that tokenize shards. They restart if further samples are located."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._read_ahead_window = None, -1

    def compute_consumed_digest(self, position: int) -> str:
        """Compute a digest of the manifest entries of all shards up to ``position``.

        The digest is equal on all ranks, even if some ranks have read more shards than others.
        """
        with self._lock:
            total = self._count_epoch_samples()
            manifest = dict(self._manifest)
        if total is None or position < total:
            order = get_epoch_permutation(len(self._shards), self._seed, 0).permute_array(
                np.arange(len(self._shards))
            )
            manifest = _select_consumed_shards(position, manifest, order.tolist())
        return compute_text_digest(repr(sorted((shard, tuple(entry)) for shard, entry in manifest.items())))


def _build_changed_error(source: str, file: str, since: str) -> RunError:
    """Build the error for a file of a stream that has changed.

    Args:
        source: Name of the source.
        file: Name of the file.
        since: Description of the previous state, to follow the word "since".
    """
    return RunError(f"{source}: {file} has changed since {since}; restore the file, or start another run")


def _select_consumed_shards(
    position: int, manifest: dict[int, ShardEntry], order: Sequence[int]
) -> dict[int, ShardEntry]:
    """Select the manifest entries of the shards that contain the samples before ``position``.

    Args:
        position: Number of samples in the first epoch.
        manifest: Entries of the shards, keyed by shard number.
        order: Shard numbers in the order of the first epoch.
    """
    consumed, before = {}, 0
    for shard in order:
        if before >= position:
            break
        consumed[shard] = manifest[shard]
        before += manifest[shard].num_samples
    return consumed


class _TokenCacheLimiter:
    """Size limit for the tokens on disk. It evicts the least recently used tokens.

    Args:
        cache: Folder with one token cache per shard.
        limit: Maximum size of all tokens in bytes. Tokens in use may exceed it. None for no limit.
        window: Number of shards per window.
    """

    def __init__(self, cache: Path, limit: int | None, window: int) -> None:
        self._cache, self._limit, self._window = cache, limit, window
        self.used_folders: dict[int, Path] = {}
        """Folder of each open shard, keyed by the shard's number. These folders are not removed."""
        self._prefetched_folders: deque[Path] = deque(maxlen=_WINDOWS_AHEAD * window)
        """Folders of the last shards that were tokenized in the background. They are not removed."""
        self._free_bytes = 0
        """Number of bytes that can be added until the size of the folder has to be computed again."""

    def compute_num_shards_ahead(self) -> int:
        """Compute how many shards can be tokenized in advance, at least one.

        This is the number of average-sized shards that fit into the limit, minus two windows for open
        shards. Without a limit or open shards, it is :data:`_WINDOWS_AHEAD` windows.
        """
        sizes = [_compute_folder_bytes(folder) for folder in self.used_folders.values()]
        if self._limit is None or not sum(sizes):
            return _WINDOWS_AHEAD * self._window
        return max(1, self._limit * len(sizes) // sum(sizes) - 2 * self._window)

    def add_prefetched_folder(self, folder: Path) -> None:
        """Protect the tokens of a shard that was tokenized in the background, and enforce the limit.

        Called by the threads of :class:`BackgroundTokenizer`.
        """
        self._prefetched_folders.append(folder)
        self.enforce_limit(folder)

    def enforce_limit(self, folder: Path) -> None:
        """Evict old tokens if the cache exceeds the limit after tokens were added in ``folder``.

        Recomputes the size of all folders only if the added tokens may exceed the limit.
        """
        if self._limit is not None:
            self._free_bytes -= _compute_folder_bytes(folder)
            if self._free_bytes <= 0:
                self.remove_oldest_tokens(self._limit)

    def remove_oldest_tokens(self, limit: int) -> None:
        """Evict the least recently used tokens until all tokens fit into the limit.

        Evicts slightly more than necessary, so that the size of the cache, which may have many folders, is
        not recomputed soon. Open shards, shards tokenized in advance, and the newest folders are kept.

        Args:
            limit: Maximum size of all tokens in bytes. 0 evicts all tokens that are not in use.
        """
        used = {*dict(self.used_folders).values(), *tuple(self._prefetched_folders)}
        folders = []
        with suppress(OSError):
            for folder in self._cache.iterdir():
                with suppress(OSError):
                    if folder.is_dir() and folder.suffix != ".draft":
                        folders.append((folder.stat().st_mtime_ns, _compute_folder_bytes(folder), folder))
        total = sum(size for _, size, _ in folders)
        most = limit if total <= limit else limit - limit // _SPARE_DIVISOR
        # Keep the newest folders: another process may be reading them.
        for _, size, folder in sorted(folders)[: -self._window - 1]:
            if total <= most:
                break
            if folder not in used:
                trash = folder.with_name(f"{folder.name}.gone-{os.getpid()}")
                with suppress(OSError):
                    folder.rename(trash)
                    shutil.rmtree(trash, ignore_errors=True)
                    total -= size
        self._free_bytes = (limit - total) // 2  # half, because another run may write the same amount


def _load_shard_tokens(job: TokenizeJob, shard: SourceShard, limiter: _TokenCacheLimiter) -> TokenCache:
    """Load the tokens of a shard. Tokenizes it if its tokens are not in the cache.

    If the disk is full, removes all tokens that are not in use, and tries again. Marks the folder of
    the tokens as recently used.
    """
    try:
        tokens = job.tokenize_shard(shard)
    except UserError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        limiter.remove_oldest_tokens(0)  # the disk is full, so all tokens that are not in use are removed
        tokens = job.tokenize_shard(shard)
    if tokens.folder.parent == job.cache / TOKENS_FOLDER:  # pretokenized data of the user is not changed
        with suppress(OSError):
            os.utime(tokens.folder)  # mark as recently used
    return tokens


def _compute_folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes. 0 if the folder does not exist."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0
