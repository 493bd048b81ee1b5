"""Write checkpoints with Accelerate on real FSDP1 and FSDP2 ranks, and DCP checkpoints without collectives.

The Trainer calls the same two functions under FSDP. Without an accelerator, neither enables FSDP, so the
model is wrapped here. Nested units of FSDP1 crash Accelerate on CPU.
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
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.converters.make_dcp import keep, stepped, trained
from tests.converters.make_ranks import Stack


def save_with_accelerate(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, version: int, kind: str, **more: Any
) -> None:
    """Save as `Accelerator.save_state` and the Trainer do.

    No other attributes of the accelerator are used.
    """
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    accelerator: Any = SimpleNamespace(
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        wait_for_everyone=dist.barrier,
        is_main_process=not dist.get_rank(),
    )
    save_fsdp_model(plugin, accelerator, model, str(folder), **more)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    dist.barrier()


def accelerate(out: Path) -> None:
    """Save FSDP1 and FSDP2 models, sharded and full."""
    dist.init_process_group("gloo")
    PartialState(cpu=True)  # required by Accelerate's logger
    first = FullyShardedDataParallel(Stack(), device_id=torch.device("cpu"), use_orig_params=True)
    # torch 2.9 crashes on FSDP1's full state dict without CUDA.
    save_with_accelerate(out / "fsdp1-sharded", first, stepped(first), 1, "SHARDED_STATE_DICT")
    model, optimizer = trained(dist.get_world_size(), "fsdp")
    for kind in ("sharded", "full"):
        folder = out / f"fsdp2-{kind}"
        save_with_accelerate(folder, model, optimizer, 2, f"{kind.upper()}_STATE_DICT")
        save_reference(model, optimizer, folder)


def save_reference(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Save the gathered live values next to `folder`."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        reference = {"model": weights, "optim": state["state"], "groups": state["param_groups"]}
        keep(folder.parent, f"{folder.name}.ref", reference)


def alone(out: Path) -> None:
    """Save on every rank without collectives, so that each writes a `.metadata` file."""
    dist.init_process_group("gloo")
    model, optimizer = trained(dist.get_world_size(), "fsdp")
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp_save({"model": weights, "optim": state}, checkpoint_id=out / "alone", use_collectives=False)
    save_reference(model, optimizer, out / "alone")
