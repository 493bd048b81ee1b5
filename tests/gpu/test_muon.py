"""Muon: torch's own on one rank, and whole matrices on every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from portable.optim.muon import Muon, spread
from tests.engines import ENGINES, Engines
from tests.gpu.test_parity import Losses, assert_close, our_losses, plain_losses
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path

MUON: dict[str, Any] = {
    "train__optimizer": "muon",
    "train__learning_rate": 0.01,
    "train__global_batch_size": 12,
    "train__micro_batch_size": 1,
}


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_muon_is_torchs(rule: Any, decay: float) -> None:
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


def test_a_masked_step_changes_nothing() -> None:
    matrix, vector = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))
    groups = [{"params": [matrix], "matrices": True}, {"params": [vector], "matrices": False}]
    optimizer = Muon(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.9, rate_rule="original")
    for masked in (True, False, True):
        before = [p.detach().clone() for p in (matrix, vector)]
        kept = {key: value.clone() for p in (matrix, vector) for key, value in optimizer.state[p].items()}
        for parameter in (matrix, vector):
            parameter.grad = torch.full_like(parameter, torch.nan) if masked else torch.randn_like(parameter)
        optimizer.found_inf = torch.tensor(float(masked))
        optimizer.step()
        for parameter, old in zip((matrix, vector), before, strict=True):
            assert torch.equal(parameter, old) == masked
        now = {key: value for p in (matrix, vector) for key, value in optimizer.state[p].items()}
        assert all(torch.equal(now[key], value) for key, value in kept.items()) == (masked or not kept)


@pytest.mark.parametrize("length", [1, 4, 7, 15, 23, 100])
@pytest.mark.parametrize("first", [0, -3])
def test_every_element_of_a_matrix_is_with_one_rank(length: int, first: int) -> None:
    shape, ranks = (3, 2, 4), 100 // length + 4
    seen = torch.zeros(shape).view(-1)
    for rank in range(ranks):
        matrices = spread(shape, first=first, length=length, ranks=ranks, rank=rank)
        start = first + rank * length
        for index, matrix in enumerate(matrices):
            here = torch.arange(start + matrix.offset, start + matrix.offset + matrix.sizes[rank])
            assert ((here >= index * 8) & (here < index * 8 + 8)).all()
            seen[here] += 1
            assert matrix.sizes == matrices[index].sizes
    assert (seen == 1).all() == (ranks * length + first >= 24)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    return plain_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **MUON))


CASES = [
    pytest.param(name, size, marks=[] if place < 1 + (name in SHARDED) else pytest.mark.exhaustive)
    for SHARDED in [("full_shard", "zero2", "xla")]
    for name, kind in ENGINES.items()
    for place, size in enumerate(kind.sizes)
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_engine(
    name: str, size: int, truth: Losses, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, corpus, **MUON, **ENGINES[name].settings)
    assert_close(engines.run(name, size, our_losses, config), truth, 1e-5)
