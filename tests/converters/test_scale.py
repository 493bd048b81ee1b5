"""Many files and tensors with almost no content: the work grows with their number."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from portable.converters import open_checkpoint, write_safetensors


def dcp(folder: Path, tensors: int) -> bytes:
    """Write one file per tensor. Returns the bytes of the last tensor."""
    state = {f"layers.{i}.weight": torch.arange(16.0) + i for i in range(tensors)}
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    dcp_save({"model": state}, storage_writer=writer, no_dist=True)
    assert len(list(folder.iterdir())) == tensors + 1
    return state[f"layers.{tensors - 1}.weight"].numpy().tobytes()


def convert(source: Path, out: Path) -> None:
    write_safetensors(open_checkpoint(source), out, progress=False)


def functions_called(body: Callable[[], None]) -> int:
    """Count the calls of Python and C functions in ``body``, on all threads."""
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


def test_convert_work_grows_linearly(tmp_path: Path) -> None:
    """Convert two sizes, the second four times the first, and compare the numbers of function calls.

    Calls are counted instead of seconds, because the time on a busy machine depends on its other jobs.
    """
    counted = []
    for tensors in (100, 400):
        source, out = tmp_path / f"in{tensors}", tmp_path / f"out{tensors}"
        last = dcp(source, tensors)
        counted.append(functions_called(partial(convert, source, out)))
        values = open_checkpoint(out).tensors[f"layers.{tensors - 1}.weight"].read()
        assert values.tobytes() == last
    assert counted[1] <= 4.5 * counted[0]  # 16 times the calls if the work is quadratic
