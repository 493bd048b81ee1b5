"""Muon: equal to torch's on one rank, with full matrices on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from portable.converters import open_checkpoint
from portable.errors import UserError
from portable.optim.muon import Muon
from portable.run.rank import run_rank
from tests.engines import ENGINES, Engines, accumulated
from tests.gpu.test_parity import Losses, assert_close, our_losses, plain_losses
from tests.runs import configured, losses

MUON: dict[str, Any] = {
    "train__optimizer": "muon",
    "train__learning_rate": 0.01,
    "train__global_batch_size": 12,
    "train__micro_batch_size": 1,
}


@pytest.mark.parametrize(("rule", "decay"), [("match_rms_adamw", 0.3), ("original", 0.0)])
def test_muon_matches_torch(rule: Any, decay: float) -> None:
    torch.manual_seed(0)
    shapes = [(7, 5), (4, 9), (2, 2)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    stack = nn.Parameter(torch.stack([p.detach()[:2, :2].clone() for p in ours]))
    slices = [nn.Parameter(one.clone()) for one in stack.detach()]
    groups = [{"params": [*ours, stack], "weight_decay": decay, "matrices": True}]
    optimizer = Muon(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.9, rate_rule=rule)
    expected = torch.optim.Muon(
        [*theirs, *slices], lr=0.1, momentum=0.9, weight_decay=decay, adjust_lr_fn=rule
    )
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        stack.grad = torch.randn_like(stack)
        for one, gradient in zip(slices, stack.grad, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
        expected.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert optimizer.state[p].keys() == expected.state[q].keys() == {"momentum_buffer"}
    torch.testing.assert_close(stack, torch.stack(list(slices)), rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    return plain_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **MUON))


SHARDED = ("full_shard", "zero2", "xla")
ONCE = (*SHARDED, "full_shard, shared", "zero1", "zero3, offload")
"""The other engines update like one of these. ``torchtpu/test_torchtpu.py`` tests TPUs."""
# Rejected settings, and ranks with different programs, which tests.torchtpu does not support.
LEFT_OUT = ("full_shard, layers shared", "tpu, no_shard")
CASES = [
    pytest.param(name, size, marks=[] if at < (name in SHARDED) + (name in ONCE) else pytest.mark.exhaustive)
    for name, kind in ENGINES.items()
    if name not in LEFT_OUT
    for at, size in enumerate((*kind.sizes, 1) if name == "xla" else kind.sizes)
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_muon_matches_plain_loop_on_every_engine(
    name: str, size: int, truth: Losses, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, corpus, **{**MUON, **accumulated(size), **ENGINES[name].settings})
    assert_close(engines.run(name, size, our_losses, config), truth, 1e-5)


@pytest.mark.xla
def test_muon_matches_plain_loop_with_scanned_layers(
    truth: Losses, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, corpus, **MUON, backend="xla", xla__scan_layers=True)
    assert_close(engines.run("xla", 2, our_losses, config), truth, 1e-5)


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    common = {"train__steps": 6, "train__micro_batch_size": 2, "data__eval_fraction": 0}
    config = configured(folder, corpus, **{**MUON, **common, **settings})
    return run_rank(config.backend, config)


LORA: dict[str, Any] = {
    "adapter__type": "lora",
    "adapter__r": 4,
    "train__parameter_groups": [{"pattern": "lora_B", "learning_rate": 0.03}],
}


@pytest.mark.parametrize(
    ("settings", "route"),
    [
        ({}, [("full_shard", 3, 1), ("zero2", 2, 2), ("xla", 2, 4), ("zero3", 3, 5)]),
        (LORA, [("zero1", 2, 2), ("xla", 2, 5)]),
    ],
    ids=["", "lora"],
)
def test_muon_state_moves_between_engines(
    settings: dict[str, Any],
    route: list[tuple[str, int, int]],
    engines: Engines,
    corpus: Path,
    tmp_path: Path,
) -> None:
    whole, moving = tmp_path / "whole", tmp_path / "moving"
    assert engines.run("no_shard", 1, leg, whole, corpus, {**settings, "strategy": "no_shard"}) == 0
    for name, size, until in [*route, ("no_shard", 2, 6)]:
        given = {**settings, **ENGINES[name].settings, "train__stop_after": until}
        assert engines.run(name, size, leg, moving, corpus, given) == 0
    assert losses(moving) == pytest.approx(losses(whole), rel=1e-5)
    ours, theirs = (open_checkpoint(folder).optimizer for folder in (moving, whole))
    assert ours is not None and theirs is not None
    kinds = {name: frozenset(values) for name, values in ours.state.items()}
    assert kinds == {name: frozenset(values) for name, values in theirs.state.items()}
    matrices = {name for name, kind in kinds.items() if kind == {"momentum_buffer"}}
    assert matrices == {name for name in kinds if "layers" in name and "norm" not in name}


def test_muon_without_matrices_is_rejected(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"train\.optimizer: muon needs a trained weight matrix .* set train\.optimizer to adamw",
    ):
        our_losses(configured(tmp_path, corpus, **MUON, train__trainable="embed_tokens"))
