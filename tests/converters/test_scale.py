"""Thousands of rank files, tens of thousands of tensors: the work grows with their number, and no faster.

The files are as real ones lie on disk, with next to nothing in each tensor. What is held against the number
of pieces are counts of system and function calls, and memory; never seconds.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from converters import open_checkpoint, write_safetensors

CALLS = ("open", "stat", "preadv", "pwrite", "copy_file_range", "fsync")
FUNCTIONS = "functions"
ROWS, WIDTH, CUTS = 2, 8, 2
Written = tuple[int, bytes]  # how many pieces a checkpoint has, and the bytes of its last tensor


def dcp(folder: Path, files: int, tensors: int) -> Written:
    """Each tensor is cut along its rows and dealt out to the rank files, as FSDP2 does."""
    values = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
    torch.save(values, stream := BytesIO())
    piece, filled = stream.getvalue(), Counter[str]()
    properties, size = TensorProperties(), torch.Size((ROWS * CUTS, WIDTH))
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for i in range(tensors):
        chunks = []
        for cut in range(CUTS):
            name, offsets = f"__{(i * CUTS + cut) % files}_0.distcp", torch.Size((cut * ROWS, 0))
            chunks.append(ChunkStorageMetadata(offsets, values.shape))
            index = MetadataIndex(f"model.layers.{i}.weight", offsets, cut)
            stored[index] = _StorageInfo(name, filled[name] * len(piece), len(piece))
            filled[name] += 1
        described[index.fqn] = TensorStorageMetadata(properties, size, chunks)
    for name, count in filled.items():
        (folder / name).write_bytes(piece * count)
    paths: Any = {key: tuple(key.split(".", 1)) for key in described}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, paths, stored)))
    return tensors * CUTS, values.numpy().tobytes() * CUTS


def zero3(folder: Path, ranks: int, tensors: int) -> Written:
    """Every rank has its part of every tensor, one element here, in one flat run; tables of all names."""
    shapes = {f"layers.{i}.weight": torch.Size((ranks,)) for i in range(tensors)}
    common = {"ds_version": "0.19.8", "ds_config": {"zero_optimization": {"stage": 3}}}
    model = {
        "module": {name: torch.empty(0) for name in shapes},
        "buffer_names": [],
        "param_shapes": [shapes],
        "dp_world_size": ranks,
        "global_steps": 2,
        **common,
    }
    for rank in range(ranks):
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        masters = torch.arange(tensors) * 0.5 + rank
        moments = {what: masters.clone() for what in ("exp_avg", "exp_avg_sq")}
        group = {"lr": 0.1, "params": [0]}
        state = {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": [masters],
            "optimizer_state_dict": {
                "state": {0: {"step": torch.tensor(2.0), **moments}},
                "param_groups": [group],
            },
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, **common}, path)
    return ranks * tensors, (torch.arange(ranks) + (tensors - 1) * 0.5).numpy().tobytes()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each system call that touches files has been made."""
    counted = Counter[str]()

    def counting(name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counted[name] += 1
        return real(*args, **kwargs)

    for name in CALLS:
        monkeypatch.setattr(os, name, partial(counting, name, getattr(os, name)))
    return counted


@contextmanager
def functions_counted(calls: Counter[str]) -> Iterator[None]:
    """Count every call of a Python or C function, on all threads, as ``FUNCTIONS``."""

    def count(_frame: object, event: str, _function: object) -> None:
        if event in ("call", "c_call"):
            calls[FUNCTIONS] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


# The maker, two numbers of (files, tensors), and the system calls that a piece may take.
GROWING = {
    "dcp": (dcp, (80, 400), (320, 1600), 8),
    "zero3": (zero3, (32, 50), (128, 50), 4),
}


@pytest.mark.parametrize("kind", GROWING)
def test_work_grows_linearly(tmp_path: Path, calls: Counter[str], kind: str) -> None:
    """Convert two sizes, the second four times the first, and compare the calls of functions and the system.

    Calls rather than seconds, which on a busy machine say more about its other jobs.
    """
    make, small, large, per_piece = GROWING[kind]
    counted = []
    for files, tensors in (small, large):
        source, out = tmp_path / f"in{files}", tmp_path / f"out{files}"
        source.mkdir()
        pieces, last = make(source, files, tensors)
        calls.clear()
        with functions_counted(calls):
            checkpoint = open_checkpoint(source)
            assert len(checkpoint.tensors) == tensors
            write_safetensors(checkpoint, out, progress=False)
        counted.append(calls.copy())
        assert sum(calls[name] for name in CALLS) < per_piece * pieces
        assert calls["fsync"] < 10
        values = open_checkpoint(out).tensors[f"layers.{tensors - 1}.weight"].read()
        assert values.tobytes() == last
    for name in (*CALLS, FUNCTIONS):  # 4 times as many where the work is linear, 16 where it is quadratic
        assert counted[1][name] <= 4.5 * counted[0][name] + 10, name


@pytest.mark.parametrize(
    ("make", "files", "tensors", "planning", "converting"),
    [(dcp, 50, 1000, 1500, 4200), (zero3, 32, 100, 500, 1000)],
)
def test_memory_of_a_piece(
    tmp_path: Path,
    make: Callable[[Path, int, int], Written],
    files: int,
    tensors: int,
    planning: int,
    converting: int,
) -> None:
    """What planning and converting keep for each piece, whatever its size."""
    source = tmp_path / "in"
    source.mkdir()
    pieces, _ = make(source, files, tensors)
    open_checkpoint(source)  # what is imported and cached once
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(source)
        assert len(checkpoint.tensors) == tensors
        planned = tracemalloc.get_traced_memory()[0] / pieces
        write_safetensors(checkpoint, tmp_path / "out", progress=False)
        peak = tracemalloc.get_traced_memory()[1] / pieces
    finally:
        tracemalloc.stop()
    assert planned < planning
    assert peak < converting
