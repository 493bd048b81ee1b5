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

from portable.batch import IGNORED_LABEL, PART_POSITIONS_COLUMN, TEXT_TOKENS_COLUMN, Batch
from portable.converters.interrupts import block_interrupts_in_children
from portable.data.samples.base import Samples, compute_document_lengths
from portable.data.samples.order import EpochIndex, compute_first_sample_of_rank, count_accumulation_steps
from portable.errors import RunError, UserError
from portable.private import torch_internals

_PRELOAD_MODULE = "portable.ranks.forkserver_preload"
_PREFETCHED_BATCHES = 4  # prefetched micro-batches
BatchIndices = list[EpochIndex]
"""Epochs and indices of the samples of a batch.

A filler row, a copy of sample ``i`` without labels, has the index ``~i``.
"""
SequencePart = tuple[int, int]
"""Index of the part of each sequence that this rank computes, and the number of parts, for context
parallelism.
"""


class RankMicroBatch(NamedTuple):
    """Samples of one micro-batch of a rank.

    Attributes:
        positions: Positions of the samples in the run. Filler rows are copies of the rank's last sample of
            the step.
        num_trained: Number of rows at the start that belong to the step. The other rows are filler without
            labels.
    """

    positions: list[int]
    num_trained: int


def iter_rank_positions(
    *, position: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
) -> Iterator[RankMicroBatch]:
    """Yield the sample positions of each micro-batch of a rank, without end.

    Step *s* takes the samples ``[position + s*G, position + (s+1)*G)`` of the run, for a global batch of *G*
    samples. Rank *r* of *W* takes the samples from ``r*G // W`` to ``(r+1)*G // W`` of the step in order, one
    micro-batch at a time. All ranks have the same number of micro-batches per step, with the same size. If
    *G* is not divisible, the last micro-batches of a rank are filled with copies of its last sample.

    Args:
        position: Number of samples of the run that are already consumed.
        global_batch_size: Number of samples per step on all ranks.
        micro_batch_size: Number of samples per micro-batch.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.

    Raises:
        UserError: If there are more ranks than samples in a global batch.
    """
    if global_batch_size < world_size:
        raise UserError(
            f"train.global_batch_size: {global_batch_size} samples cannot be divided among {world_size} "
            f"ranks; set train.global_batch_size: {world_size}, or use fewer ranks"
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
    """Iterable over the micro-batches of a rank, without end.

    It yields dictionaries of CPU tensors with the arguments of ``model.forward`` and with ``labels``: int64
    ``[micro_batch_size, seq_len]``, or labels of a classifier ``[micro_batch_size]``, float32 for regression.
    After *s* steps, the position of the run is ``position + s * global_batch_size``.

    With ``num_workers`` 0, a thread of this process prefetches. This is the fastest for memory-mapped data:
    with 8 x 2048 tokens, 0.07 ms per micro-batch, compared to 1 ms and a startup of 2.5 s with worker
    processes. Otherwise, ``num_workers`` processes prefetch.

    Attributes:
        dataset: Samples to train on.
        seed: Seed of the run, which determines the order of the samples.
        position: Number of samples that the run has consumed before. It is 0 unless the run resumes.
        global_batch_size: Number of samples per step on all ranks.
        micro_batch_size: Number of samples per micro-batch.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        sequence_part: Part of each sequence to return.
        num_workers: Number of worker processes. 0 for a thread.
        pin_memory: Whether tensors are copied to pinned memory.
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
        self._iter_positions()  # raises now instead of at the first batch

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches per step, the same on all ranks."""
        return count_accumulation_steps(self.global_batch_size, self.micro_batch_size, self.world_size)

    def _iter_positions(self) -> Iterator[RankMicroBatch]:
        """Iterate over the positions of this rank's micro-batches. See :func:`iter_rank_positions`."""
        return iter_rank_positions(
            position=self.position,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _locate_samples(self, positions: list[int], num_trained: int) -> BatchIndices:
        """Locate the samples of a micro-batch.

        Filler rows after the first ``num_trained`` rows get the index ``~index``.
        """
        indices = [self.dataset.locate_sample(position, self.seed) for position in positions]
        return indices[:num_trained] + [EpochIndex(epoch, ~index) for epoch, index in indices[num_trained:]]

    def __iter__(self) -> BatchIterator:
        indices = (self._locate_samples(positions, trained) for positions, trained in self._iter_positions())
        batch = partial(fetch_batch, self.dataset, sequence_part=self.sequence_part)
        return BatchIterator(batch, indices, self.num_workers, self.pin_memory)


@dataclass(eq=False)
class EvalLoader:
    """Iterable over all samples once, in order, divided among the ranks.

    All ranks get the same number of batches.

    Batch *b* of rank *r* of *W* starts at sample ``(b*W + r) * batch_size``. Rows after the last sample are
    copies of the first sample with all labels -100, or NaN for numeric labels.

    Attributes:
        dataset: Samples to evaluate on.
        batch_size: Number of samples per batch of a rank.
        rank: Rank of this process among the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        sequence_part: Part of each sequence to return.
        pin_memory: Whether tensors are copied to pinned memory.
        max_samples: Number of samples to stop after. All samples if None.
    """

    dataset: Samples
    _: KW_ONLY
    batch_size: int
    rank: int = 0
    world_size: int = 1
    sequence_part: SequencePart = (0, 1)
    pin_memory: bool = False
    max_samples: int | None = None
    """Number of samples to stop after. All samples if None."""

    @property
    def _num_samples(self) -> int:
        """Number of samples to evaluate on over all ranks: all samples, or at most ``max_samples``."""
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
"""Epoch of all evaluation samples. Because it is fixed, their random masks are the same in every
evaluation.
"""


def fetch_batch(dataset: Samples, indices: BatchIndices, *, sequence_part: SequencePart = (0, 1)) -> Batch:
    """Build a batch, or one part of its sequences.

    Rows with a negative index, or an index after the last sample, get labels that do not count (-100 or NaN).

    Args:
        dataset: Dataset of the samples.
        indices: Epochs and indices of the rows.
        sequence_part: Part of each sequence to return.
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
    """Select one part of the tokens of each sample, for context parallelism.

    The labels are already shifted, so a part needs no label of another part. ``position_ids`` and
    ``document_lengths`` remain complete, because attention needs the boundaries of all documents.

    Args:
        batch: Batch with tensors ``[batch, seq_len]``.
        sequence_part: Index of the part and number of parts. Parts have equal lengths.

    Returns:
        ``batch`` itself if there is one part. Otherwise ``input_ids``, ``labels``, positions and document
        lengths of the part, int64 ``[batch, seq_len / parts]``, without an attention mask.
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
    )  # a part does not contain all tokens of its documents
    undivided = {name: batch[name] for name in ("position_ids", "document_lengths") if name in batch}
    # The attention mask is not needed, because causal attention of the tokens does not see the padding at the
    # end.
    return undivided | {
        name: values.narrow(1, index * size, size).contiguous() for name, values in divided.items()
    }


class BatchIterator(Iterator[Batch]):
    """Iterator over batches in order. Calling ``close`` or deleting the iterator stops the prefetching.

    Attributes:
        num_batches: Number of batches returned so far.
        wait_seconds: Seconds that the caller has waited for batches.
        has_ended: Whether the last batch has been returned.
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
        """Stop the prefetching. The iterator is empty afterwards."""
        if self._ahead is not None:
            self._ahead.close()
        self._batches = iter(())


def _iter_worker_batches(
    fetch: Callable[[BatchIndices], Batch],
    batch_indices: Iterable[BatchIndices],
    num_workers: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Start worker processes and yield their batches in order."""
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
            generator=torch.Generator(),  # the global one is reserved for dropout
            multiprocessing_context=context,
        ),
    )


def _iter_batches_or_raise(
    names: _SemaphoreNames, loader: DataLoader[Batch | RunError | UserError]
) -> Iterator[Batch]:
    """Yield the batches of worker processes. Raises the errors of workers in this process."""
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

    torch raises it in a signal handler, so it can interrupt any code of the main thread.

    Returns:
        None if ``error`` was not caused by a dead worker.
    """
    is_worker_death = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
    return _build_worker_killed_error() if is_worker_death else None


def _build_worker_killed_error() -> RunError:
    return RunError(
        "data.num_workers: a process that prepares batches was killed, most likely because of a lack of "
        "memory; free memory or lower data.num_workers, and run the same command again"
    )


class _SemaphoreNames:
    """Names of the semaphores of the queues between a loader and its workers.

    Workers open the semaphores by name. If all processes are killed, nothing removes the names from /dev/shm.
    Each name is therefore removed as soon as every worker has opened its semaphores. The names contain the
    process ID of their creator, so that the next run removes the names of a run that was killed before that.

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
        """Create a queue and record it."""
        prefix = f"/{self._prefix}{os.getpid()}" if self._prefix else "/mp"
        with torch_internals.prefix_semaphores(prefix):
            self._queues.append(self._make())
        return self._queues[-1]

    def remove_leftovers(self) -> None:
        """Delete the semaphores in ``/dev/shm`` whose creators are dead. Does nothing without a prefix."""
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
        """Remove the names. The semaphores remain usable."""
        torch_internals.unlink_semaphores(self._queues)


class _LockFreeEvent:
    """Event that processes share without a lock.

    A process that is killed while it reads the event cannot leave a locked lock.
    """

    def __init__(self, context: Any) -> None:
        self._byte = context.RawValue("b", 0)

    def set(self) -> None:
        self._byte.value = 1

    def is_set(self) -> bool:
        return bool(self._byte.value)


class _BatchIndexSampler(Sampler[BatchIndices]):
    """Sampler that yields the given indices of batches."""

    def __init__(self, indices: Iterable[BatchIndices]) -> None:
        self._places = indices

    def __iter__(self) -> Iterator[BatchIndices]:
        return iter(self._places)


class _BatchFetchingDataset(Dataset[Batch | RunError | UserError]):
    """Dataset that a worker process indexes with all samples of a batch at once."""

    def __init__(self, fetch: Callable[[BatchIndices], Batch]) -> None:
        self._batch = fetch

    def __getitem__(self, indices: BatchIndices) -> Batch | RunError | UserError:
        try:
            return self._batch(indices)
        except (RunError, UserError) as error:
            # Returned, because DataLoader would replace a raised exception by a traceback.
            return error


class _ThreadPrefetcher(Iterator[Batch]):
    """Iterator over batches that a thread of this process builds and pins during the step."""

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
        # Runs when this object is deleted, or at exit, before the interpreter shuts down.
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
    """Put batches, and finally an exception, into the queue. This is the target of the thread."""
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
    """Set the stop event, empty the queue, and wait for the thread."""
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()  # a full queue would block the thread
    if thread is not threading.current_thread():  # the garbage collector may call from any thread
        thread.join(timeout=5)
