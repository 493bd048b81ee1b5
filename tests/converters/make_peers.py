"""Accelerate's own functions on real FSDP1 and FSDP2 ranks, and DCP without collectives.

Functions for the pool of ranks (`tests/ranks.py`). Each folder lies beside `<name>.ref.pt`, as `make_dcp.py`
has it. The Trainer calls the same two functions under FSDP; it does not turn FSDP on without an accelerator,
and Accelerate's own wrapping does not either, so the model is wrapped by hand here.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.converters.make_dcp import Odd, trained


class Single(Odd):
    """In one type, since FSDP1 flattens a unit's parameters into one tensor; nested units crash it on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = nn.Linear(13, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        loss: torch.Tensor = self.brain(self.wide(self.narrow(hidden))).sum()
        head: torch.Tensor = self.lm_head(hidden).square().sum()
        return loss + head


def wrapped(version: int) -> nn.Module:
    torch.manual_seed(0)
    if version == 1:
        return FullyShardedDataParallel(Single(), device_id=torch.device("cpu"), use_orig_params=True)
    model: Any = Odd()
    fully_shard(model.brain)
    fully_shard(model)
    return model  # type: ignore[no-any-return]


def accelerate(out: Path) -> None:
    """FSDP1 and FSDP2, sharded and full, as `Accelerator.save_state` and the Trainer write them."""
    dist.init_process_group("gloo")
    PartialState(cpu=True)  # Accelerate's logger asks for it
    rank, world = dist.get_rank(), dist.get_world_size()
    for version in (1, 2):
        model = wrapped(version)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))
        for step in range(2):
            model(torch.arange(step, step + 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        # torch 2.9 crashes on FSDP1's full state dict without CUDA.
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT")[:version]:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
            accelerator = SimpleNamespace(
                num_processes=world,
                process_index=rank,
                wait_for_everyone=dist.barrier,
                is_main_process=not rank,
            )
            folder = out / f"fsdp{version}-{kind.partition('_')[0].lower()}"
            save_fsdp_model(plugin, accelerator, model, str(folder))
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
            if version == 2:
                save_reference(model, optimizer, folder)
            dist.barrier()


def save_reference(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """The live values, gathered, beside `folder`."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        reference = {"model": weights, "optim": state["state"], "groups": state["param_groups"]}
        torch.save(reference, f"{folder}.ref.pt")


def alone(out: Path) -> None:
    """Every rank for itself: no collectives, so a `.metadata` from each."""
    dist.init_process_group("gloo")
    model, optimizer = trained(dist.get_world_size(), "fsdp")
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp_save({"model": weights, "optim": state}, checkpoint_id=out / "alone", use_collectives=False)
    save_reference(model, optimizer, out / "alone")
