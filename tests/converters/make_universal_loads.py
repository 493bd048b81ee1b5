"""A universal checkpoint of this project's, loaded by real DeepSpeed engines of every stage.

`source/` holds what FSDP2 trained on two ranks for two steps, with two groups. It is converted into
`universal/`, which DeepSpeed loads on three ranks. `zero<n>.pt` holds the masters and moments that each stage
then has, and `zero<n>.next.pt` the weights a step later. `next.pt` holds those of torch, which goes on.
"""

from __future__ import annotations

from typing import Any

import torch

from converters import open_checkpoint, write_checkpoint
from tests.converters.make_dcp import launch
from tests.converters.make_deepspeed import gather, prepare, start
from tests.converters.make_ranks import Stack, save

from gpu.zero.runtime import import_deepspeed  # isort: skip

from pathlib import Path

deepspeed = import_deepspeed("cpu")
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [value for value in model.parameters() if value.ndim > 1]},
        {
            "params": [value for value in model.parameters() if value.ndim == 1],
            "weight_decay": 0.0,
            "lr": 3e-3,
        },
    ]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(torch.arange(step, step + 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def source(rank: int, world: int, out: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = Stack()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), **SETTINGS)  # type: ignore[arg-type]
    for step in range(2):
        train(model, optimizer, step)
    save(out, "source", model, optimizer)
    train(model, optimizer, 2)
    weights = {name: value.full_tensor() for name, value in model.named_parameters()}
    if rank == 0:
        torch.save(weights, out / "next.pt")


def load(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    for stage in (1, 2, 3):
        torch.manual_seed(stage)  # other weights than those that it will load
        model = Stack()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "checkpoint": {"load_universal": True},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        path, _ = engine.load_checkpoint(str(out / "universal"))
        assert path is not None and engine.global_steps == 2
        held = gather(engine, stage)
        if rank == 0:
            torch.save(held, out / f"zero{stage}.pt")
        engine.backward(engine(torch.arange(2, 6)))
        engine.step()
        after = gather(engine, stage)["model"]
        if rank == 0:
            torch.save(after, out / f"zero{stage}.next.pt")
        engine.destroy()


def main(out: Path) -> None:
    """Write everything under `out`."""
    prepare()
    launch(2, out, source)
    checkpoint = open_checkpoint(out / "source")
    write_checkpoint(checkpoint, out / "universal", "deepspeed-universal", optimizer=True, verify=True)
    launch(3, out, load)
