"""``train.micro_batch_size: auto`` and out-of-memory errors, on ranks with limited memory."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.backend import Diagnostics, DriverMemory
from portable.config import load_config
from portable.engines import memory_trial
from portable.errors import UserError
from portable.gpu import device_specs as devices
from portable.run.micro_batch import find_largest_fitting, list_divisors
from portable.run.rank import run_rank
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured, losses, weights

MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h


@pytest.mark.parametrize("share", [1, 12, 5040])
def test_find_largest_fitting_needs_few_trials(share: int) -> None:
    sizes = list_divisors(share)
    assert sizes == [n for n in range(1, share + 1) if share % n == 0]
    for most in (0, *sizes):
        tried: list[int] = []

        def fits(size: int, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= most

        for first in (1, most, sizes[-1]):  # for any estimate of the planner
            tried.clear()
            assert find_largest_fitting(sizes, fits, first) == (most or None)
            assert len(tried) == len(set(tried)) <= 2 * math.log2(len(sizes) + 1) + 2
        tried.clear()
        find_largest_fitting(sizes, fits, most)
        assert len(tried) <= 2 or not most  # a right guess needs no search


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Start separate ranks for these tests, because memory freed by other tests would extend the limit."""
    pool = RankPool()
    yield pool
    pool.close()


# The logits, 0.4 MB per sequence in several copies, need the most memory.
LARGE: dict[str, Any] = {
    "model__config": {**TINY_MODEL, "max_position_embeddings": 256},
    "data__seq_len": 256,
    "data__eval_fraction": 0,
    "train__global_batch_size": 32,
    "train__steps": 2,
    "train__warmup_steps": 0,
    "log__sample_tokens": 0,
}


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Limit this process to ``more`` bytes in addition to its present memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    has = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, hard))


def limited_leg(folder: Path, corpus: Path, settings: dict[str, Any], mebibytes: list[int]) -> int:
    """Train a launch on ranks with the given numbers of MiB during the memory trials."""
    room = mebibytes[int(os.environ["RANK"])] * MIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_trial, "has_host_memory_limit", lambda: True)
        patch.setattr(memory_trial, "limit_host_memory", lambda: memory_limit(room))
        return free_leg(folder, corpus, settings)


def free_leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    # Unused memory is returned to the system, so that the limit is effective.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 4) == 1
    return run_rank("cpu", configured(folder, corpus, **{**LARGE, **settings}))


def micro_batch(folder: Path) -> int:
    size = load_config(folder / "config.yaml").train.micro_batch_size
    assert size != "auto"
    return size


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(1, {}), (2, {"strategy": "full_shard", "context_parallel_size": 2}), (2, {"strategy": "zero3"})],
)
def test_auto_micro_batch_run_equals_run_with_its_size(
    world_size: int, settings: dict[str, Any], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    room = [500] * (world_size - 1) + [52 // world_size + 3]  # the last rank has the least
    if settings.get("strategy", "").startswith("zero"):
        pytest.importorskip("deepspeed")
        room = [5000, 5000]  # DeepSpeed allocates its buckets before it gets the model
    auto, named = tmp_path / "auto", tmp_path / "named"
    wanted = settings | {"train__micro_batch_size": "auto"}
    assert ranks.run(world_size, limited_leg, auto, corpus, wanted, room) == 0
    found = micro_batch(auto)
    share = 32 * settings.get("context_parallel_size", 1) // world_size
    assert 1 < found <= share // (2 if room[-1] < 500 else 1)
    assert ranks.run(world_size, free_leg, named, corpus, settings | {"train__micro_batch_size": found}) == 0
    assert losses(auto) == losses(named)
    assert weights(auto) == weights(named)


def test_resumed_run_keeps_auto_micro_batch_size(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    auto = {"train__micro_batch_size": "auto"}
    assert ranks.run(1, limited_leg, tmp_path, corpus, auto | {"train__stop_after": 1}, [60]) == 0
    found = micro_batch(tmp_path)
    assert ranks.run(1, limited_leg, tmp_path, corpus, auto, [500]) == 0
    assert micro_batch(tmp_path) == found


def refusal(folder: Path, corpus: Path, settings: dict[str, Any], mebibytes: list[int], after: int) -> str:
    """Return the error of a launch whose device runs out of memory after ``after`` micro-batches.

    The error is injected in the form of torch.cuda, because there is no GPU whose memory could run out. The
    trials that follow have a real limit.
    """
    from portable.engines.fsdp.engine import TorchEngine

    taken = 0
    accumulate = TorchEngine.accumulate_gradients
    tries = memory_trial.run_memory_trial

    def out_of_memory(self: TorchEngine, *arguments: Any, **keywords: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return accumulate(self, *arguments, **keywords)

    def fits(*arguments: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TorchEngine, "accumulate_gradients", accumulate)
            return tries(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "accumulate_gradients", out_of_memory)
        patch.setattr(memory_trial, "run_memory_trial", fits)
        with pytest.raises(UserError) as refused:
            limited_leg(folder, corpus, settings, mebibytes)
    return str(refused.value)


def test_out_of_memory_at_start_suggests_micro_batch_size(
    tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    told = ranks.run(2, refusal_of_a_gpu, tmp_path, corpus)
    start = "train.micro_batch_size: out of memory in step 1 with micro-batches of 16 sequences; "
    assert told.startswith(start)
    size, _, remedies = told.removeprefix(f"{start}set train.micro_batch_size to ").partition(
        ", which fits, or "
    )
    assert 1 < int(size) < 16
    assert remedies.startswith("use memory.activation_checkpointing full, strategy full_shard")
    assert "train.micro_batch_size" in told.split("by the plan, this fits: ")[1]


def refusal_of_a_gpu(folder: Path, corpus: Path) -> str:
    """Like :func:`refusal`, with a driver that reports a small GPU, because a CPU has no driver."""
    settings = {"strategy": "no_shard", "train__micro_batch_size": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "KEPT_FOR_COLLECTIVES", 0)
        patch.setattr(Diagnostics, "query_driver_memory", lambda _: DriverMemory(0, 12 * MIB))
        return refusal(folder, corpus, settings, [30, 30], 0)


def test_out_of_memory_later_names_last_checkpoint(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    settings = {
        "train__micro_batch_size": 1,
        "train__global_batch_size": 1,
        "checkpoint__every_steps": 1,
        "checkpoint__async": False,
        "memory__activation_checkpointing": "full",
    }
    told = ranks.run(1, refusal, tmp_path, corpus, settings, [500], 1)
    assert "out of memory in step 2 with micro-batches of 1 sequence; no smaller micro-batch is known" in told
    assert "activation_checkpointing" not in told
    assert told.endswith("last good checkpoint: " + str(tmp_path / "checkpoints" / "step-000001"))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
    ids=lambda value: value if isinstance(value, bool) else f"{type(value).__name__}",
)
def test_is_out_of_memory_recognizes_errors(error: Exception, full: bool) -> None:
    """Kernels, pinned memory and libraries use the driver directly, without torch's allocator."""
    assert memory_trial.is_out_of_memory(error) is full
