"""Which settings a run is told to look at when the system has killed a rank for memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from portable.engines.memory_advice import advice as memory_advice
from tests.runs import configured

ON_CPU = {"memory__offload_optimizer": "cpu"}
ON_DISK = {"memory__offload_optimizer": "nvme", "memory__nvme_path": "/nvme"}
NVME = "memory.offload_optimizer nvme, with memory.nvme_path on a local disk, instead of cpu"


@pytest.mark.parametrize(
    ("settings", "told", "left_out"),
    [
        ({"strategy": "zero3", **ON_CPU}, [NVME, "train.micro_batch_size"], "zero3,"),
        (
            {"strategy": "zero2", **ON_CPU, "backend": "cuda"},
            ["strategy zero3", "memory.nvme_path", "memory.offload_optimizer none, if the GPUs"],
            "train.micro_batch_size",
        ),
        (
            {"strategy": "zero3", **ON_DISK, "backend": "cuda"},
            ["sub_group_size", "buffer_count", "deepspeed.config"],
            "instead of cpu",
        ),
        ({"strategy": "no_shard", "backend": "cuda"}, ["data.num_workers"], "offload"),
        ({"strategy": "zero3"}, ["memory.offload_optimizer and memory.offload_params nvme"], "strategy"),
    ],
)
def test_advice_fits_the_run(
    settings: dict[str, Any], told: list[str], left_out: str, tmp_path: Path, corpus: Path
) -> None:
    advice = memory_advice(configured(tmp_path, corpus, **settings))
    for words in told:
        assert words in advice
    assert left_out not in advice
