"""Write a DeepSpeed checkpoint with masters and moments in swap files, as `make_deepspeed.py` does others.

DeepSpeed's asynchronous I/O has to be there: it is C++ that takes minutes to compile.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.converters.make_dcp import launch
from tests.converters.make_deepspeed import Odd, prepare, start, train


class Bulky(Odd):
    """DeepSpeed takes sub-groups of 1 MiB a rank and more to NVMe, and keeps the smaller ones."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = nn.Linear(1, 600_001, bias=False)
        self.more = nn.Linear(6, 100_003)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        wide: torch.Tensor = self.bulk(self.narrow(hidden)).float().mean() + self.more(hidden).float().mean()
        return wide + super().forward(tokens)


def on_nvme(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    swap = {"device": "nvme", "nvme_path": str(out / "nvme"), "buffer_count": 4, "pin_memory": False}
    train(
        out,
        "nvme-2",
        3,
        "bf16",
        split=True,
        model=Bulky(),
        zero_optimization={"offload_optimizer": swap, "sub_group_size": 650_000},
        zero_force_ds_cpu_optimizer=False,
    )


def main(out: Path) -> None:
    """Write everything under `out`."""
    prepare()
    launch(2, out, on_nvme)
