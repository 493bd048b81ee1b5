"""Write DeepSpeed checkpoints with more than data parallelism, with DeepSpeed itself, on CPU with gloo.

The runs have pipeline stages (`PipelineModule`), experts (`deepspeed.moe.layer.MoE`) or tensor-parallel ranks
(AutoTP). Each folder has a file `<name>.2.ref.pt` next to it, which `make_deepspeed.py` gathers from the live
run. Values that are distributed over several ranks are merged here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.converters.make_dcp import keep, launch
from tests.converters.make_deepspeed import FP32_ACCUMULATION, config, deepspeed, gather, prepare, start
from tests.converters.make_ranks import Layer
from tests.tiny_models import tiny_model

# -- pipeline stages -----------------------------------------------------------------------------------------


def head(module: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ module.weight.t()


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.float().square().mean() + labels.float().mean() * 0


def pipeline(rank: int, world: int, out: Path) -> None:
    """Train two stages of two data-parallel ranks, with tied layers and a frozen layer."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    start(rank, world)
    words = partial(TiedLayerSpec, "words", nn.Embedding, 7, 6)
    mix = partial(TiedLayerSpec, "mix", nn.Linear, 6, 6, bias=False)
    layer, frozen = partial(LayerSpec, Layer), LayerSpec(Layer, 9, True)
    for name, precision, layers in (
        ("pipeline-fp32-4", "fp32", [words(), layer(5), frozen, torch.tanh, words(forward_fn=head)]),
        ("pipeline-bf16-4", "bf16", [LayerSpec(nn.Embedding, 7, 6), mix(), layer(5), mix(), layer(3), mix()]),
    ):
        torch.manual_seed(0)
        module = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
        more = {"gradient_accumulation_steps": 2, "data_types": FP32_ACCUMULATION}
        parameters = [p for p in module.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=parameters, config=config(1, precision, more)
        )
        for step in range(2):
            tokens = torch.arange(4)[None] + step + engine.grid.get_data_parallel_rank()
            engine.train_batch(iter([(tokens % 7, tokens)] * 2))
        engine.save_checkpoint(str(out / name))
        finish(out, name, engine, gather(engine, 1))


def finish(out: Path, name: str, engine: Any, mine: dict[str, Any]) -> None:
    """Save the values of this rank's model, merged with the values of the other ranks."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    merged = {**mine, "model": {}, "optim": {}}
    for part in held:
        merged["model"] |= part["model"]
        merged["optim"] |= part["optim"]
    keep(out, f"{name}.2.ref", merged)
    engine.destroy()


# -- experts -------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Model with two mixtures of four experts."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed = nn.Embedding(7, 6)
        expert = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))
        self.layers = nn.ModuleList(
            MoE(
                6, expert, num_experts=4, ep_size=2, k=1, min_capacity=2, use_rts=False, use_residual=residual
            )
            for residual in (False, True)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        made: torch.Tensor = self.head(hidden).float().square().sum()
        return made


def experts(rank: int, world: int, out: Path) -> None:
    """Train two expert-parallel ranks of two data-parallel ranks each, with different or equal experts."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups

    start(rank, world)
    for name, stage, precision, together in (
        ("experts-zero1-4", 1, "bf16", False),
        ("experts-zero2-4", 2, "fp32", True),
    ):
        for table in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
            table.clear()  # from the previous run
        torch.manual_seed(rank)  # different experts on different ranks
        model = Mixture()
        listed = [{"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}]
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=split_params_into_different_moe_groups_for_optimizer(listed),
            config=config(stage, precision, {"use_data_before_expert_parallelism": together}),
        )
        for step in range(2):
            engine.backward(engine(torch.arange(8)[None] % (step + rank + 2)))
            engine.step()
        engine.save_checkpoint(str(out / name))
        first = 2 * groups._get_expert_parallel_rank("ep_size_2")
        mine = gather(engine, stage)
        for key in ("model", "optim"):
            mine[key] = {in_whole(known, first): value for known, value in mine[key].items()}
        finish(out, name, engine, mine)


def in_whole(name: str, first: int) -> str:
    """Return the name of a parameter in the full model, on a rank whose experts begin with number `first`."""
    head, mark, tail = name.partition(".deepspeed_experts.")
    number, _, rest = tail.partition(".")
    return f"{head}{mark}{int(number) + first}.{rest}" if mark else name


# -- tensor parallel ranks -----------------------------------------------------------------------------------


class Fused(nn.Module):
    """Model with query, key and value in one matrix, biases, and a size that two does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.qkv_proj = nn.Linear(6, 24)
        self.o_proj = nn.Linear(8, 6)
        self.odd_proj = nn.Linear(6, 9, bias=False)
        self.down_proj = nn.Linear(9, 6, bias=False)
        self.register_buffer("scale", torch.tensor([2.0, 0.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        query, key, value = self.qkv_proj(hidden).chunk(3, dim=-1)
        hidden = hidden + self.o_proj(query * key.tanh() + value)
        made: torch.Tensor = (hidden + self.down_proj(self.odd_proj(hidden))).float().square().sum()
        return made


PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [r".*qkv_proj\.weight$"],
            "partition_type": "column",
            "shape": [3, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*odd_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\b(o|down)_proj\.weight$"], "partition_type": "row"},
    ],
}


def merged(name: str, parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Merge a parameter from its shards, in the way of AutoTP's layers."""
    if parts[0].shape == whole.shape:
        return parts[0]
    if "qkv" in name:
        thirds = [part.chunk(3) for part in parts]
        return torch.cat([third[i] for i in range(3) for third in thirds])
    return torch.cat(parts, dim=1 if any(row in name for row in ("o_proj", "down_proj")) else 0)


def tensor_parallel(rank: int, world: int, out: Path) -> None:
    """Train two tensor-parallel ranks of two data-parallel ranks each."""
    start(rank, world)
    tied_llama = partial(tiny_model, "llama", tie_word_embeddings=True)
    cut(out, "autotp-zero1-4", 1, "bf16", tied_llama)
    cut(out, "autotp-zero2-4", 2, "fp32", Fused, partition_config=PLAN)
    cut(out, "autotp-zero3-4", 3, "bf16", tied_llama)


def cut(out: Path, name: str, stage: int, precision: str, make: Callable[[], Any], **more: Any) -> None:
    """Train and save.

    `merged` builds the reference, and must also restore the initial weights from AutoTP's shards.
    """
    from deepspeed.utils import groups

    torch.manual_seed(0)
    model = make()
    original = {key: p.detach().clone() for key, p in model.named_parameters(remove_duplicate=False)}
    settings = config(stage, precision, {"tensor_parallel": {"autotp_size": 2, **more}})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)

    def whole(key: str, value: torch.Tensor) -> torch.Tensor:
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, value, group=groups.get_tensor_model_parallel_group())
        return merged(key, parts, original[key]) if key in original else value

    for key, value in engine.module.named_parameters():
        begun = whole(key, deepspeed.utils.safe_get_full_fp32_param(value))
        assert torch.equal(begun, original[key].to(value.dtype).float()), key
    for step in range(2):
        tokens = (torch.arange(9)[None] + step + groups._get_data_parallel_rank()) % 7
        engine.backward(engine(tokens) if make is Fused else engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(out / name))
    mine = gather(engine, stage)
    mine["model"] = {key: whole(key, value) for key, value in mine["model"].items()}
    mine["optim"] = {
        key: {what: whole(key, value) for what, value in values.items()}
        for key, values in mine["optim"].items()
    }
    finish(out, name, engine, mine)


def main(out: Path) -> None:
    """Write all checkpoints under `out`."""
    prepare()
    for body in (pipeline, experts, tensor_parallel):
        launch(4, out, body)
