"""NCCL's record of its collectives goes where the stacks of a hang do.

NCCL needs GPUs, and several for a collective worth recording: what dumps its record is a stand-in here, and
the backend is made without the GPU that it asks for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest
import torch

from portable.engines.backend import TorchBackend
from portable.engines.package import TorchPackage
from portable.private import of_torch
from portable.ranks.watchdog import Watchdog
from portable.registry import backend_package


def made(name: str, world_size: int) -> TorchBackend:
    backend = object.__new__(TorchBackend)
    backend.name, backend.rank, backend.world_size = name, 1, world_size
    backend.device = torch.device(name)
    backend._package = package = cast("TorchPackage", backend_package(name))
    backend.diagnostics = package.diagnostics(backend.device, 1, world_size)
    return backend


def test_a_hang_dumps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_torch, "dump_nccl_trace", lambda: b"a pickle")
    ended: list[int] = []
    monkeypatch.setattr("portable.ranks.watchdog.os._exit", ended.append)
    monkeypatch.setattr("portable.ranks.watchdog.GRACE", 0)
    told: list[str] = []
    for name in ("cuda", "cpu"):
        backend = made(name, 2)
        watchdog = Watchdog(
            rank=1,
            seconds=1,
            folder=tmp_path / name,
            report=told.append,
            record=backend.diagnostics.dump_collectives,
        )
        watchdog._exit(1.0)
    assert ended == [1, 1]
    assert len(told) == 2
    assert (tmp_path / "cuda" / "nccl_trace_rank_1").read_bytes() == b"a pickle"
    assert sorted(path.name for path in (tmp_path / "cuda").iterdir()) == ["nccl_trace_rank_1", "rank-1.txt"]
    assert [path.name for path in (tmp_path / "cpu").iterdir()] == ["rank-1.txt"]


def test_it_records_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    made("cuda", 1).start()
    kept = os.environ.pop("TORCH_FR_BUFFER_SIZE")
    assert (kept, os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]) == ("2000", "7")
    made("cpu", 1).start()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


def test_torch_has_what_dumps_it() -> None:
    from torch._C import _distributed_c10d

    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    assert callable(_distributed_c10d._dump_nccl_trace)  # type: ignore[attr-defined]
