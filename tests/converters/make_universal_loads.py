"""Load a universal checkpoint of this project into real DeepSpeed engines of every stage.

`source/` is a checkpoint of two steps with FSDP2 on two ranks, with two groups. It is converted into
`universal/`, which DeepSpeed loads on three ranks. `zero<n>.pt` has the masters and moments of each stage
after loading, and `zero<n>.next.pt` the weights one step later. `next.pt` has the weights of the continued
torch run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from portable.converters import open_checkpoint, write_checkpoint
from tests.converters.make_dcp import keep, launch, stepped
from tests.converters.make_deepspeed import deepspeed, gather, groups_of, prepare, start
from tests.converters.make_ranks import Stack, save


def source(rank: int, world: int, out: Path) -> None:
    torch.manual_seed(0)
    model: Any = Stack()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model, split=True), lr=1e-2, betas=(0.8, 0.95))
    save(out, "source", model, stepped(model, optimizer))
    stepped(model, optimizer, [2])
    keep(out, "next", {name: value.full_tensor() for name, value in model.named_parameters()})


def load(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    for stage in (1, 2, 3):
        torch.manual_seed(stage)  # different weights, which the load must replace
        model = Stack()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "checkpoint": {"load_universal": True},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(groups_of(model, split=True), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        path, _ = engine.load_checkpoint(str(out / "universal"))
        assert path is not None and engine.global_steps == 2
        keep(out, f"zero{stage}", gather(engine, stage))
        engine.backward(engine(torch.arange(2, 6)))
        engine.step()
        keep(out, f"zero{stage}.next", gather(engine, stage)["model"])
        engine.destroy()


def main(out: Path) -> None:
    """Write all files under `out`."""
    prepare()
    launch(2, out, source)
    checkpoint = open_checkpoint(out / "source")
    write_checkpoint(checkpoint, out / "universal", "deepspeed-universal", optimizer=True, verify=True)
    launch(3, out, load)
