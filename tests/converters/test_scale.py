"""Many rank files and tensors, with next to nothing in each: the work grows with their number."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from converters import open_checkpoint, write_safetensors


def dcp(folder: Path, files: int, tensors: int) -> bytes:
    """A file for each tensor; the bytes of the last."""
    state = {f"layers.{i}.weight": torch.arange(16.0) + i for i in range(tensors)}
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    dcp_save({"model": state}, storage_writer=writer, no_dist=True)
    assert len(list(folder.iterdir())) == files
    return state[f"layers.{tensors - 1}.weight"].numpy().tobytes()


def zero3(folder: Path, ranks: int, tensors: int) -> bytes:
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
    return (torch.arange(ranks) + (tensors - 1) * 0.5).numpy().tobytes()


def convert(source: Path, out: Path) -> None:
    write_safetensors(open_checkpoint(source), out, progress=False)


def functions_called(body: Callable[[], None]) -> int:
    """How many calls of Python and C functions ``body`` makes, on all threads."""
    called = Counter[str]()

    def count(_frame: object, event: str, _function: object) -> None:
        called[event] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        body()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return called["call"] + called["c_call"]


# The maker, and two numbers of (files, tensors).
GROWING = {"dcp": (dcp, (101, 100), (401, 400)), "zero3": (zero3, (8, 50), (32, 50))}


@pytest.mark.parametrize("kind", GROWING)
def test_work_grows_linearly(tmp_path: Path, kind: str) -> None:
    """Convert two sizes, the second four times the first, and compare the calls of functions.

    Calls rather than seconds, which on a busy machine say more about its other jobs.
    """
    make, *sizes = GROWING[kind]
    counted = []
    for files, tensors in sizes:
        source, out = tmp_path / f"in{files}", tmp_path / f"out{files}"
        source.mkdir()
        last = make(source, files, tensors)
        counted.append(functions_called(partial(convert, source, out)))
        values = open_checkpoint(out).tensors[f"layers.{tensors - 1}.weight"].read()
        assert values.tobytes() == last
    assert counted[1] <= 4.5 * counted[0]  # 16 times as many where the work is quadratic
