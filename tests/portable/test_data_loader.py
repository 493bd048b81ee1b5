"""The loaders: the same global batch on any number of ranks, and the same batches from any position."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from portable.batch import IGNORED_LABEL
from portable.data.samples.base import Arrays, PackedCausalSamples, SampleRange, Samples
from portable.data.samples.loader import BatchIterator, EvalLoader, TrainLoader
from portable.data.samples.order import EpochIndex
from tests.portable.data_support import token_cache

LENGTH, COUNT = 4, 37


@pytest.fixture
def samples(tmp_path: Path) -> PackedCausalSamples:
    cache = token_cache(tmp_path / "cache", [list(range(LENGTH * COUNT + 1))])
    return PackedCausalSamples(cache, SampleRange(0, COUNT), LENGTH)


# --- reading ahead


class Counting(Samples):
    """Dataset that counts how often it is read, and fails at one index."""

    num_samples = 1000

    def __init__(self, breaks_at: int | None = None) -> None:
        self.breaks_at = breaks_at
        self.reads = 0

    def list_document_numbers(self, index: int) -> range:
        return range(index, index + 1)

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        self.reads += 1
        if self.reads - 1 == self.breaks_at:
            raise RuntimeError("the disk is gone")
        return {"input_ids": torch.zeros(len(indices), 2, dtype=torch.int64).numpy()}


def batches_of(data: Counting) -> BatchIterator:
    return iter(TrainLoader(data, seed=0, global_batch_size=1, micro_batch_size=1))


def test_train_loader_prefetches_up_to_limit() -> None:
    data = Counting()
    batches = batches_of(data)
    next(batches)
    deadline = time.monotonic() + 30
    while data.reads < 4 and time.monotonic() < deadline:
        time.sleep(0.001)  # the step: no batch is requested
    time.sleep(0.05)
    assert 4 <= data.reads <= 8
    batches.close()


def test_train_loader_raises_error_at_failing_batch() -> None:
    batches = batches_of(Counting(breaks_at=2))
    next(batches)
    next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the disk is gone"):
            next(batches)


# --- evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 40])
def test_eval_loader_yields_every_sample_once(
    samples: PackedCausalSamples, world_size: int, batch_size: int
) -> None:
    lengths, seen, ignored = set(), [], 0
    for rank in range(world_size):
        loader = EvalLoader(samples, batch_size=batch_size, rank=rank, world_size=world_size)
        batches = list(loader)
        lengths.add(len(batches))
        assert len(batches) == len(loader)
        for batch in batches:
            assert batch["input_ids"].shape == batch["labels"].shape == (batch_size, LENGTH)
            counts = (batch["labels"] != IGNORED_LABEL).all(dim=1)
            assert torch.equal(counts, (batch["labels"] != IGNORED_LABEL).any(dim=1))
            seen += (batch["input_ids"][counts][:, 0] // LENGTH).tolist()
            ignored += int((~counts).sum())
    assert sorted(seen) == list(range(COUNT))
    assert len(lengths) == 1
    assert ignored == next(iter(lengths)) * batch_size * world_size - COUNT
