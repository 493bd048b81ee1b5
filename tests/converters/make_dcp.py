"""Write DCP checkpoints with torch itself, under real FSDP2 and DDP, and their expected values.

Ranks are forked from one process that has imported torch, so that several process groups start quickly. Each
checkpoint folder has a file `<name>.ref.pt` next to it: `{"model": ..., "optim": {name: {...}}, "groups":
...}` with full tensors.
"""

from __future__ import annotations

import gc
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def odd_buffers(module: nn.Module, dtype: torch.dtype = torch.float16) -> None:
    """Register buffers of every kind, one of which is not persistent."""
    module.register_buffer("counts", torch.tensor([1, -(1 << 62), 3]))
    module.register_buffer("tracked", torch.tensor(1 << 40))
    module.register_buffer("scale", torch.tensor(0.1))
    module.register_buffer("mask", torch.tensor([True, False, True, True, False]))
    module.register_buffer("table", torch.randn(3, 4).to(dtype))
    module.register_buffer("empty", torch.zeros(0, 4))
    module.register_buffer("scratch", torch.zeros(2), persistent=False)


class Odd(nn.Module):
    """Model with sizes that no world size divides, several types, all kinds of buffers, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 6)
        self.narrow = nn.Linear(6, 1)  # one row: empty shards on every rank but the first
        self.wide = nn.Linear(1, 13, bias=False)
        self.brain = nn.Linear(13, 5, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(6, 7, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        odd_buffers(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        out = self.brain(self.wide(self.narrow(hidden)).bfloat16()).float()
        loss: torch.Tensor = out.sum() + self.lm_head(hidden).square().sum()
        return loss


def full(value: Any) -> Any:
    """Return the full tensor, on every rank."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def trained(world: int, wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = Odd()
    if wrap == "fsdp":
        fully_shard(model.brain)  # a separate group: all tensors of a group have one dtype
        fully_shard(model)
    elif wrap == "ddp":
        model = DistributedDataParallel(model)
    return model, stepped(model)


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: Sequence[int] = (0, 1)
) -> torch.optim.Optimizer:
    """Return the optimizer after these steps on tokens. The model returns its loss."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))
    for step in steps:
        model(torch.arange(step, step + 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def reference(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights = {name: full(value) for name, value in get_model_state_dict(model).items()}
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    moments = {name: {k: full(v) for k, v in value.items()} for name, value in state["state"].items()}
    return {"model": weights, "optim": moments, "groups": state["param_groups"]}


def keep(out: Path, name: str, value: Any) -> None:
    """Save reference values of a test, from rank 0."""
    if dist.get_rank() == 0:
        torch.save(value, out / f"{name.replace('/', '+')}.pt")


def save(out: Path, name: str, state: dict[str, Any], ref: dict[str, Any]) -> None:
    dcp_save(state, checkpoint_id=out / name)
    keep(out, f"{name}.ref", ref)


def writers(rank: int, world: int, out: Path) -> None:
    """Write the same training state in the layout of each known program."""
    for kind in {1: ("plain",), 2: ("ddp", "fsdp")}.get(world, ("fsdp",)):
        model, optimizer = trained(world, kind)
        ref = reference(model, optimizer)
        weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        prefix = f"{kind}{world}"
        save(out, f"{prefix}-ours", {"model": weights, "optim": state}, ref)
        save(out, f"{prefix}-accelerate/pytorch_model_fsdp_0", {"model": weights}, ref)
        save(out, f"{prefix}-accelerate/optimizer_0", {"optimizer": state}, ref)
        flat = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        extra = {"train_state": {"step": torch.tensor(2), "loss": [1.5]}, "lr_scheduler": {"last_epoch": 2}}
        save(out, f"{prefix}-titan", {**weights, "optimizer": flat, **extra}, ref)
        save(out, f"{prefix}-lightning", {"state_dict": weights, "optimizer_0": state}, ref)
        if dist.get_rank() == 0:
            torch.save({"global_step": 2, "loops": {}}, out / f"{prefix}-lightning" / "meta.pt")
        save(out, f"{prefix}-app", {"app": {"model": weights, "optim": state}}, ref)
        save(out, f"{prefix}-bare", dict(weights), ref)
        if world == 3:
            in_safetensors(out, dict(weights), state, ref)


def in_safetensors(out: Path, weights: dict[str, Any], state: dict[str, Any], ref: dict[str, Any]) -> None:
    """Write with torch's safetensors writer.

    The writer supports no tied names, and its consolidation supports no integers.
    """
    del weights["lm_head.weight"]
    floats = {name: value for name, value in weights.items() if value.is_floating_point()}
    moments = {f"optim.state.{name}.exp_avg": held["exp_avg"] for name, held in state["state"].items()}
    two = {name: 1 + at % 2 for at, name in enumerate(weights)}
    runs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "sharded": (weights, {}),
        "two-files": (weights, {"fqn_to_index_mapping": two}),
        "consolidated": (floats, {"enable_consolidation": True}),
        "with-moments": (weights | moments, {}),
    }
    for name, (held, how) in runs.items():
        folder = out / "safetensors" / name
        dcp_save(held, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True, **how))
        model = {key: value for key, value in ref["model"].items() if key in held}
        keep(out, f"safetensors/{name}.ref", {**ref, "model": model})


def grid(rank: int, world: int, out: Path) -> None:
    """Write tensors sharded along other dimensions, as tensor parallelism and XLA SPMD do."""
    torch.manual_seed(0)
    whole = {
        "columns": torch.randn(5, 9),
        "square": torch.randn(7, 6, dtype=torch.float64),
        "cube": torch.randint(0, 1000, (3, 5, 4)),
        "long": torch.randn(11).bfloat16(),
    }
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    state: dict[str, DTensor] = {
        "columns": distribute_tensor(whole["columns"], line, [Shard(1)]),
        "square": distribute_tensor(whole["square"], plane, [Shard(0), Shard(1)]),
        "cube": distribute_tensor(whole["cube"], plane, [Shard(2), Shard(1)]),
        "long": distribute_tensor(whole["long"], plane, [Shard(0), Shard(0)]),
    }
    save(out, "grid4", {"model": state}, {"model": whole})
    writer = HuggingFaceStorageWriter(str(out / "safetensors" / "grid"), save_distributed=True)
    dcp_save(state, storage_writer=writer)
    keep(out, "safetensors/grid.ref", {"model": whole})


def _rank(rank: int, world: int, port: int, out: Path, body: Callable[[int, int, Path], None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        body(rank, world, out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def launch(world: int, out: Path, body: Callable[[int, int, Path], None]) -> None:
    """Run `body(rank, world, out)` in forked ranks. Raises RuntimeError if a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    in_forks([partial(_rank, rank, world, port, out, body) for rank in range(world)])


def in_forks(calls: Sequence[Callable[[], None]]) -> None:
    """Run each of `calls` in a separate fork, all at the same time. Raises RuntimeError if a call fails."""
    gc.freeze()  # garbage collection of all imported modules would take longer than the rest
    children = []
    for call in calls:
        pid = os.fork()
        if pid == 0:
            code = 0
            # Do this before a backward pass starts threads: torch creates its thread pool again at the first
            # use in a fork, and crashes if two threads use it at once (pthreadpool-cpp.cc).
            torch.set_num_threads(1)
            try:
                call()
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if any(codes):
        raise RuntimeError(f"the processes ended with {codes}")


def prepare() -> None:
    """Prepare for the forks: OpenMP threads do not survive them, and the first optimizer imports modules."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained(1, "plain")


def main(out: Path) -> None:
    """Write all checkpoints under `out`."""
    prepare()
    for world in (1, 2, 3):
        launch(world, out, writers)
    launch(4, out, grid)
