"""Write one torch.save file per rank of FSDP-sharded state, like verl's checkpoint manager.

`<name>.ref.pt` is next to each folder, gathered from the live run by `make_dcp.py`. FSDP2 writes DTensors.
FSDP1 also does so if it has a mesh, otherwise it writes ShardedTensors and an optimizer keyed by flat
parameter. Torch versions pickle a mesh differently: `rank_samples/` has the models and optimizers of
`tensor-parallel-4` and `meshes-4`, written by some of these versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.converters.make_dcp import full, keep, launch, prepare, reference, stepped, trained


class Layer(nn.Module):
    """One layer with a buffer: a separate unit under FSDP1, and a stage of a pipeline."""

    def __init__(self, inner: int = 8, frozen: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(6, inner)
        self.down = nn.Linear(inner, 6, bias=False)
        self.down.requires_grad_(not frozen)
        self.register_buffer("scale", torch.tensor([0.5, inner]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = hidden + self.down(self.up(hidden).tanh())
        return made


class Stack(nn.Module):
    """Embeddings, two equal layers, a norm and a head, like a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.register_buffer("counts", torch.tensor([1, -(1 << 62), 3]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        loss: torch.Tensor = self.head(self.norm(hidden)).square().sum()
        return loss


def save(out: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save as verl's `save_checkpoint` does on every rank."""
    folder, rank, world = out / name, dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # otherwise, it would change the learning rate
    scheduler = torch.optim.lr_scheduler.ConstantLR(other)
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    for kind, state in (
        ("model", model.state_dict()),
        ("optim", optimizer.state_dict()),
        ("extra_state", extra),
    ):
        torch.save(state, folder / f"{kind}_world_size_{world}_rank_{rank}.pt")


def finish(out: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    save(out, name, model, optimizer)
    keep(out, f"{name}.ref", reference(model, optimizer))


def fsdp2(rank: int, world: int, out: Path) -> None:
    finish(out, f"fsdp2-{world}", *trained(world, "fsdp"))


def build_with_tensor_parallel() -> Any:
    """Build a model on 2 x 2 ranks.

    The rows of its up layers are sharded by data and tensor parallelism, the columns of its down layers only
    by tensor parallelism.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = Stack()
    for block in model.layers:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def with_tensor_parallel(rank: int, world: int, out: Path) -> None:
    model = build_with_tensor_parallel()
    finish(out, "tensor-parallel-4", model, stepped(model))


def replicated(rank: int, world: int, out: Path) -> None:
    """Save 2 x 2 ranks: replicas of two shards each."""
    torch.manual_seed(0)
    model: Any = Stack()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")))
    finish(out, "hybrid-4", model, stepped(model))


def meshes(rank: int, world: int, out: Path) -> None:
    """Save parameters on each kind of mesh: column-major ranks, a dimension of one rank, a flattened one."""
    crossed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    thin = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ddp", "cp", "fsdp"))
    ways: dict[str, tuple[DeviceMesh, Sequence[Placement]]] = {
        "crossed": (crossed, (Shard(1), Shard(0))),
        "column": (crossed["dp"], (Shard(0),)),
        "thin": (thin, (Replicate(), Shard(1), Shard(0))),
        "one": (thin["cp"], (Shard(0),)),
        "flat": (thin._flatten("all"), (Shard(0),)),
        "pair": (thin["ddp", "cp"]._flatten("some"), (Shard(1),)),
    }
    torch.manual_seed(0)
    model: Any = nn.Module()
    for name, (mesh, placements) in ways.items():
        model.register_parameter(name, nn.Parameter(distribute_tensor(torch.randn(5, 7), mesh, placements)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for value in model.parameters():
        value.grad = value.detach().clone()
    optimizer.step()
    finish(out, "meshes-4", model, optimizer)


def fsdp1(rank: int, world: int, out: Path) -> None:
    """Save FSDP1 models, wrapped by layer like in verl, with a mesh (DTensor) and without (ShardedTensor)."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    ways: dict[str, dict[str, Any]] = {
        "mesh": {"device_mesh": mesh},
        "plain": {},
        "originals": {"use_orig_params": True},
    }
    for name, more in ways.items():
        torch.manual_seed(0)
        policy = ModuleWrapPolicy({Layer})
        model = Fsdp(Stack(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **more)
        optimizer = stepped(model)
        sharded = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
        with Fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *sharded):
            save(out, f"fsdp1-{name}-{world}", model, optimizer)
        if name == "plain":
            with Fsdp.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                save(out, f"fsdp1-local-{world}", model, optimizer)
        with Fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            weights = {key: full(value) for key, value in model.state_dict().items()}
            state = Fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        if name == "originals":  # because torch gathers exp_avg_sq instead of exp_avg there
            state["state"] = gathered(model, optimizer, weights, world)
        named = zip(optimizer.param_groups, state["param_groups"], strict=True)
        groups = [{**group, "params": theirs["params"]} for group, theirs in named]
        keep(out, f"fsdp1-{name}-{world}.ref", {"model": weights, "optim": state["state"], "groups": groups})


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, torch.Tensor], world: int
) -> dict[str, Any]:
    """Gather the moments of the live parameters from the ranges of all ranks."""
    mine = {name: optimizer.state.get(value, {}) for name, value in model.named_parameters()}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    plain = {name: name.replace("_fsdp_wrapped_module.", "") for name in mine}
    state: dict[str, Any] = {}
    for name in mine:
        held = [values[name] for values in every if values[name]]
        shape = weights[plain[name]].shape
        made = {
            what: torch.cat([part[what] for part in held]).view(shape) for what in ("exp_avg", "exp_avg_sq")
        }
        state[plain[name]] = {"step": held[0]["step"], **made}
    return state


def main(out: Path) -> None:
    """Write all checkpoints under `out`."""
    prepare()
    for world in (2, 3):
        launch(world, out, fsdp2)
    launch(3, out, fsdp1)
    for body in (with_tensor_parallel, replicated, meshes):
        launch(4, out, body)
