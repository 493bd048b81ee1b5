"""Loaders that yield the micro-batches of a rank and prefetch the next ones."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from portable.batch import IGNORED_LABEL, PART_POSITIONS_COLUMN, SOURCE_COLUMN, TEXT_TOKENS_COLUMN, Batch
from portable.converters.interrupts import block_interrupts_in_children
from portable.data.samples.base import Samples, compute_document_lengths
from portable.data.samples.order import EpochIndex, compute_first_sample_of_rank, count_accumulation_steps
from portable.errors import RunError, UserError
from portable.private import torch_internals

_PRELOAD_MODULE = "portable.ranks.forkserver_preload"
_UNDIVIDED_COLUMNS = ("position_ids", "document_lengths", SOURCE_COLUMN)
"""Columns that every context-parallel rank gets for complete samples."""
_PREFETCHED_BATCHES = 4  # maximum number of micro-batches that the thread prefetches
BatchIndices = list[EpochIndex]
"""Epochs and indices of the samples of a batch.

A row with the index ``~i`` is a filler row: a copy of sample ``i`` whose labels do not contribute to the
loss.
"""
SequencePart = tuple[int, int]
"""Index of the part of each sequence that a context-parallel rank computes, and the number of parts.

``(0, 1)`` is the complete sequence, without context parallelism.
"""


class RankMicroBatch(NamedTuple):
    """Samples in one micro-batch of a rank.

    Attributes:
        positions: Position of each sample in the sequence of all samples of the run. At the end,
            filler rows repeat the rank's last sample in the step.
        num_trained: Number of rows before the filler rows.
    """

    positions: list[int]
    num_trained: int


def iter_rank_positions(
    *, position: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
) -> Iterator[RankMicroBatch]:
    """Yield the sample positions of each micro-batch of a rank, endlessly.

    For a global batch of *G* samples, step *s* (counted from 0) uses the samples
    ``[position + s*G, position + (s+1)*G)`` of the run. Rank *r* of *W* uses the samples
    ``[r*G // W, (r+1)*G // W)`` of the step, in order. All ranks have the same number of
    micro-batches per step, all of the same size. If a rank has too few samples, copies of its last
    sample fill up its last micro-batches.

    Args:
        position: Number of samples that the run has already consumed.
        global_batch_size: Number of samples per step over all ranks.
        micro_batch_size: Number of samples per micro-batch.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.

    Raises:
        UserError: If there are more ranks than samples in a global batch. The call itself raises
            the error, before the first micro-batch is requested.
    """
    if global_batch_size < world_size:
        raise UserError(
            f"train.global_batch_size: is {global_batch_size}, but the {world_size} data-parallel ranks need "
            f"at least one sample each; set train.global_batch_size to {world_size}, or use fewer ranks"
        )
    first, end = (
        compute_first_sample_of_rank(global_batch_size, number, world_size) for number in (rank, rank + 1)
    )
    padded = micro_batch_size * count_accumulation_steps(global_batch_size, micro_batch_size, world_size)

    def iter_positions() -> Iterator[RankMicroBatch]:
        start = position
        while True:
            for begin in range(start + first, start + first + padded, micro_batch_size):
                micro_batch = range(begin, begin + micro_batch_size)
                last = start + end - 1
                yield RankMicroBatch(
                    [min(number, last) for number in micro_batch], sum(n <= last for n in micro_batch)
                )
            start += global_batch_size

    return iter_positions()


@dataclass(eq=False)
class TrainLoader:
    """Endless iterable over the micro-batches of a rank.

    Each item is a dictionary of CPU tensors: the arguments of ``model.forward``, the ``labels``,
    and further columns, such as the ``source`` in a mixture. For a language model, labels are int64
    ``[micro_batch_size, seq_len]``. For preference pairs, the shape is
    ``[micro_batch_size, 2, seq_len]``. With context parallelism, an item contains this rank's part
    of each sequence. For a classifier, see :class:`ClassificationSamples`. At the end of a step,
    micro-batches may contain filler rows, whose labels are -100 or NaN.

    Iterating over the loader creates a new :class:`BatchIterator` that starts at ``position``. The
    attribute ``position`` does not change. After *s* steps, the run has consumed
    ``position + s * global_batch_size`` samples.

    If ``num_workers`` is 0, a thread of this process prefetches micro-batches. This is fastest
    for memory-mapped data: a micro-batch of 8 x 2048 tokens takes 0.07 ms, compared to 1 ms
    with worker processes, which also take 2.5 s to start. Otherwise, ``num_workers`` processes
    prefetch.

    Attributes:
        dataset: Samples to train on.
        seed: Seed of the run, which determines the order of the samples.
        position: Number of samples that the run has already consumed. 0 unless the run resumes.
        global_batch_size: Number of samples per step over all ranks.
        micro_batch_size: Number of samples per micro-batch.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        sequence_part: Part of each sequence to return, for context parallelism.
        num_workers: Number of worker processes. 0 uses a thread.
        pin_memory: Whether to copy tensors to pinned memory.

    Raises:
        UserError: If there are more ranks than samples in a global batch.
    """

    dataset: Samples
    _: KW_ONLY
    seed: int
    position: int = 0
    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    sequence_part: SequencePart = (0, 1)
    num_workers: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        self._iter_positions()  # raise errors now instead of at the first batch

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches per step on each rank."""
        return count_accumulation_steps(self.global_batch_size, self.micro_batch_size, self.world_size)

    def _iter_positions(self) -> Iterator[RankMicroBatch]:
        """Iterate over the sample positions of this rank's micro-batches. See :func:`iter_rank_positions`."""
        return iter_rank_positions(
            position=self.position,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _locate_samples(self, positions: list[int], num_trained: int) -> BatchIndices:
        """Convert the positions of a micro-batch to epochs and sample indices.

        Each position becomes a row of the micro-batch. The model trains only on the first
        ``num_trained`` rows. The remaining rows are filler, so their index is replaced with
        ``~index``, which is negative.
        """
        indices = [self.dataset.locate_sample(position, self.seed) for position in positions]
        return indices[:num_trained] + [EpochIndex(epoch, ~index) for epoch, index in indices[num_trained:]]

    def __iter__(self) -> BatchIterator:
        indices = (self._locate_samples(positions, trained) for positions, trained in self._iter_positions())
        batch = partial(fetch_batch, self.dataset, sequence_part=self.sequence_part)
        return BatchIterator(batch, indices, self.num_workers, self.pin_memory)


@dataclass(eq=False)
class EvalLoader:
    """Iterable over a rank's batches in one evaluation, which uses each sample once, in order.

    The batches are distributed among the ranks in turn: batch *b* of rank *r* of *W* starts at sample
    ``(b*W + r) * batch_size``. All ranks get the same number of batches of the same size. Rows beyond
    the last sample are copies of the first sample. Their labels are -100 (or NaN for numeric labels),
    so they do not contribute to the loss.

    Attributes:
        dataset: Samples to evaluate on.
        batch_size: Number of samples per batch of a rank.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        sequence_part: Part of each sequence to return, for context parallelism.
        pin_memory: Whether to copy tensors to pinned memory.
        max_samples: Maximum number of samples to evaluate on, over all ranks. None uses all samples.
    """

    dataset: Samples
    _: KW_ONLY
    batch_size: int
    rank: int = 0
    world_size: int = 1
    sequence_part: SequencePart = (0, 1)
    pin_memory: bool = False
    max_samples: int | None = None
    """Maximum number of samples to evaluate on, over all ranks. None means all samples."""

    @property
    def _num_samples(self) -> int:
        """Number of evaluation samples on all ranks together, at most ``max_samples``."""
        return len(self.dataset) if self.max_samples is None else min(self.max_samples, len(self.dataset))

    def __len__(self) -> int:
        """Return the number of batches per rank."""
        return -(-self._num_samples // (self.batch_size * self.world_size))

    def __iter__(self) -> BatchIterator:
        starts = ((number * self.world_size + self.rank) * self.batch_size for number in range(len(self)))
        indices = (
            [
                EpochIndex(EVAL_EPOCH, index if index < self._num_samples else ~0)
                for index in range(start, start + self.batch_size)
            ]
            for start in starts
        )
        batch = partial(fetch_batch, self.dataset, sequence_part=self.sequence_part)
        return BatchIterator(batch, indices, 0, self.pin_memory)


EVAL_EPOCH = (1 << 63) - 1
"""Epoch of all evaluation samples. It is fixed, so that the random masks of masked language models are equal
in every evaluation.
"""


def fetch_batch(dataset: Samples, indices: BatchIndices, *, sequence_part: SequencePart = (0, 1)) -> Batch:
    """Build a batch, or one part of each sequence in it.

    A row is a filler row if its index is not in ``range(len(dataset))``. Filler rows pad the batch
    to its full size. All their labels are -100, or NaN if labels are floats, so that these rows do
    not contribute to the loss. A negative index ``~i`` gives a copy of sample ``i``, and an index
    after the last sample gives a copy of sample 0.

    Args:
        dataset: Dataset of the samples.
        indices: Epoch and sample index of each row.
        sequence_part: Index of the part to return, and number of parts. ``(0, 1)`` returns the
            complete sequences.
    """
    count = len(dataset)
    samples = [EpochIndex(epoch, index if index >= 0 else ~index) for epoch, index in indices]
    batch = dataset.build_batch(
        [EpochIndex(epoch, index if index < count else 0) for epoch, index in samples]
    )
    for row, (_, index) in enumerate(indices):
        if not 0 <= index < count:
            batch["labels"][row] = torch.nan if batch["labels"].is_floating_point() else IGNORED_LABEL
    return slice_sequence_part(batch, sequence_part)


def slice_sequence_part(batch: Batch, sequence_part: SequencePart) -> Batch:
    """Select one part of each sample's tokens, for context parallelism.

    Labels are already shifted, so a part does not depend on the labels of the next part. The
    attention mask is dropped, because tokens cannot attend to the padding after them in causal
    attention.

    Args:
        batch: Batch with tensors ``[batch, seq_len]``.
        sequence_part: Index of the part, and number of parts. All parts have the same length, so
            the number of parts must divide ``seq_len``.

    Returns:
        ``batch`` itself if there is only one part. Otherwise a new batch with this part's tokens
        and labels, and two columns that describe each token: :data:`PART_POSITIONS_COLUMN` and
        :data:`TEXT_TOKENS_COLUMN`. These four are int64 ``[batch, seq_len / parts]``. If documents
        are packed, the result also contains ``position_ids`` and ``document_lengths`` of the
        complete batch, because attention needs all document boundaries. In a mixture, it also
        contains :data:`SOURCE_COLUMN`, which has one value per row.
    """
    index, parts = sequence_part
    if parts == 1:
        return batch
    ids = batch["input_ids"]
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
    size = ids.shape[1] // parts
    divided = {"input_ids": ids, "labels": batch["labels"], PART_POSITIONS_COLUMN: positions}
    divided[TEXT_TOKENS_COLUMN] = compute_document_lengths(batch).expand(
        ids.shape
    )  # computed here, because a part does not contain all tokens of its documents
    undivided = {name: batch[name] for name in _UNDIVIDED_COLUMNS if name in batch}
    # The attention mask is left out: in causal attention, tokens cannot attend to the padding after them.
    # Settings that add other columns do not work with context parallelism. See `check_context_parallel`.
    return undivided | {
        name: values.narrow(1, index * size, size).contiguous() for name, values in divided.items()
    }


class BatchIterator(Iterator[Batch]):
    """Iterator that yields batches in order, and prefetches the next ones.

    If ``num_workers`` is 0, a thread starts to prefetch immediately. Otherwise, worker processes
    start when the first batch is requested. Prefetching stops when ``close`` is called or the
    iterator is deleted. If building a batch fails, the iterator raises the exception when this
    batch is requested. It raises RunError if a worker process was killed.

    Args:
        fetch: Function that builds a batch from the indices of its samples.
        batch_indices: Sample indices of each batch.
        num_workers: Number of worker processes. 0 uses a thread.
        pin_memory: Whether to copy tensors to pinned memory. Ignored without an accelerator.

    Attributes:
        num_batches: Number of batches returned so far.
        wait_seconds: Total time in seconds that the caller has waited for batches.
        has_ended: Whether a caller has requested a batch after the last one. ``close`` does not
            set it.
    """

    def __init__(
        self,
        fetch: Callable[[BatchIndices], Batch],
        batch_indices: Iterable[BatchIndices],
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.num_batches = 0
        self.wait_seconds = 0.0
        self.has_ended = False
        self._ahead: _ThreadPrefetcher | None = None
        self._batches: Iterator[Batch]
        if num_workers:
            self._batches = _iter_worker_batches(fetch, batch_indices, num_workers, pin_memory)
        else:
            self._batches = self._ahead = _ThreadPrefetcher(fetch, batch_indices, pin_memory)

    def __next__(self) -> Batch:
        begun = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.has_ended = True
            raise
        self.wait_seconds += time.perf_counter() - begun
        self.num_batches += 1
        return batch

    def close(self) -> None:
        """Stop prefetching, and discard the prefetched batches. The iterator is exhausted afterwards."""
        if self._ahead is not None:
            self._ahead.close()
        self._batches = iter(())


def _iter_worker_batches(
    fetch: Callable[[BatchIndices], Batch],
    batch_indices: Iterable[BatchIndices],
    num_workers: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Return an iterator over the batches of worker processes, in order.

    The call deletes the semaphores that killed runs have left in ``/dev/shm``. The worker processes
    start when the first batch is requested. They are forked from the fork server of
    ``multiprocessing``, or spawned on systems without a fork server. For the errors that the
    iterator raises, see :func:`_iter_batches_or_raise`. For the arguments, see
    :class:`BatchIterator`.
    """
    # A plain fork would copy locks that threads of NCCL, gloo or the accelerator may hold.
    server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = copy.copy(multiprocessing.get_context("forkserver" if server else "spawn"))
    context.Event = partial(_LockFreeEvent, context)
    names = _SemaphoreNames(context)
    names.remove_leftovers()
    context.Queue = names.make_queue
    # Linux kills the fork server when the thread that started it ends. Only the main thread may therefore
    # start it.
    if server and threading.current_thread() is threading.main_thread():
        from multiprocessing.forkserver import _forkserver

        before: list[str] = getattr(_forkserver, "_preload_modules", ["__main__"])
        others = [name for name in before if name != _PRELOAD_MODULE]
        context.set_forkserver_preload([_PRELOAD_MODULE, *others])
    return _iter_batches_or_raise(
        names,
        DataLoader(
            _BatchFetchingDataset(fetch),
            sampler=_BatchIndexSampler(batch_indices),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            generator=torch.Generator(),  # the global generator is reserved for dropout
            multiprocessing_context=context,
        ),
    )


def _iter_batches_or_raise(
    names: _SemaphoreNames, loader: DataLoader[Batch | RunError | UserError]
) -> Iterator[Batch]:
    """Yield the batches of worker processes, and raise the workers' errors in this process.

    The workers start when the first batch is requested, with SIGINT blocked. If a worker was
    killed, the other workers are killed too.

    Args:
        names: Names of the semaphores of the loader's queues. They are removed once every worker
            has returned a batch.
        loader: Loader whose workers return a batch or an error.

    Raises:
        RunError: If a worker has raised a RunError or was killed.
        UserError: If a worker has raised a UserError.
    """
    with block_interrupts_in_children():
        batches = iter(loader)
    for number in count():
        if number == loader.num_workers:  # every worker has returned a batch, so it has opened its semaphores
            names.unlink_names()
        try:
            batch = next(batches, None)
        except RuntimeError as error:
            if (worker_error := build_worker_death_error(error)) is None:
                raise
            torch_internals.kill_data_workers(batches)
            raise worker_error from error
        except (EOFError, ConnectionError) as error:  # the worker died while it passed its shared memory
            if str(error).startswith("Caught "):  # the worker's code raised the exception
                raise
            torch_internals.kill_data_workers(batches)
            raise _build_worker_killed_error() from error
        if batch is None:
            return
        if isinstance(batch, RunError | UserError):
            raise batch
        yield batch


def build_worker_death_error(error: BaseException) -> RunError | None:
    """Build the error for a dead worker process if torch raised ``error`` for this reason.

    torch raises such an error in a signal handler. The error can therefore appear at any point in
    the main thread. It is recognized by its message, which starts with ``DataLoader worker``.

    Returns:
        The error to raise instead. None if ``error`` was not caused by a dead worker.
    """
    is_worker_death = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
    return _build_worker_killed_error() if is_worker_death else None


def _build_worker_killed_error() -> RunError:
    return RunError(
        "data.num_workers: a process that prepares batches was killed, most likely because memory ran out; "
        "free memory or lower data.num_workers, and run the same command again"
    )


class _SemaphoreNames:
    """Registry that removes the names of a loader's semaphores from ``/dev/shm``.

    Each queue of the loader has semaphores, and each worker opens them by name. The names would
    remain if all processes were killed. To avoid this, the names are removed as soon as every
    worker has opened the semaphores, which remain usable. If a run is killed before that, its names
    are left. The next run finds them by the process ID in each name, and removes them.

    Args:
        context: Context of ``multiprocessing`` that creates the queues.
    """

    def __init__(self, context: Any) -> None:
        self._make = context.Queue
        self._queues: list[Any] = []
        # Process IDs are unique in their namespace, and containers may share /dev/shm.
        namespace = Path("/proc/self/ns/pid")
        self._prefix = f"mp-portable-{namespace.stat().st_ino}-" if namespace.exists() else ""

    def make_queue(self) -> Any:
        """Create a queue whose semaphore names contain the process ID.

        The queue is remembered, so that :meth:`unlink_names` can remove the names. On systems
        without ``/proc``, the names do not contain the process ID.
        """
        prefix = f"/{self._prefix}{os.getpid()}" if self._prefix else "/mp"
        with torch_internals.prefix_semaphores(prefix):
            self._queues.append(self._make())
        return self._queues[-1]

    def remove_leftovers(self) -> None:
        """Delete the semaphores in ``/dev/shm`` of runs whose processes no longer exist.

        The name of a run's semaphore contains the process ID and the PID namespace of its creator.
        Only semaphores from the namespace of this process are deleted, because containers may share
        ``/dev/shm``. On systems without ``/proc``, the names lack the ID, so this method does
        nothing.
        """
        if not self._prefix:
            return
        for path in Path("/dev/shm").glob(f"sem.{self._prefix}*"):
            try:
                os.kill(int(path.name.split("-")[3]), 0)
            except ProcessLookupError:
                with contextlib.suppress(OSError):  # belongs to another user, or is already removed
                    path.unlink()
            except (PermissionError, ValueError):
                continue

    def unlink_names(self) -> None:
        """Remove the names of the semaphores of all queues that :meth:`make_queue` has created.

        Must be called after all workers have opened the semaphores. The workers can still use them,
        but if all processes are killed, no names are left in ``/dev/shm``.
        """
        torch_internals.unlink_semaphores(self._queues)


class _LockFreeEvent:
    """Event that is shared between processes without a lock.

    It replaces ``multiprocessing.Event`` in a DataLoader, and has only the methods ``set`` and
    ``is_set``. The lock of ``multiprocessing.Event`` would stay locked if a process were killed
    while it reads the event.
    """

    def __init__(self, context: Any) -> None:
        self._byte = context.RawValue("b", 0)

    def set(self) -> None:
        self._byte.value = 1

    def is_set(self) -> bool:
        return bool(self._byte.value)


class _BatchIndexSampler(Sampler[BatchIndices]):
    """Sampler that passes the indices of each batch to the DataLoader."""

    def __init__(self, indices: Iterable[BatchIndices]) -> None:
        self._places = indices

    def __iter__(self) -> Iterator[BatchIndices]:
        return iter(self._places)


class _BatchFetchingDataset(Dataset[Batch | RunError | UserError]):
    """Dataset whose items are batches. A worker process indexes it with a batch's sample indices.

    If building a batch raises RunError or UserError, the error is returned as the item.
    """

    def __init__(self, fetch: Callable[[BatchIndices], Batch]) -> None:
        self._batch = fetch

    def __getitem__(self, indices: BatchIndices) -> Batch | RunError | UserError:
        try:
            return self._batch(indices)
        except (RunError, UserError) as error:
            # Returned, because DataLoader would replace a raised exception by a traceback.
            return error


class _ThreadPrefetcher(Iterator[Batch]):
    """Iterator over batches that a thread builds and pins while the model computes.

    The thread starts immediately. The attribute ``close`` is a function that stops the thread. The
    function is also called when the iterator is deleted, and at exit. See :class:`BatchIterator`
    for the arguments.
    """

    def __init__(
        self, fetch: Callable[[BatchIndices], Batch], batch_indices: Iterable[BatchIndices], pin_memory: bool
    ) -> None:
        pin = pin_memory and torch.accelerator.is_available()
        # Pinning uses the current device's context, and a new thread starts on device 0.
        device = torch.accelerator.current_device_index() if pin else None
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=_PREFETCHED_BATCHES)
        stop = threading.Event()
        thread = threading.Thread(
            target=_prefetch_batches,
            args=(fetch, batch_indices, device, self._ready, stop),
            name="read-ahead",
            daemon=True,
        )
        # The finalizer also runs when this object is deleted, or at exit before the interpreter shuts down.
        self.close = weakref.finalize(self, _stop_prefetching, self._ready, stop, thread)
        self._end: BaseException | None = None
        thread.start()

    def __next__(self) -> Batch:
        if self._end is None and self.close.alive:
            item = self._ready.get()
            if not isinstance(item, BaseException):
                return item
            self._end = item
        raise self._end or StopIteration


def _prefetch_batches(
    fetch: Callable[[BatchIndices], Batch],
    batch_indices: Iterable[BatchIndices],
    device: int | None,
    ready: queue.Queue[Batch | BaseException],
    stop: threading.Event,
) -> None:
    """Put batches into a queue until there are none left or ``stop`` is set.

    The prefetching thread runs this function. After the last batch, it puts a ``StopIteration``
    into the queue. If an exception occurs, it puts the exception into the queue and returns.

    Args:
        fetch: Function that builds a batch from the indices of its samples.
        batch_indices: Sample indices of each batch.
        device: Index of the device for which tensors are pinned. None if they are not pinned.
        ready: Queue for the batches.
        stop: Event that ends the thread.
    """
    try:
        if device is not None:
            torch.accelerator.set_device_index(device)
        for batch_places in batch_indices:
            batch = fetch(batch_places)
            if device is not None:
                batch = {name: value.pin_memory() for name, value in batch.items()}
            ready.put(batch)
            if stop.is_set():
                return
        ready.put(StopIteration())
    except BaseException as error:
        ready.put(error)


def _stop_prefetching(
    ready: queue.Queue[Batch | BaseException], stop: threading.Event, thread: threading.Thread
) -> None:
    """Stop the prefetching thread, and wait at most 5 seconds until it has ended.

    Sets the stop event, and empties the queue, because a full queue would block the thread.
    """
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()  # a full queue would block the thread
    # The garbage collector may call this function from any thread.
    if thread is not threading.current_thread():
        thread.join(timeout=5)
