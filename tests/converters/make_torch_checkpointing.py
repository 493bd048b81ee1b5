"""Write checkpoints with `torch_checkpointing` (of torchtitan), under real FSDP2 and tensor parallelism.

`<name>.ref.pt` is next to each folder, as `make_dcp.py` gathers it from the live run. The library gathers
its metadata through CUDA tensors, which is replaced here by the same collective on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    SafetensorsSerialization,
)
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tests.converters.make_dcp import keep, launch, prepare, reference, stepped, trained
from tests.converters.make_ranks import build_with_tensor_parallel


def _gather_objects(data: Any, process_group: Any = None, **_: Any) -> dict[int, Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, data, group=process_group)
    return dict(enumerate(values))


def save(out: Path, name: str, state: dict[str, Any], layouts: dict[str, LayoutInfo]) -> None:
    """Save the items of `state`, all but `step` with the metadata of resharding."""
    gather = "_all_gather_pickled_data"
    setattr(DefaultMetadataManager, gather, lambda self, *args, **options: _gather_objects(*args, **options))
    items = {
        key: ItemSpec(layout=layouts.get(key), resharder=DefaultResharder() if key != "step" else None)
        for key in state
    }
    manager = CheckpointManager(
        CheckpointManager.Config(
            items=items,
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    manager.save(str(out / name), state)


def write(out: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a folder of `torch.save` files, and a folder with the model in safetensors files."""
    ref = reference(model, optimizer)
    weights: dict[str, Any] = dict(get_model_state_dict(model))
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "step": 2}
    save(out, name, state, {})
    keep(out, f"{name}.ref", ref)
    weights.pop("lm_head.weight", None)  # safetensors takes no tied tensors
    layouts = {
        "model": LayoutInfo("weights/model_{rank}.safetensors", SafetensorsSerialization()),
        "step": LayoutInfo("step_{rank}.json", JsonSerialization()),
    }
    save(out, f"{name}-safetensors", state, layouts)
    keep(out, f"{name}-safetensors.ref", {**ref, "model": {key: ref["model"][key] for key in weights}})


def fsdp2(rank: int, world: int, out: Path) -> None:
    write(out, f"fsdp2-{world}", *trained(world, "fsdp"))


def with_tensor_parallel(rank: int, world: int, out: Path) -> None:
    model = build_with_tensor_parallel()
    write(out, "tensor-parallel-4", model, stepped(model))


def main(out: Path) -> None:
    """Write everything under `out`."""
    prepare()
    for world in (1, 3):
        launch(world, out, fsdp2)
    launch(4, out, with_tensor_parallel)
