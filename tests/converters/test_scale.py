"""Thousands of rank files, tens of thousands of tensors: the work grows with their number, and no faster.

The files are as real ones lie on disk, with next to nothing in each tensor. What is held against the number
of pieces are counts of system and function calls, and memory; never seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import tracemalloc
import zlib
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from converters import Tensor, open_checkpoint, write_safetensors
from converters.storage.bytes import Memory
from converters.writers.conversion import Entry, Trailer
from converters.writers.torchzip_writer import Call, Made, Name, pickle, saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CALLS = ("open", "stat", "preadv", "pwrite", "copy_file_range", "fsync")
FUNCTIONS = "functions"
ROWS, WIDTH, CUTS = 2, 8, 2
Written = tuple[int, bytes]  # how many pieces a checkpoint has, and the bytes of its last tensor
CHECKPOINT = "torch.distributed.checkpoint"


def dcp(folder: Path, files: int, tensors: int) -> Written:
    """Each tensor is cut along its rows and dealt out to the rank files, as FSDP2 does."""
    shape = (ROWS, WIDTH)
    data = bytes(range(ROWS * WIDTH * 4))
    parts = saved(Entry("piece", "F32", Tensor.contiguous("piece", "F32", shape, Memory(data))))
    crc = zlib.crc32(data)
    piece = b"".join(
        part if isinstance(part, bytes) else part.make(crc) if isinstance(part, Trailer) else data
        for part in parts
    )
    names = [f"__{rank}_0.distcp" for rank in range(files)]
    filled = Counter[str]()
    described: dict[str, Any] = {}
    stored: dict[Made, Made] = {}
    properties = (Name("torch", "float32"), None, False, None, False)
    for i in range(tensors):
        key = f"model.layers.{i}.weight"
        chunks = []
        for cut in range(CUTS):
            name = names[(i * CUTS + cut) % files]
            offsets = Call(Name("torch", "Size"), ((cut * ROWS, 0),))
            sizes = Call(Name("torch", "Size"), (shape,))
            chunks.append(made("metadata", "ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes}))
            index = made("metadata", "MetadataIndex", {"fqn": key, "index": cut, "offset": offsets})
            place = {"relative_path": name, "offset": filled[name] * len(piece), "length": len(piece)}
            stored[index] = made("filesystem", "_StorageInfo", place)
            filled[name] += 1
        fields = {
            "properties": made("metadata", "TensorProperties", properties),
            "size": Call(Name("torch", "Size"), ((ROWS * CUTS, WIDTH),)),
            "chunks": chunks,
        }
        described[key] = made("metadata", "TensorStorageMetadata", fields)
    for name in names:
        (folder / name).write_bytes(piece * filled[name])
    paths = {key: ("model", key.removeprefix("model.")) for key in described}
    tables = {"state_dict_metadata": described, "planner_data": paths, "storage_data": stored}
    (folder / ".metadata").write_bytes(pickle(made("metadata", "Metadata", tables)))
    return tensors * CUTS, data * CUTS


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


def xla(folder: Path, ranks: int, tensors: int) -> Written:
    """Every rank has its part of every tensor, one element here, in a storage of its own."""
    names = {
        f"_fsdp_shard_FSDP_SHARD_SEPARATOR_layers_FSDP_SHARD_SEPARATOR_{i}_FSDP_SHARD_SEPARATOR_weight": (
            f"layers.{i}.weight"
        )
        for i in range(tensors)
    }
    described = {key: {"_orig_name": name, "_orig_size": [ranks]} for key, name in names.items()}
    for rank in range(ranks):
        metadata = {
            "shard_info": {"": described},
            "flatten_info": {},
            "buffer_info": {},
            "world_size": ranks,
            "rank": rank,
        }
        model = {key: torch.tensor([i * 0.5 + rank]) for i, key in enumerate(names)}
        path = folder / f"rank{rank}-of-{ranks}-pytorch_model.bin"
        torch.save({"model": model, "shard_metadata": metadata}, path)
    return ranks * tensors, (torch.arange(ranks) + (tensors - 1) * 0.5).numpy().tobytes()


def made(module: str, name: str, state: Any) -> Made:
    return Made(Name(f"{CHECKPOINT}.{module}", name), state)


def shards(folder: Path, files: int, tensors: int) -> None:
    """Numbered safetensors shards with an index; sparse, 1 MB a tensor."""
    nbytes = 1 << 20
    places: dict[str, str] = {}
    for file in range(files):
        name = f"model-{file + 1:05d}-of-{files:05d}.safetensors"
        keys = [f"layers.{i}.weight" for i in range(file, tensors, files)]
        header = {
            key: {
                "dtype": "F32",
                "shape": [512, 512],
                "data_offsets": [at * nbytes, (at + 1) * nbytes],
            }
            for at, key in enumerate(keys)
        }
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + len(keys) * nbytes)
        places |= dict.fromkeys(keys, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each system call that touches files has been made."""
    counted = Counter[str]()

    def count(name: str) -> None:
        real = getattr(os, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, counting)

    for name in CALLS:
        count(name)
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
    "xla": (xla, (32, 50), (128, 50), 4),
}
THOUSANDS = {
    "dcp": (dcp, (1000, 10_000), (4000, 40_000), 8),
    "zero3": (zero3, (512, 200), (2048, 200), 4),
    "xla": (xla, (512, 200), (2048, 200), 4),
}


@pytest.mark.parametrize("kind", GROWING)
def test_work_grows_linearly(tmp_path: Path, calls: Counter[str], kind: str) -> None:
    grows_linearly(tmp_path, calls, *GROWING[kind], functions=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", THOUSANDS)
def test_thousands_of_ranks(tmp_path: Path, calls: Counter[str], kind: str) -> None:
    grows_linearly(tmp_path, calls, *THOUSANDS[kind])


def grows_linearly(
    folder: Path,
    calls: Counter[str],
    make: Callable[[Path, int, int], Written],
    small: tuple[int, int],
    large: tuple[int, int],
    per_piece: int,
    functions: bool = False,
) -> None:
    """Convert two sizes, the second four times the first, and compare the calls made to the system.

    And with ``functions`` those of functions, the counting of which takes several times as long.

    Calls rather than seconds, which on a busy machine say more about its other jobs.
    """
    counted = []
    for files, tensors in (small, large):
        source, out = folder / f"in{files}", folder / f"out{files}"
        source.mkdir()
        pieces, last = make(source, files, tensors)
        calls.clear()
        start = time.process_time()
        with functions_counted(calls) if functions else nullcontext():
            checkpoint = open_checkpoint(source)
            assert len(checkpoint.tensors) == tensors
            planned = time.process_time()
            write_safetensors(checkpoint, out, progress=False)
        ended = time.process_time()
        counted.append(calls.copy())
        system_calls = sum(calls[name] for name in CALLS)
        print(
            f"{files} files, {tensors} tensors, {pieces} pieces: {planned - start:.2f} s to open, "
            f"{ended - planned:.2f} s to write, {system_calls / pieces:.1f} system calls and "
            f"{calls[FUNCTIONS] / pieces:.0f} functions counted a piece"
        )
        assert system_calls < per_piece * pieces
        assert calls["fsync"] < 10
        values = open_checkpoint(out).tensors[f"layers.{tensors - 1}.weight"].read()
        assert values.tobytes() == last
    for name in (*CALLS, FUNCTIONS):  # 4 times as many where the work is linear, 16 where it is quadratic
        assert counted[1][name] <= 4.5 * counted[0][name] + 10, name


def test_shards_are_planned_in_linear_time(tmp_path: Path, calls: Counter[str]) -> None:
    """A sparse 8 GB, planned without touching the tensors' bytes."""
    for times in (1, 4):
        folder = tmp_path / str(times)
        folder.mkdir()
        shards(folder, 250 * times, 2000 * times)
        calls.clear()
        assert len(open_checkpoint(folder).tensors) == 2000 * times
        assert calls["open"] <= 250 * times + 10
        assert calls["preadv"] <= 2 * 250 * times + 10


@pytest.mark.parametrize(
    ("make", "files", "tensors", "planning", "converting"),
    [(dcp, 50, 1000, 1500, 4200), (zero3, 32, 100, 500, 1000), (xla, 32, 100, 2000, 3000)],
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
    print(f"{make.__name__}: {planned:.0f} bytes a piece planned, {peak:.0f} at the peak")
    assert planned < planning
    assert peak < converting
