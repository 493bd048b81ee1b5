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

from portable.converters import CheckpointError, open_checkpoint
from portable.engines.fsdp.optimizer_state import restore_optimizer_state
from portable.optim.adafactor import ADAFACTOR_RULES, Adafactor
from portable.optim.adamw_8bit import AdamW8bit
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
    with pytest.raises(CheckpointError, match=r"exp_avg of w is missing or does not have shape \[2, 2\]"):
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


ADAM: dict[str, Any] = {"lr": 0.3, "betas": (0.9, 0.95), "eps": 1e-8}
MASKED: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adafactor": lambda groups: Adafactor(groups, lr=0.3, rule=ADAFACTOR_RULES["torch"]),
    "adafactor of transformers": lambda groups: Adafactor(
        groups, lr=0.3, rule=ADAFACTOR_RULES["transformers"]
    ),
    "adamw_8bit": lambda groups: AdamW8bit(groups, full_precision_parameters=(), **ADAM),
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
