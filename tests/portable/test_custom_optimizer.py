"""Optimizers by import path: they match a plain loop on every engine, and their checkpoints move."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portable.converters import open_checkpoint
from portable.errors import UserError
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests.engines import ENGINES, Engines, accumulated
from tests.gpu.test_parity import Losses, assert_close, our_losses, plain_losses
from tests.ranks import RankPool
from tests.runs import configured, losses

HERE = __name__
BATCH: dict[str, Any] = {"train__global_batch_size": 12, "train__micro_batch_size": 1}


class Odd(torch.optim.Optimizer):
    """Optimizer with unusual state: rows, columns, the first weights, a table, integers and group numbers."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, squares = self.state[p], p.grad.square()
                rows = squares.mean(dim=-1) if p.dim() > 1 else squares
                if not state:
                    state.update(start=p.clone(), rows=torch.ones_like(rows), table=torch.ones(3))
                    state["columns"] = torch.zeros_like(squares.mean(dim=0))
                    state["seen"] = torch.zeros_like(p, dtype=torch.int32)
                    state["count"] = 0
                    state["size"] = torch.ones((), dtype=torch.float64)
                state["count"] += 1
                state["size"] *= 1.1
                state["table"][state["count"] % 3] += 0.25
                state["seen"].add_((p.grad > 0).int())
                state["rows"].lerp_(rows, 0.1)
                state["columns"].lerp_(squares.mean(dim=0), 0.1)
                scale = (state["columns"].mean() + state["rows"].mean()).sqrt() + 1e-3
                way = p.grad / scale + 0.01 * (p - state["start"]) + 1e-3 * state["seen"]
                factor = float(state["size"]) * float(state["table"].sum()) / 3
                p.add_(way, alpha=-group["lr"] * factor * (1 + 0.1 * group["taken"] / (1 + state["count"])))


def sgd(groups: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build an optimizer by a function."""
    return torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True, weight_decay=weight_decay)


KINDS: dict[str, tuple[Any, float, str]] = {
    "nadam": (torch.optim.NAdam, 1e-2, "torch.optim:NAdam"),
    "sgd": (functools.partial(sgd, weight_decay=0.1), 1e-1, f"{HERE}:sgd"),
    "adafactor": (torch.optim.Adafactor, 3e-1, "torch.optim:Adafactor"),
    "odd": (Odd, 1e-1, f"{HERE}:Odd"),
}
"""Optimizers, their rates and names."""


def settings(kind: str) -> dict[str, Any]:
    decay = {"train__weight_decay": 0.0} if kind == "odd" else {}
    _, rate, name = KINDS[kind]
    return {**BATCH, **decay, "train__optimizer": name, "train__learning_rate": rate}


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Any:
    found: dict[str, Losses] = {}

    def of(kind: str) -> Losses:
        if kind not in found:
            config = configured(tmp_path_factory.mktemp("truth"), corpus, **settings(kind))
            found[kind] = plain_losses(config, made=lambda groups: KINDS[kind][0](groups, lr=0.1))
        return found[kind]

    return of


CASES = [
    ("nadam", "full_shard"),
    ("nadam", "zero3, offload"),
    ("nadam", "xla"),
    ("sgd", "zero2"),
    ("adafactor", "full_shard"),
    ("odd", "hybrid_shard"),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_custom_optimizer_matches_plain_loop_on_every_engine(
    kind: str, name: str, truths: Any, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    size = ENGINES[name].sizes[0]
    config = configured(tmp_path, corpus, **{**settings(kind), **accumulated(size), **ENGINES[name].settings})
    assert_close(engines.run(name, size, our_losses, config), truths(kind), 1e-5)


# -- checkpoints -------------------------------------------------------------------------------------------


def leg(folder: Path, corpus: Path, given: dict[str, Any]) -> int:
    common = {
        "train__steps": 6,
        "train__micro_batch_size": 2,
        "data__eval_fraction": 0,
        "log__sample_tokens": 0,
    }
    config = configured(folder, corpus, **{**common, **given})
    return run_rank(config.backend, config)


# The last launch takes two steps, because the loss of the second step depends on the restored state.
ROUTES = [
    ("nadam", [("full_shard", 3, 1), ("zero2", 2, 2), ("zero3", 3, 4), ("no_shard", 2, 6)]),
    ("nadam", [("xla", 2, 2), ("full_shard", 3, 4), ("xla", 4, 6)]),
    ("odd", [("full_shard", 3, 2), ("no_shard", 1, 3), ("full_shard", 2, 6)]),
]


@pytest.mark.parametrize(("kind", "route"), ROUTES, ids=["nadam", "nadam, xla", "odd"])
def test_custom_optimizer_state_moves_between_engines(
    kind: str, route: list[tuple[str, int, int]], engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    given = settings(kind)
    assert leg(tmp_path / "whole", corpus, {**given, **accumulated(1), "strategy": "no_shard"}) == 0
    for name, size, until in route:
        there = {**given, **accumulated(size), **ENGINES[name].settings, "train__stop_after": until}
        assert engines.run(name, size, leg, tmp_path / "moving", corpus, there) == 0
    assert losses(tmp_path / "moving") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    ours, theirs = (open_checkpoint(tmp_path / one).optimizer for one in ("moving", "whole"))
    assert ours is not None and theirs is not None
    assert ours.state.keys() == theirs.state.keys()
    for name, values in theirs.state.items():
        assert ours.state[name].keys() == values.keys()
        for key, value in values.items():
            found = ours.state[name][key]
            assert getattr(found, "shape", ()) == getattr(value, "shape", ()), key
            a, b = (np.asarray(one.read() if hasattr(one, "read") else one) for one in (found, value))
            assert np.abs(a - b).mean() <= 0.05 * np.abs(b).mean(), f"{key} of {name}"


def test_custom_optimizer_resumes_bit_for_bit(corpus: Path, tmp_path: Path, ranks: RankPool) -> None:
    given = {**settings("odd"), "strategy": "full_shard", "train__steps": 4, "train__micro_batch_size": 6}
    assert ranks.run(2, leg, tmp_path / "whole", corpus, given) == 0
    for until in (2, 4):
        assert ranks.run(2, leg, tmp_path / "parts", corpus, {**given, "train__stop_after": until}) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    weights = [(tmp_path / one / "final" / "model.safetensors").read_bytes() for one in ("whole", "parts")]
    assert weights[0] == weights[1]


def regroup(groups: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build an optimizer with its own groups: matrices, other parameters, and one without parameters."""
    parameters = [p for group in groups for p in group["params"]]
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    divided: Any = [{"params": matrices}, {"params": others}, {"params": []}]
    return torch.optim.NAdam(divided, lr, weight_decay=weight_decay)


def test_custom_optimizer_with_its_own_groups_resumes(corpus: Path, tmp_path: Path) -> None:
    changes = {**settings("nadam"), "train__optimizer": f"{HERE}:regroup", "strategy": "no_shard"}
    assert leg(tmp_path / "whole", corpus, {**changes, "train__steps": 4}) == 0
    for until in (2, 4):
        there = {**changes, "train__steps": 4, "train__stop_after": until}
        assert leg(tmp_path / "parts", corpus, there) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


# -- errors ---------------------------------------------------------------------------------------


class KeepsShards(torch.optim.NAdam):
    """Optimizer whose state depends on the shard of a rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                part = p.to_local() if hasattr(p, "to_local") else p
                self.state[p].setdefault("norm", float(part.norm()))


class CountsOnHost(torch.optim.NAdam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1


class CreatesLate(torch.optim.NAdam):
    def __init__(self, groups: Any, lr: float, capturable: bool = False) -> None:
        super().__init__(groups, lr, capturable=capturable)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        for values in self.state.values() if self.steps > 1 else ():
            values["late"] = 1


class Fails(torch.optim.NAdam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ZeroDivisionError("one by none")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch.optim:NAdm": ({}, r"torch\.optim has no NAdm; did you mean NAdam\?"),
    "torch.optim:NAdam(beta=0.1)": ({}, r"unexpected keyword argument 'beta'; did you mean betas\?"),
    "torch.optim:NAdam": (
        {"train__betas": [0.9, 0.999]},
        r"train\.betas: has no effect .* NAdam\(betas=\.\.\.\)",
    ),
    "torch.optim:Adafactor": ({"strategy": "zero2"}, r"ZeRO's flat partitions; set strategy to full_shard"),
    f"{HERE}:Odd": (
        {"train__weight_decay": 0.1},
        r"which has no argument weight_decay; set train.weight_decay to 0",
    ),
    f"{HERE}:Fails": (
        {},
        r"raises an error \(ZeroDivisionError: one by none; test_custom_optimizer\.py, line \d+\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_custom_optimizer_with_errors_is_rejected(name: str, corpus: Path, tmp_path: Path) -> None:
    given, told = REFUSED[name]
    with pytest.raises(UserError, match=told) as caught:
        resolve_run(configured(tmp_path, corpus, train__optimizer=name, **given), "cpu")
    assert "\n" not in str(caught.value)


def test_custom_optimizer_state_must_agree_between_ranks(
    corpus: Path, tmp_path: Path, ranks: RankPool
) -> None:
    given = {**settings("nadam"), "strategy": "full_shard", "train__optimizer": f"{HERE}:KeepsShards"}
    with pytest.raises(AssertionError, match=r"the state 'norm' of .* differs between the ranks that share"):
        ranks.run(2, leg, tmp_path, corpus, given)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{HERE}:CreatesLate", r"creates the state 'late' of .* after its first step, but XLA compiles"),
        (f"{HERE}:CountsOnHost", r"the state 'count' of .* changes on the host, so XLA would compile"),
        ("torch.optim:SGD(momentum=0.9, dampening=0.5)", r"creates state from the first gradient"),
    ],
)
def test_custom_optimizer_that_xla_cannot_compile_is_rejected(
    name: str, told: str, corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    config = configured(tmp_path, corpus, **BATCH, backend="xla", train__optimizer=name)
    with pytest.raises(AssertionError, match=told):
        engines.run("xla", 2, our_losses, config)
