"""Write DeepSpeed checkpoints with DeepSpeed itself, on CPU with gloo, and their expected values.

Some runs are also converted by DeepSpeed's `ds_to_universal`, below `universal/`. Next to each is
`<name>.<step>.ref.pt` in the format of `make_dcp.py`, read through DeepSpeed's accessors.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from portable.gpu.zero.runtime import import_deepspeed
from tests.converters.make_dcp import keep, launch, odd_buffers
from tests.tiny_models import tiny_model

os.environ |= {"USE_TORCH_XLA": "0", "TQDM_DISABLE": "1"}
deepspeed = import_deepspeed("cpu")

FP32_ACCUMULATION = {"grad_accum_dtype": "fp32"}
ODD = {"lr": 1e-2, "betas": [0.8, 0.95], "weight_decay": 0.1}


class Odd(nn.Module):
    """Model with sizes that no world size divides, frozen and tied parameters, and buffers of every kind."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 6)
        self.narrow = nn.Linear(6, 1)  # a bias of one element: nothing on all ranks but the first
        self.wide = nn.Linear(1, 13, bias=False)
        self.big = nn.Linear(13, 17)  # spans several ranks
        self.fixed = nn.Linear(17, 5)
        self.fixed.requires_grad_(not frozen)
        self.last = nn.Linear(5, 3)
        self.lm_head = nn.Linear(6, 7, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        odd_buffers(self, torch.float32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        out = self.last(self.fixed(self.big(self.wide(self.narrow(hidden)))).tanh())
        loss: torch.Tensor = out.float().sum() + self.lm_head(hidden).float().square().sum()
        return loss


def config(stage: int, precision: str, more: dict[str, Any]) -> dict[str, Any]:
    """Build a DeepSpeed config. `more` overrides keys, and sections are merged."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {**ODD, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
    }
    if precision == "bf16":
        made["bf16"] = {"enabled": True}
    for key, value in more.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
    return made


def groups_of(model: nn.Module, split: bool) -> Any:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not split:
        return list(trainable.values())
    return [
        {"params": [p for p in trainable.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable.values() if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def train(
    out: Path,
    name: str,
    stage: int,
    precision: str = "fp32",
    *,
    split: bool = False,
    frozen: bool = True,
    client_optimizer: bool = False,
    model: nn.Module | None = None,
    steps: int = 2,
    **more: Any,
) -> None:
    """Train a few steps. From the second step on, save a checkpoint and the live values."""
    torch.manual_seed(0)
    model = model or Odd(frozen)
    parameters = groups_of(model, split)
    settings = config(stage, precision, more)
    optimizer = None
    if client_optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        settings.pop("optimizer")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, config=settings
    )
    for step in range(steps):
        loss = engine(torch.arange(step, step + 4) + dist.get_rank() % 2)
        engine.backward(loss)
        engine.step()
        if step:
            engine.save_checkpoint(str(out / name))
            keep(out, f"{name}.{step + 1}.ref", gather(engine, stage))
    engine.destroy()


def gather(engine: Any, stage: int) -> dict[str, Any]:
    """Gather the live run: master weights, buffers, moments and groups."""
    module = engine.module
    seen: dict[torch.Tensor, str] = {}
    optim: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] = {}
    plain = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters: dict[torch.Tensor, torch.Tensor] = {}
    if hasattr(engine.optimizer, "fp32_groups"):
        for weights16, weights32 in zip(
            engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True
        ):
            masters |= dict(zip(weights16, weights32, strict=True))
    # With several groups, DeepSpeed links all moments after the step of the first group, which fails for the
    # others.
    if stage in (1, 2):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in seen:
            weights[name] = weights[seen[parameter]]
            continue
        seen[parameter] = name
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
        elif stage == 0:
            master = masters.get(parameter, parameter)
            weights[name] = master.detach().clone()
            optim[name] = dict(plain.state[master])
        elif getattr(engine.optimizer, "round_robin_gradients", False):
            weights[name] = parameter.detach().clone()
            optim[name] = by_address(engine.optimizer, parameter)
        else:
            weights[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
            optim[name] = {
                key: deepspeed.utils.safe_get_full_optimizer_state(parameter, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            }
            if stage < 3:
                assert torch.equal(weights[name].to(parameter.dtype), parameter), name
    lasting = set(module.state_dict())
    buffers = {name: value for name, value in module.named_buffers() if name in lasting}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in plain.param_groups]
    return {"model": {**weights, **buffers}, "optim": optim, "groups": groups}


def by_address(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return moments by the position of the live parameter in its flat buffer.

    DeepSpeed's accessors mix them up.
    """
    moments = {}
    for partition, buffer in zip(
        optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat, strict=True
    ):
        start = (parameter.data_ptr() - buffer.data_ptr()) // parameter.element_size()
        for key in ("exp_avg", "exp_avg_sq") if 0 <= start < buffer.numel() else ():
            whole = torch.empty_like(buffer)
            dist.all_gather_into_tensor(whole, optimizer.optimizer.state[partition][key])
            moments[key] = whole[start : start + parameter.numel()].reshape(parameter.shape)
    return moments


def start(rank: int, world: int) -> None:
    """Initialize the process group with DeepSpeed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise, it compiles C++ first
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def one_rank(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    train(out, "zero2-1", 2, split=True)
    train(out, "zero3-1", 3, "bf16", split=True)
    train(out, "zero0-1", 0, frozen=False)


def two_ranks(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    train(out, "zero1-fp32-2", 1)
    train(out, "zero2-bf16-2", 2, "bf16", split=True)
    train(out, "zero3-fp32-2", 3, split=True)
    train(out, "fp32-accumulation-2", 1, "bf16", split=True, data_types=FP32_ACCUMULATION)
    train(out, "elastic-2", 2, split=True, zero_optimization={"elastic_checkpoint": True})
    train(out, "zero0-fp32-2", 0, split=True)
    train(out, "zero0-bf16-2", 0, "bf16")
    offload: Any = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    offload["zero_force_ds_cpu_optimizer"] = False
    for stage in (2, 3):
        train(out, f"offload-zero{stage}-2", stage, "bf16", client_optimizer=True, **offload)


def three_ranks(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    train(out, "zero1-bf16-3", 1, "bf16", split=True)
    train(out, "zero2-fp32-3", 2, steps=3)
    train(out, "zero3-bf16-3", 3, "bf16", steps=3)
    train(out, "sub-groups-3", 3, "bf16", split=True, zero_optimization={"sub_group_size": 40})
    for name, more in (
        ("round-robin", {"round_robin_gradients": True}),
        ("aligned", {"parameter_alignment": True}),
        ("round-robin-aligned", {"round_robin_gradients": True, "parameter_alignment": True}),
    ):
        train(out, f"{name}-3", 2, split=True, zero_optimization=more)


def four_ranks(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    train(out, "zero2-4", 2, "bf16", split=True)
    train(out, "zero3-4", 3, split=True, zero_optimization={"sub_group_size": 100})
    train(out, "fp32-accumulation-4", 1, "bf16", data_types=FP32_ACCUMULATION)
    train(out, "hpz-4", 3, "bf16", zero_optimization={"zero_hpz_partition_size": 2})


def accelerate(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    from accelerate import Accelerator, DeepSpeedPlugin

    settings = config(3, "bf16", {"zero_force_ds_cpu_optimizer": False})
    del settings["optimizer"]
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = tiny_model("llama", tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.arange(9)[None]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    accelerator.save_state(str(out / "accelerate"))
    keep(out, "accelerate.1.ref", gather(model, 3))


def prepare() -> None:
    """Import modules and cache lookups once for all ranks."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    for name in ("accelerate", "deepspeed.runtime.zero.muon.muon_optimizer"):
        import_module(name)
    assert deepspeed.ops.__compatible_ops__  # it searches for compilers


class Bulky(Odd):
    """Model that DeepSpeed moves to NVMe in part: only sub-groups of at least 1 MiB per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = nn.Linear(1, 600_001, bias=False)
        self.more = nn.Linear(6, 100_003)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        wide: torch.Tensor = self.bulk(self.narrow(hidden)).float().mean() + self.more(hidden).float().mean()
        return wide + super().forward(tokens)


def on_nvme(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    swap = {"device": "nvme", "nvme_path": str(out / "nvme"), "buffer_count": 4, "pin_memory": False}
    more: Any = {
        "zero_optimization": {"offload_optimizer": swap, "sub_group_size": 650_000},
        "zero_force_ds_cpu_optimizer": False,
    }
    train(out, "nvme-2", 3, "bf16", split=True, model=Bulky(), **more)


def nvme(out: Path) -> None:
    """Train with masters and moments in swap files, by C++ code that takes minutes to compile."""
    prepare()
    launch(2, out, on_nvme)


def universal(out: Path, name: str) -> None:
    """Convert the run with DeepSpeed's tool."""
    from deepspeed.checkpoint import ds_to_universal

    target = out / "universal" / name / "global_step2_universal"
    target.parent.mkdir(parents=True)
    told = argparse.Namespace(
        input_folder=str(out / name / "global_step2"),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(told)
    os.link(out / f"{name}.2.ref.pt", out / "universal" / f"{name}.2.ref.pt")


def main(out: Path) -> None:
    """Write all checkpoints under `out`."""
    prepare()
    for world, body in enumerate((one_rank, two_ranks, three_ranks, four_ranks), 1):
        launch(world, out, body)
    launch(2, out, accelerate)
    for name in ("zero1-fp32-2", "zero2-bf16-2", "zero3-fp32-2", "sub-groups-3"):
        universal(out, name)
