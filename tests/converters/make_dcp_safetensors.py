"""Write DCP's sharded safetensors with torch's own `HuggingFaceStorageWriter`, consolidated and not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.converters.make_dcp import grid_tensors, launch, reference, trained


def three_ranks(rank: int, world: int, out: Path) -> None:
    model, optimizer = trained(world, "fsdp")
    ref = reference(model, optimizer)
    state: dict[str, Any] = get_model_state_dict(model)
    state = {name: value for name, value in state.items() if name != "lm_head.weight"}
    moments = {
        f"optim.state.{name}.exp_avg": optimizer.state[value]["exp_avg"]
        for name, value in model.named_parameters()
    }
    # torch's consolidation takes no integers.
    floats = {name: value for name, value in state.items() if value.is_floating_point()}
    two = {name: 1 + at % 2 for at, name in enumerate(state)}
    for name, more, held in (
        ("sharded", {}, state),
        ("two-files", {"fqn_to_index_mapping": two}, state),
        ("consolidated", {"enable_consolidation": True}, floats),
        ("with-moments", {}, {**state, **moments}),
    ):
        writer = HuggingFaceStorageWriter(str(out / name), save_distributed=True, **more)
        dcp_save(held, storage_writer=writer)
    if rank == 0:
        torch.save(ref, out / "ref.pt")


def grid(rank: int, world: int, out: Path) -> None:
    whole, state = grid_tensors()
    dcp_save(state, storage_writer=HuggingFaceStorageWriter(str(out / "grid"), save_distributed=True))
    if dist.get_rank() == 0:
        torch.save({"model": whole}, out / "grid.ref.pt")


def main(out: Path) -> None:
    """Write everything under `out`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained(1, "plain")
    launch(3, out, three_ranks)
    launch(4, out, grid)
