"""Adafactor and 8-bit AdamW: compared with torch's, on sharded parameters, and in checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from portable.converters import CheckpointError, open_checkpoint
from portable.engines.fsdp.optimizer_state import restore_optimizer_state
from portable.optim.adafactor import ADAFACTOR_RULES, Adafactor
from portable.optim.adamw_8bit import AdamW8bit
from portable.optim.adamw_bf16 import AdamWBf16
from portable.optim.local_shards import compute_total_norm
from portable.optim.muon import Muon
from portable.run.rank import run_rank
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured, losses
from tests.tpu.test_run import on_xla
from tests.xla import XlaPool

ADAFACTOR: dict[str, Any] = {"train__optimizer": "adafactor", "train__learning_rate": 0.08}
HYBRID: dict[str, Any] = {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}

# A matrix, a matrix that leaves a rank empty, a stack of matrices, a vector, a scalar.
SHAPES = [(7, 5), (1, 6), (4, 3, 5), (9,), ()]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_restore_optimizer_state_rejects_other_shape(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    stored: Any = SimpleNamespace(optimizer={"w": {"exp_avg": open_checkpoint(tmp_path).tensors["w"]}})
    optimizer = SimpleNamespace(
        state={}, build_initial_state=lambda weight: {"exp_avg": torch.zeros_like(weight)}
    )
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(
        CheckpointError,
        match=r"exp_avg of w: has the shape \[4\] in the checkpoint, but \[2, 2\] in this run",
    ):
        restore_optimizer_state(optimizer, {"w": weight}, stored, None)
    restore_optimizer_state(optimizer, {"w": (vector := nn.Parameter(torch.zeros(4)))}, stored, None)
    assert (optimizer.state[vector]["exp_avg"] == 1).all()


@pytest.mark.parametrize(("rule", "size"), [("torch", 1.0), ("transformers", 1.0), ("transformers", 1e-6)])
def test_adafactor_matches_torch_and_transformers(rule: str, size: float) -> None:
    """The rule of transformers is also tested with gradients below the floors of torch's rule."""
    ours = [nn.Parameter(value) for value in gradients(99)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    groups = [{"params": ours[:3], "weight_decay": 0.1}, {"params": ours[3:], "weight_decay": 0.0}]
    expected = [{"params": theirs[:3], "weight_decay": 0.1}, {"params": theirs[3:], "weight_decay": 0.0}]
    optimizer = Adafactor(groups, lr=0.3, rule=ADAFACTOR_RULES[rule])
    reference: Any = (
        torch.optim.Adafactor(expected, lr=0.3)
        if rule == "torch"
        else transformers.Adafactor(expected, lr=0.3, scale_parameter=False, relative_step=False)
    )
    for step in range(12):
        for p, q, gradient in zip(ours, theirs, gradients(step), strict=True):
            gradient = gradient * size
            if rule == "transformers" and gradient.dim() == 2:
                gradient[0] = 0.0  # a token that is not there
            p.grad, q.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)
        if rule == "torch":
            assert optimizer.state[p].keys() == reference.state[q].keys()
            for key, value in optimizer.state[p].items():
                other = reference.state[q][key].view(value.shape)
                torch.testing.assert_close(value, other, rtol=1e-5, atol=0)


def build_bf16_adamw(groups: list[dict[str, Any]], *, quantizes: bool = False, **settings: Any) -> AdamWBf16:
    """Convert the parameters of ``groups`` to bf16, and build their optimizer."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
    names = {parameter: str(index) for index, parameter in enumerate(parameters)}
    unquantized = () if quantizes else parameters
    return AdamWBf16(groups, names=names, seed=0, unquantized_parameters=unquantized, **{**ADAM, **settings})


ADAM: dict[str, Any] = {"lr": 0.3, "betas": (0.9, 0.95), "eps": 1e-8}
MASKED: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adafactor": lambda groups: Adafactor(groups, lr=0.3, rule=ADAFACTOR_RULES["torch"]),
    "adafactor of transformers": lambda groups: Adafactor(
        groups, lr=0.3, rule=ADAFACTOR_RULES["transformers"]
    ),
    "adamw_8bit": lambda groups: AdamW8bit(groups, full_precision_parameters=(), **ADAM),
    "adamw_8bit, bf16": lambda groups: build_bf16_adamw(groups, quantizes=True),
    "muon": lambda groups: Muon(groups, momentum=0.9, rate_rule="original", **ADAM),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_optimizer_step_changes_nothing(name: str) -> None:
    shapes = [*SHAPES, (128, 64)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "matrices": True},
        {"params": rest, "weight_decay": 0.1, "matrices": False},
    ]
    optimizer: Any = MASKED[name](groups)
    for masked in [True, False, True]:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, torch.nan) if masked else torch.randn_like(parameter)
        optimizer.found_inf = torch.tensor(float(masked))
        before = [p.detach().clone() for p in parameters]
        kept = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in parameters]
        optimizer.step()
        for parameter, old, state in zip(parameters, before, kept, strict=True):
            assert torch.equal(parameter, old) == masked
            same = [torch.equal(optimizer.state[parameter][key], value) for key, value in state.items()]
            assert all(same) == (masked or not state)
    counted = rest if name == "muon" else parameters  # torch's, too, does not count the steps of matrices
    assert all(float(optimizer.state[p]["step"]) == 1 for p in counted)


SHORT: dict[str, Any] = {"train__steps": 5, "train__global_batch_size": 8, "data__eval_fraction": 0}


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    """Train with two micro-batches on each of one, two or four ranks."""
    share = {"train__micro_batch_size": 4 // int(os.environ["WORLD_SIZE"])}
    return run_rank("cpu", configured(folder, corpus, **{**SHORT, **share, **settings}))


def adafactor_leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    return leg(folder, corpus, {**ADAFACTOR, **settings})


def test_adafactor_run_resumes(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """The run resumes bit for bit on the same ranks, and up to rounding on others."""
    whole, same, other = tmp_path / "whole", tmp_path / "same", tmp_path / "other"
    assert ranks.run(2, adafactor_leg, whole, corpus, {}) == 0
    assert ranks.run(2, adafactor_leg, same, corpus, {"train__stop_after": 2}) == 0
    shutil.copytree(same, other)
    assert ranks.run(2, adafactor_leg, same, corpus, {}) == 0
    assert ranks.run(4, adafactor_leg, other, corpus, {**HYBRID, "train__stop_after": 4}) == 0
    assert ranks.run(1, adafactor_leg, other, corpus, {"strategy": "no_shard"}) == 0
    assert losses(same) == losses(whole)
    assert losses(other) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize("rule", ["torch", "transformers"])
def test_adafactor_moves_between_xla_and_ranks(
    rule: str, tmp_path: Path, corpus: Path, ranks: RankPool, xla: XlaPool
) -> None:
    ours: dict[str, Any] = {"train__adafactor_rule": rule}
    ours["train__learning_rate"] = 0.08 if rule == "torch" else 0.003
    settings: dict[str, Any] = {**ADAFACTOR, **SHORT, **ours}
    assert ranks.run(1, adafactor_leg, tmp_path / "whole", corpus, ours) == 0
    run = tmp_path / "run"
    assert ranks.run(2, adafactor_leg, run, corpus, {**ours, "train__stop_after": 2}) == 0
    assert on_xla(xla, 2, run, corpus, **settings, train__stop_after=4) == 0
    assert ranks.run(1, adafactor_leg, run, corpus, ours) == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_8bit_adamw_matches_adamw() -> None:
    """Matrices match up to the coarser moments, and parameters with 32-bit moments match exactly."""
    torch.manual_seed(0)
    ours = [
        nn.Parameter(torch.randn(128, 96)),
        nn.Parameter(torch.randn(128, 96)),
        nn.Parameter(torch.randn(96)),
    ]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = AdamW8bit(
        [{"params": ours, "weight_decay": 0.1}], full_precision_parameters=[ours[1]], **settings
    )
    reference = torch.optim.AdamW(theirs, weight_decay=0.1, **settings)
    start = ours[0].detach().clone()
    for _ in range(30):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p) + 0.3
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert optimizer.state[ours[0]]["exp_avg_codes"].dtype == torch.uint8
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-6)
    assert (ours[0] - theirs[0]).norm() < 0.02 * (theirs[0] - start).norm()


WIDE = {**TINY_MODEL, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}


def test_8bit_adamw_run_resumes_on_shards(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """The run resumes bit for bit on the same ranks. On other ranks, it differs by the rounding of codes."""
    settings: dict[str, Any] = {"train__optimizer": "adamw_8bit", "model__config": WIDE}
    whole, run, four = tmp_path / "whole", tmp_path / "run", tmp_path / "four"
    assert ranks.run(2, leg, whole, corpus, settings) == 0
    assert ranks.run(2, leg, run, corpus, settings | {"train__stop_after": 2}) == 0
    shutil.copytree(run, four)
    assert ranks.run(2, leg, run, corpus, settings) == 0
    assert losses(run) == losses(whole)
    state = open_checkpoint(run).optimizer
    assert state is not None
    assert state.state["model.layers.0.mlp.up_proj.weight"].keys() == {
        "step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"
    }  # fmt: skip
    assert state.state["model.embed_tokens.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert ranks.run(1, leg, tmp_path / "one", corpus, settings | {"strategy": "no_shard"}) == 0
    hybrid = HYBRID | {"memory__offload_params": "cpu"}
    assert ranks.run(4, leg, four, corpus, settings | hybrid) == 0
    for other in ("one", "four"):
        assert losses(tmp_path / other) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.parametrize("quantizes", [False, True])
def test_bf16_adamw_matches_adamw_on_average(quantizes: bool) -> None:
    """Each update is smaller than half the distance of two bf16 numbers, so rounding to nearest loses it."""
    torch.manual_seed(0)
    ours = nn.Parameter(torch.ones(256, 256))
    theirs = nn.Parameter(torch.ones(256, 256))
    settings: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizer = build_bf16_adamw([{"params": [ours], "weight_decay": 0.1}], quantizes=quantizes, **settings)
    reference = torch.optim.AdamW([theirs], weight_decay=0.1, **settings)
    sum_squares = torch.zeros(())
    for step in range(100):
        gradient = (1.0 if step < 50 else 0.1) * (1 + torch.rand_like(theirs))
        ours.grad, theirs.grad = gradient.bfloat16(), gradient
        optimizer.step()
        reference.step()
        sum_squares += (ours.detach().float().mean() - theirs.detach().mean()).square()
    assert {value.dtype for key, value in optimizer.state[ours].items() if key != "step"} == (
        {torch.uint8, torch.float32} if quantizes else {torch.bfloat16}
    )
    moved = (1 - theirs.detach()).mean()
    assert moved > 0.005
    assert (sum_squares / 100).sqrt() < 0.01 * moved
    if not quantizes:
        for key in ("exp_avg", "exp_avg_sq"):
            expected = float(reference.state[theirs][key].mean())
            assert optimizer.state[ours][key].float().mean() == pytest.approx(expected, rel=2e-3)


def update_shards(placements: list[Placement] | None) -> list[torch.Tensor]:
    """Take two steps on a matrix stack in bf16, and return the results and the norm of the gradient."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 8, 64, generator=generator).bfloat16() for _ in range(3)]
    if placements is not None:
        mesh = init_device_mesh("cpu", (2, 2))
        values = [distribute_tensor(value, mesh, placements) for value in values]
    parameter = nn.Parameter(values[0])
    optimizer = build_bf16_adamw([{"params": [parameter], "weight_decay": 0.1}])
    for gradient in values[1:]:
        parameter.grad = gradient
        optimizer.step()
    tensors: list[Any] = [parameter.detach(), *optimizer.state[parameter].values()]
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return [*whole, compute_total_norm([parameter.grad] if parameter.grad is not None else [])]


@pytest.mark.parametrize(
    "placements", [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]]
)
def test_bf16_adamw_rounds_shards_like_whole_parameter(placements: list[Placement], ranks: RankPool) -> None:
    *expected, norm = update_shards(None)
    *results, sharded_norm = ranks.run(4, update_shards, placements)
    assert all(map(torch.equal, results, expected))
    assert sharded_norm == pytest.approx(float(norm), rel=1e-6)


def test_bf16_adamw_run_resumes_on_shards(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """The run resumes bit for bit on the same ranks. On other ranks, it differs by the rounding to bf16."""
    settings: dict[str, Any] = {"precision": "bf16", "train__master_dtype": "bf16", "model__config": WIDE}
    whole, run, four = tmp_path / "whole", tmp_path / "run", tmp_path / "four"
    assert ranks.run(2, leg, whole, corpus, settings) == 0
    assert ranks.run(2, leg, run, corpus, settings | {"train__stop_after": 2}) == 0
    shutil.copytree(run, four)
    assert ranks.run(2, leg, run, corpus, settings) == 0
    assert losses(run) == losses(whole)
    for folder in (run / "checkpoints" / "step-000005", run / "final"):
        assert {tensor.dtype for tensor in open_checkpoint(folder).tensors.values()} == {"BF16"}
    hybrid = HYBRID | {"memory__offload_params": "cpu", "train__optimizer": "adamw"}
    assert ranks.run(4, leg, four, corpus, settings | hybrid | {"train__stop_after": 4}) == 0
    assert ranks.run(1, leg, four, corpus, settings | {"strategy": "no_shard"}) == 0
    assert losses(four) == pytest.approx(losses(whole), rel=1e-2)
    fp32 = {"train__master_dtype": "fp32", "checkpoint__allow_changes": True, "train__steps": 7}
    assert ranks.run(2, leg, four, corpus, settings | fp32) == 0
    assert {tensor.dtype for tensor in open_checkpoint(four / "final").tensors.values()} == {"F32"}
