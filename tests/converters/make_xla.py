"""Write PyTorch/XLA FSDP v1 shard files and SPMD checkpoints with torch_xla itself, and their values.

torch_xla trains several FSDP v1 ranks only on a TPU. One process, however, can build the model of each rank,
step its optimizer on made-up gradients, and save its file.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
# Nothing here runs twice, so fast compilation matters most.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

from collections.abc import Callable

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.experimental.distributed_checkpoint as xc
import torch_xla.runtime as xr
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from tests.converters.make_dcp import in_forks, odd_buffers
from tests.converters.make_ranks import Layer


class Odd(nn.Module):
    """Model with sizes that no world size divides, nested, tied and frozen layers, all kinds of buffers."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(29, 6)
        self.layers = nn.ModuleList([Layer(13), Layer(13)])
        self.narrow = nn.Linear(6, 1)
        self.frozen = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(6)
        self.cube = nn.Parameter(torch.randn(5, 3, 2))
        if scalar:
            self.scalar = nn.Parameter(torch.tensor(0.25))
        self.lm_head = nn.Linear(6, 29, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        odd_buffers(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.lm_head(self.norm(hidden)) + self.narrow(hidden) * self.cube.sum()
        return out


@dataclass(frozen=True)
class Run:
    """One checkpoint to write: names of the files, wrapping of the model, and optimizer."""

    world: int
    files: Callable[[int, int], list[str]]
    options: dict[str, Any] = field(default_factory=dict)
    nested: bool = True
    scalar: bool = True
    frozen: bool = True
    groups: str = "one"
    build: Callable[[], Any] | None = None
    """A transformers model that replaces `Odd`."""


def wrapped(rank: int, run: Run) -> Any:
    """Build the model of a rank."""
    torch.manual_seed(0)
    model: Any = Odd(scalar=run.scalar) if run.build is None else run.build()
    if run.build is None:
        model.frozen.requires_grad_(not run.frozen)
    layers = getattr(model, "model", model).layers
    every = {
        "sharding_groups": [list(range(run.world))],
        "sharding_rank": rank,
        "sharding_world_size": run.world,
        "execute_sharding_on_init": False,
        **run.options,
    }
    if run.nested:
        for i, layer in enumerate(layers):
            inner = checkpoint_module(layer) if i else layer
            layers[i] = XlaFullyShardedDataParallel(inner, **every)
    return XlaFullyShardedDataParallel(model, **every)


def decayed(name: str) -> bool:
    """Return whether the Trainer puts a parameter into its first group, by its sharded name."""
    return "bias" not in name and "layernorm" not in name


def trained(rank: int, run: Run) -> Any:
    """Return (model, optimizer) of one rank after a step."""
    model = wrapped(rank, run)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad or run.groups == "one"]
    chosen: Any = [p for _, p in named]
    if run.groups == "trainer":
        chosen = [
            {"params": [p for n, p in named if decayed(n) is kept], "weight_decay": 0.1 * kept}
            for kept in (True, False)
        ]
    optimizer = torch.optim.AdamW(chosen, lr=1e-2, betas=(0.8, 0.95))
    noise = torch.Generator().manual_seed(100 + rank)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter.device)
    optimizer.step()
    torch_xla.sync()
    return model, optimizer


def write(out: Path, name: str, run: Run) -> None:
    """Write the files of every rank, and the merged values of the live shards."""
    folder = out / name
    folder.mkdir()
    states: list[dict[str, torch.Tensor]] = []
    moments: dict[str, dict[str, list[torch.Tensor]]] = {}
    for rank in range(run.world):
        model, optimizer = trained(rank, run)
        metadata = model.get_shard_metadata()
        whole = {"model": model.state_dict(), "shard_metadata": metadata}
        state = {"optimizer": optimizer.state_dict(), "shard_metadata": metadata}
        paths = run.files(rank, run.world)
        if len(paths) == 1:
            whole |= state
        else:
            xm.save(state, str(folder / paths[1]), master_only=False)
        xm.save(whole, str(folder / paths[0]), master_only=False)
        states.append({key: value.cpu().clone() for key, value in model.state_dict().items()})
        owner = {id(p): key.replace("_fpw_module.", "") for key, p in model.named_parameters()}
        groups = [[owner[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for parameter, values in optimizer.state.items():
            held = moments.setdefault(owner[id(parameter)], {})
            for what, value in values.items():
                held.setdefault(what, []).append(value.cpu().clone())
    ref: dict[str, Any] = {"model": {}, "optim": {}, "groups": []}
    held_by: dict[str, list[str]] = {}
    for key, first in states[0].items():
        if "_fsdp_shard" in key:
            made = join([state[key] for state in states], key, metadata)
            held_by[key] = list(made)
            ref["model"] |= made
        else:
            ref["model"][plain(key)] = first
    for key, values_of in moments.items():
        for what, parts in values_of.items():
            cut = parts[0].dim() and parts[0].shape == states[0][key].shape
            made = join(parts, key, metadata) if cut else dict.fromkeys(held_by[key], parts[0])
            for one, value in made.items():
                ref["optim"].setdefault(one, {})[what] = value
    for group, keys in zip(optimizer.state_dict()["param_groups"], groups, strict=True):
        ref["groups"].append({**group, "params": [one for key in keys for one in held_by[key]]})
    torch.save(ref, out / f"{name}.ref.pt")


def join(parts: list[torch.Tensor], key: str, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Merge the shards of one key, by plain name. The function of torch_xla fails for a scalar."""
    head, _, tail = key.rpartition("_fsdp_shard")
    prefix = head.rstrip(".")
    info = metadata["shard_info"][prefix]["_fsdp_shard" + tail]
    whole, size = torch.cat(parts), info["_orig_size"]
    whole = whole[: size[0]] if whole.dim() > 1 else whole[: int(np.prod(size))].reshape(size)
    name = f"{head}{info['_orig_name']}"
    if ".flat_param_" not in name:
        return {plain(name): whole.clone()}
    names, shapes, numels = metadata["flatten_info"][name]
    base = name.rpartition(".")[0]
    pieces = zip(names, shapes, whole.split(numels), strict=True)
    return {plain(f"{base}.{one}"): piece.reshape(shape).clone() for one, shape, piece in pieces}


def plain(name: str) -> str:
    for part in ("_fsdp_wrapped_module.", "_fpw_module.", "_orig_module."):
        name = name.replace(part, "")
    return name


def example(rank: int, world: int) -> list[str]:
    """Return file names of torch_xla's examples."""
    return [f"ckpt_rank-{rank:08d}-of-{world:08d}.pth"]


def trainer(rank: int, world: int) -> list[str]:
    """Return file names of transformers' Trainer."""
    return [f"rank{rank}-of-{world}-pytorch_model.bin", f"rank{rank}-of-{world}-optimizer.pt"]


def free(rank: int, world: int) -> list[str]:
    """Return arbitrary file names."""
    return [f"piece.{'abcd'[world - 1 - rank]}.pt"]


def spmd(out: Path) -> None:
    """Save four devices of one process with torch's DCP and torch_xla's planner."""
    torch.manual_seed(0)
    model: Any = Odd(scalar=False)
    model.frozen.requires_grad_(False)

    def shard_output(output: Any, mesh: Any) -> None:
        xs.mark_sharding(output, mesh, ("fsdp", None, None))

    mesh = xs.Mesh(np.arange(4), (4,), ("fsdp",))
    wrap = partial(SpmdFullyShardedDataParallel, mesh=mesh, shard_output=shard_output)
    model.layers[1] = wrap(model.layers[1])
    model = wrap(model)
    inner = model._orig_module
    inner.lm_head.weight = inner.embed_tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))
    for step in range(2):
        tokens = torch.arange(step, step + 8).reshape(4, 2).to("xla")
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch_xla.sync()
    xm.wait_device_ops()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    storage = FileSystemWriter(out / "spmd")
    dcp_save(state, storage_writer=storage, planner=xc.SPMDSavePlanner(), no_dist=True)
    named = {id(p): plain(key) for key, p in model.named_parameters()}
    ref = {
        "model": {plain(key): value.cpu() for key, value in model.state_dict().items()},
        "optim": {
            named[id(p)]: {what: value.cpu() for what, value in values.items()}
            for p, values in optimizer.state.items()
        },
        "groups": [{**optimizer.state_dict()["param_groups"][0], "params": list(named.values())}],
    }
    torch.save(ref, out / "spmd.ref.pt")


def main(out: Path) -> None:
    """Write all checkpoints under `out`."""
    warnings.simplefilter("ignore")
    in_forks([partial(all_spmd, out), partial(all_fsdp, out)])


def all_spmd(out: Path) -> None:
    xr.use_spmd()
    spmd(out)


def all_fsdp(out: Path) -> None:
    flat: dict[str, Any] = {"flatten_parameters": True}
    half: dict[str, Any] = {"compute_dtype": torch.bfloat16}
    runs = {
        "flat3": Run(3, example, flat),
        "flat4": Run(4, free, flat, nested=False, groups="trainable"),
        "each4": Run(4, example, half, scalar=False),
        "each1": Run(1, free),
        "dim3": Run(3, free, {"shard_param_on_dim_0": True}, scalar=False),
        "trainer3": Run(3, trainer, frozen=False, groups="trainer"),
    }
    for name, run in runs.items():
        write(out, name, run)
