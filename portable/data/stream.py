"""Samples of a stream, whose files are tokenized during training with limited disk space.

The shards are files, or parts of long files. Each epoch visits the shards in a shuffled order.
Consecutive shards form windows of ``data.shuffle_window`` shards, and the samples within each
window are shuffled. Two things therefore determine which sample is at a given position: the seed,
and the sample counts of the shards up to the end of the window.

The sample counts are stored in a manifest. A shard is added to the manifest when it is first read.
Each checkpoint contains the manifest, so a resumed run does not have to read the shards that it has
already consumed.
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

from portable.data.samples.base import Arrays, PartArrays, Samples, merge_parts
from portable.data.samples.order import EpochIndex, derive_seed, get_epoch_permutation
from portable.data.samples.truncation import NoSampleLeftError
from portable.data.sources.documents import NoTextError, compute_text_digest
from portable.data.tokens.background_tokenizer import BackgroundTokenizer
from portable.data.tokens.tokenize import TOKENS_FOLDER
from portable.errors import RunError, UserError
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from portable.data.sources.source import SourceShard
    from portable.data.sources.source_kinds import StreamSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.tokenize import TokenizeJob

_INDEX_BITS = 32
"""Number of low bits of a sample's index that contain its position within the shard."""
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_WINDOWS_AHEAD = 2
_SPARE_DIVISOR = 20  # 1 / 20 of the limit is kept free
_FINGERPRINT_CHARS = 16  # number of characters of each fingerprint that the manifest stores


class ShardEntry(NamedTuple):
    """Entry of a shard in the manifest of a stream.

    Attributes:
        num_samples: Number of samples in the shard.
        fingerprint: First 16 characters of the fingerprint of the shard's tokens. Empty if the
            shard contains no text.
    """

    num_samples: int
    fingerprint: str


class StreamSamples(Samples):
    """Samples of a stream, whose shards are tokenized when they are needed.

    Each epoch shuffles the shards, and then the samples within each window of ``window_shards``
    consecutive shards. Sample *s* of shard *k* has the index ``k << 32 | s``. A manifest contains
    the number of samples and the fingerprint of each known shard. The constructor loads the first
    shard of the first epoch, and tokenizes it if necessary.

    Args:
        name: Name of the source, used in error messages and as the key of the manifest in a
            checkpoint.
        source: Source that provides the shards of the stream.
        job: Job that tokenizes a shard.
        build_samples: Function that builds the samples of a shard from its tokens. Returns None if
            the shard is too short for one sample, and raises :class:`NoSampleLeftError` if all
            samples are excluded.
        count_samples: Function that returns the number of samples in a shard without reading it.
            Returns None if the shard must be read to count them.
        seed: Seed of the sample order.
        window_shards: Number of consecutive shards whose samples are shuffled together.
        limit_bytes: Maximum size of the tokens on disk in bytes. Tokens in use may exceed it. None
            for no limit.
        num_processes: Number of background processes that tokenize the next shards. 0 if another
            process on this machine is responsible for this and for enforcing the limit.
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
        """Cumulative sample counts of the current epoch's shards in shuffled order. Later counts are
        not known yet."""
        self._total: int | None = None
        self._read_ahead_window = -1
        self._ahead: BackgroundTokenizer | None = None
        self._lock = threading.RLock()
        self.fingerprint = ""
        """Digest of the list of files and of the settings for reading, tokenizing and grouping them.
        The caller sets it."""
        self._exclusion_error: NoSampleLeftError | None = None
        """Error of the first shard whose samples are all excluded. None if there is no such shard."""
        shards = (self._get_shard_at(0, position) for position in range(len(self._shards)))
        first = next(
            (samples for samples in map(self._load_shard_samples, shards) if samples is not None), None
        )
        if first is not None:
            self.valid_labels_per_sample, self.mean_context_length, self.sequences_per_sample = (
                first.valid_labels_per_sample,
                first.mean_context_length,
                first.sequences_per_sample,
            )
            self.padding_share = first.padding_share

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process, without open shards, threads and locks.

        The copy in a worker process neither tokenizes shards in advance nor limits the size of the cache.
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
        """Load the tokens of the shard that contains the first sample of the stream.

        Other shards of the same window, and the shards before it, are tokenized too if their number
        of samples is not known yet.

        Raises:
            UserError: If no shard contains a sample.
        """
        # Do not tokenize further shards in advance, because a resumed run begins at a later shard.
        processes, self._processes = self._processes, 0
        shard = self.locate_sample(0, self._seed)[1] >> _INDEX_BITS
        self._processes = processes
        return _load_shard_tokens(self._job, self._shards[shard], self._disk)

    # -- order of the samples ----------------------------------------------------------------------------

    def _get_shard_at(self, epoch: int, position: int) -> int:
        """Return the number of the shard at a position in the shuffled order of an epoch."""
        return get_epoch_permutation(len(self._shards), self._seed, epoch)(position)

    def _begin_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the current epoch. Does nothing if it is already the current epoch.

        Computes the order of the shards in this epoch, and clears the cumulative sample counts of
        the previous epoch.
        """
        if epoch != self._epoch:
            order = get_epoch_permutation(len(self._shards), self._seed, epoch)
            self._order = order.permute_array(np.arange(len(self._shards)))
            self._epoch, self._ends, self._read_ahead_window = epoch, [], -1

    def _extend_ends(self, number: int) -> None:
        """Compute the cumulative sample counts of all shards up to position ``number``.

        The position refers to the shuffled order of the current epoch. Counts that are already
        known are kept. A shard that is not in the manifest is read to count its samples.
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
            UserError: If there are no samples in an epoch. If this is because samples are excluded,
                the error of the first shard whose samples are excluded.
        """
        if self._total is None and len(self._manifest) == len(self._shards):
            total = sum(length for length, _ in self._manifest.values())
            if not total:
                raise self._exclusion_error or UserError(
                    f"{self._name}: no file has enough text for one sample; lower data.seq_len"
                )
            self._total = total
        return self._total

    def locate_sample(self, position: int, seed: int) -> EpochIndex:
        """Return the epoch and index of the sample at a position of the stream.

        See :meth:`Samples.locate_sample`. ``seed`` is ignored, because the stream has its own seed
        for the order. May tokenize shards to count their samples.

        Raises:
            UserError: If a shard cannot be read, or if no shard contains a sample.
            RunError: If a file has changed since its shard was added to the manifest.
        """
        with self._lock:
            return self._locate_position(position)

    def _locate_position(self, position: int) -> EpochIndex:
        """Locate the sample at a position of the stream. The caller must hold the lock.

        A window is a group of consecutive shards whose samples are shuffled together. This method
        reads the shards up to the end of the sample's window, unless the manifest already contains
        their sample counts. It also starts to tokenize the shards of later windows in
        background processes.
        """
        total = self._count_epoch_samples()
        epoch, offset = (0, position) if total is None else divmod(position, total)
        self._begin_epoch(epoch)
        last = len(self._order) - 1
        while (not self._ends or self._ends[-1] <= offset) and len(self._ends) <= last:
            self._extend_ends(len(self._ends))
        # The position is in a later epoch. The size of an epoch is known now, so the position can be located.
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

    def list_early_samples(self, num_samples: int) -> list[EpochIndex]:
        """List the stream's first sample and further samples of its shard.

        These samples can be read quickly, because the shard is one of the first that are tokenized.
        See :meth:`Samples.list_early_samples`.
        """
        epoch, index = self.locate_sample(0, self._seed)
        shard, first = index >> _INDEX_BITS, index & _INDEX_MASK
        count = self._manifest[shard].num_samples
        return [
            EpochIndex(epoch, shard << _INDEX_BITS | (first + number) % count)
            for number in range(num_samples)
        ]

    def count_epochs(self, num_samples: int) -> float | None:
        """Convert a number of samples to epochs.

        Returns:
            Number of epochs, possibly fractional. None until all shards are in the manifest, and
            :meth:`locate_sample` or :meth:`compute_consumed_digest` has been called after that.
            These methods compute the number of samples per epoch.
        """
        return None if self._total is None else num_samples / self._total

    # -- shards ------------------------------------------------------------------------------------------

    def _request_shards_ahead(self, epoch: int, window: int) -> None:
        """Let background processes tokenize the shards that follow a window.

        A window is a group of consecutive shards whose samples are shuffled together. At most
        :data:`_WINDOWS_AHEAD` windows are requested. If the size limit of the token cache requires
        it, fewer shards are requested, but at least one. The shards may belong to a later epoch.
        Does nothing if this process does not tokenize in advance, or if the window is the same as
        in the last call.

        Args:
            epoch: Epoch that contains the window.
            window: Index of the window in the epoch, from 0.
        """
        if not self._processes or window == self._read_ahead_window:
            return
        self._read_ahead_window = window
        if self._ahead is None:
            # Do not pass a method of this object, because the tokenizer's threads would then keep the object
            # alive.
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

        Tokenizes the shard if its tokens are not in the cache. The most recently used shards stay
        open.

        Returns:
            The samples. None if the shard has no text or is too short for one sample, or if all of
            its samples are excluded.

        Raises:
            UserError: If the shard cannot be read.
            RunError: If the tokens differ from the manifest because the file has changed.
        """
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
            try:
                tokens = _load_shard_tokens(self._job, self._shards[shard], self._disk)
            except NoTextError:
                self._add_to_manifest(shard, ShardEntry(0, ""))
                return None
            samples = None
            try:
                samples = self._samples(tokens)
            except NoSampleLeftError as error:
                self._exclusion_error = self._exclusion_error or error
            length = 0 if samples is None else len(samples)
            self._add_to_manifest(shard, ShardEntry(length, tokens.fingerprint[:_FINGERPRINT_CHARS]))
            self._open[shard] = samples
            self._disk.used_folders[shard] = tokens.folder
            while len(self._open) > 2 * self._window:
                closed, _ = self._open.popitem(last=False)
                del self._disk.used_folders[closed]
            self._disk.enforce_limit(tokens.folder)
            return samples

    def _add_to_manifest(self, shard: int, entry: ShardEntry, *, is_resumed: bool = False) -> None:
        """Add a shard to the manifest, or compare the shard with its entry.

        Args:
            shard: Number of the shard.
            entry: Number of samples and fingerprint of the shard.
            is_resumed: Whether the entry comes from the checkpoint from which the run resumes.

        Raises:
            RunError: If the manifest already contains a different entry for the shard, because the
                file has changed.
        """
        if self._manifest.setdefault(shard, entry) != entry:
            raise _build_changed_error(self._name, self._get_shard_name(shard), is_resumed=is_resumed)

    # -- samples ----------------------------------------------------------------------------------------

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build all columns of the samples. Loads their shards, and tokenizes them if necessary.

        If complete documents are packed, the number of columns of ``document_lengths`` differs
        between shards. Smaller arrays are then padded with zeros.
        """
        rows: dict[int, list[int]] = {}
        for row, (_, index) in enumerate(indices):
            rows.setdefault(index >> _INDEX_BITS, []).append(row)
        parts = []
        for shard, taken in rows.items():
            samples = self._load_shard_samples(shard)
            assert samples is not None
            in_shard = [
                EpochIndex(indices[row].epoch, indices[row].sample_index & _INDEX_MASK) for row in taken
            ]
            parts.append(PartArrays(taken, samples.build_arrays_with_columns(in_shard)))
        return merge_parts(parts, len(indices))

    def list_document_numbers(self, index: int) -> Sequence[int]:
        """Return the numbers of the documents in a sample. They are counted from 0 within the shard."""
        samples = self._load_shard_samples(index >> _INDEX_BITS)
        assert samples is not None
        return samples.list_document_numbers(index & _INDEX_MASK)

    def get_source_name(self, index: int) -> str:
        """Return the name of the file that contains a sample."""
        return self._get_shard_name(index >> _INDEX_BITS)

    def _get_shard_name(self, shard: int) -> str:
        """Return the name of the file that contains a shard. Used in error messages."""
        return self._shards[shard].open_source(self._job.settings).name

    # -- the manifest -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the manifest, to be stored in a checkpoint.

        Returns:
            A mapping from the source name to a list with ``[shard, samples, fingerprint]`` for each known
            shard.
        """
        manifest = dict(self._manifest)
        return {self._name: [[shard, *manifest[shard]] for shard in sorted(manifest)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the known sample counts of the shards from a checkpoint.

        A manifest lists the shards of a source that have already been read, with the number of
        samples and a fingerprint of each. The entries of the saved manifest are added to the
        current manifest.

        Args:
            state: Saved manifests, keyed by source name, as returned by :meth:`state_dict`.
                Manifests of other sources are ignored.

        Raises:
            ValueError: If the saved manifest contains an invalid shard index or number of samples.
            RunError: If a shard has changed since the checkpoint was saved.
        """
        for shard, length, fingerprint in state.get(self._name, ()):
            if not 0 <= shard < len(self._shards) or length < 0:
                raise ValueError(
                    f"{self._name}: the checkpoint contains the invalid shard {shard} with "
                    f"{format_count(length, 'sample')}, "
                    f"but the stream has {format_count(len(self._shards), 'shard')}"
                )
            self._add_to_manifest(shard, ShardEntry(length, fingerprint), is_resumed=True)

    def close(self) -> None:
        """Stop the background processes that tokenize shards.

        They are started again by the next call of :meth:`locate_sample`.
        """
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._read_ahead_window = None, -1

    def compute_consumed_digest(self, position: int) -> str:
        """Compute a digest of the manifest entries of the shards consumed before ``position``.

        The shards are the first ones in the order of the first epoch whose sample counts add up to
        at least ``position``. Because samples are shuffled within a window, later shards of the
        last window may also have been read. They are not included. If ``position`` is not in the
        first epoch, all shards are included. This rank must already have located a sample at or
        after ``position - 1``, so that the manifest contains the included shards. The digest is
        equal on all ranks, even if some ranks have read more shards than others.

        Raises:
            UserError: If all shards are in the manifest, but none contains a sample.
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


def _build_changed_error(source: str, file: str, *, is_resumed: bool) -> RunError:
    """Build the error to raise if a file of a stream has changed.

    Args:
        source: Name of the source.
        file: Name of the changed file.
        is_resumed: Whether the file has changed since the checkpoint from which the run resumes. If
            False, the file has changed since this run read it.
    """
    since = "the checkpoint was saved" if is_resumed else "the run read the file"
    return RunError(
        f"{source}: {file} has changed since {since}; restore the file, or start a new run in "
        "another output_dir"
    )


def _select_consumed_shards(
    position: int, manifest: dict[int, ShardEntry], order: Sequence[int]
) -> dict[int, ShardEntry]:
    """Select the manifest entries of the first shards that together contain ``position`` samples.

    The order of the samples within a window is not considered. The first ``position`` samples
    of the stream may therefore also come from later shards of the last window.

    Args:
        position: Number of samples from the start of the first epoch.
        manifest: Entries of the shards, keyed by shard number. It must contain the shards to
            select.
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
    """Limit on the disk space used by the tokens of a stream.

    If the tokens exceed the limit, the least recently used tokens are evicted.

    Args:
        cache: Folder that contains one token cache per shard.
        limit: Maximum size of all token caches in bytes. None for no limit. Token caches in use are
            not evicted, so their size may exceed the limit.
        window: Number of consecutive shards whose samples are shuffled together.
    """

    def __init__(self, cache: Path, limit: int | None, window: int) -> None:
        self._cache, self._limit, self._window = cache, limit, window
        self.used_folders: dict[int, Path] = {}
        """Folder of each open shard, keyed by the shard's number. These folders are not evicted."""
        self._prefetched_folders: deque[Path] = deque(maxlen=_WINDOWS_AHEAD * window)
        """Folders of the shards most recently tokenized in the background. They are not evicted."""
        self._free_bytes = 0
        """Number of bytes that may be added before the size of all folders has to be computed again."""

    def compute_num_shards_ahead(self) -> int:
        """Compute how many shards may be tokenized in advance, at least one.

        A window is a group of shards whose samples are shuffled together. The shards of up to two
        windows are in use at once. The result is the number of average-sized shards that fit into
        the size limit, minus the number of shards in two windows. Without a limit, or while no
        shard is in use, the result is the number of shards in :data:`_WINDOWS_AHEAD` windows.
        """
        sizes = [_compute_folder_bytes(folder) for folder in self.used_folders.values()]
        if self._limit is None or not sum(sizes):
            return _WINDOWS_AHEAD * self._window
        return max(1, self._limit * len(sizes) // sum(sizes) - 2 * self._window)

    def add_prefetched_folder(self, folder: Path) -> None:
        """Protect the folder of a newly tokenized shard from eviction, and enforce the size limit.

        The threads of :class:`BackgroundTokenizer` call this method.
        """
        self._prefetched_folders.append(folder)
        self.enforce_limit(folder)

    def enforce_limit(self, folder: Path) -> None:
        """Evict the least recently used tokens if the cache exceeds its size limit.

        Call this method after tokens were added in ``folder``. The size of all folders is
        recomputed only if the added tokens may have brought the cache over the limit.

        Args:
            folder: Folder of the added tokens.
        """
        if self._limit is not None:
            self._free_bytes -= _compute_folder_bytes(folder)
            if self._free_bytes <= 0:
                self.remove_oldest_tokens(self._limit)

    def remove_oldest_tokens(self, limit: int) -> None:
        """Evict the least recently used folders until the token cache fits into the limit.

        If the limit is exceeded, slightly more is evicted than necessary. The next tokens then fit
        for some time before the size of the cache has to be computed again, which is slow if there
        are many folders. Three kinds of folders are never evicted: open shards, the shards most
        recently tokenized in advance, and the newest folders. Folders of unfinished token caches
        are neither counted nor evicted.

        Args:
            limit: Maximum size of the cache in bytes. With 0, all folders are evicted except these
                three kinds.
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
        # Keep the newest folders, because another process may be reading them.
        for _, size, folder in sorted(folders)[: -self._window - 1]:
            if total <= most:
                break
            if folder not in used:
                trash = folder.with_name(f"{folder.name}.gone-{os.getpid()}")
                with suppress(OSError):
                    folder.rename(trash)
                    shutil.rmtree(trash, ignore_errors=True)
                    total -= size
        self._free_bytes = (limit - total) // 2  # only half, because another run may write as much


def _load_shard_tokens(job: TokenizeJob, shard: SourceShard, limiter: _TokenCacheLimiter) -> TokenCache:
    """Load the tokens of a shard. Tokenizes it if its tokens are not in the cache.

    If the disk is full, evicts all tokens that may be evicted, and tries again. Marks the
    folder of the tokens as recently used if it is in the token cache, and not a folder of the
    user.

    Raises:
        NoTextError: If the shard contains no text.
        UserError: If the shard cannot be read, or if its tokens cannot be written.
    """
    try:
        tokens = job.tokenize_shard(shard)
    except UserError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        limiter.remove_oldest_tokens(0)  # the disk is full, so evict all tokens that are not in use
        tokens = job.tokenize_shard(shard)
    if tokens.folder.parent == job.cache / TOKENS_FOLDER:  # the user's pretokenized data is not changed
        with suppress(OSError):
            os.utime(tokens.folder)  # mark as recently used
    return tokens


def _compute_folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes. 0 if the folder does not exist."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0
