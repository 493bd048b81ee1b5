"""Losses compared with a hand-written loop: micro-batches, optimizers and precisions.

``test_engines`` tests the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from portable.batch import Batch
from portable.config import RunConfig
from portable.registry import create_backend
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests.parity import cross_entropy, opened, plain_steps
from tests.promises import record
from tests.runs import configured

STEPS = 4
"""Enough steps to pass the warmup and for every moment to matter. Each engine has a test over LONG steps."""
LONG = 30

Losses = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

Truth = dict[bool, Losses]
"""The hand-written loop's losses, with packed samples and with padded ones."""


def throughout(config: RunConfig, steps: int) -> RunConfig:
    """Return the run with a schedule of exactly `steps` steps, because the rate after its end would be 0."""
    return config.replaced({"train.steps": steps})


def our_losses(config: RunConfig, steps: int = STEPS) -> Losses:
    """Return loss and gradient norm of each step, with the parts of ``portable-train``."""
    with opened(throughout(config, steps)) as trial:
        results = [trial.step() for _ in range(steps)]
        return [(float(result.loss), float(result.grad_norm)) for result in results]


def plain_losses(
    config: RunConfig,
    steps: int = STEPS,
    criterion: Callable[[Tensor, Batch], tuple[Tensor, float]] = cross_entropy,
    prepared: Callable[[Any], list[dict[str, Any]]] | None = None,
    made: Callable[[list[dict[str, Any]]], Any] | None = None,
) -> Losses:
    """Train the same run without this project: one process, and the full batch at once.

    Args:
        config: Config of the run.
        steps: Number of steps.
        criterion: Loss function of :func:`tests.parity.plain_steps`.
        prepared: Function that freezes parameters of a model and returns the groups.
        made: Function that builds the optimizer of the groups.
    """
    backend = create_backend("cpu")
    run = prepare_run(resolve_run(throughout(config, steps), backend.name), backend)
    from transformers import AutoModelForCausalLM

    engine = restore_run(run, None).engine  # only for its initial weights
    model = AutoModelForCausalLM.from_config(run.model_config, attn_implementation="sdpa")
    model.load_state_dict(engine.model.state_dict())
    model.train()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": config.train.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    if prepared is not None:
        groups = prepared(model)
    beta1, beta2 = config.train.betas
    optimizer: Any
    if made is not None:
        optimizer = made(groups)
    elif config.train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=beta1)
    elif config.train.optimizer == "muon":
        optimizer = TorchMuon(groups, config)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(beta1, beta2), eps=config.train.eps)
    return plain_steps(model, optimizer, run, steps, criterion)


class TorchMuon:
    """torch's Muon for the matrices of the layers of a Llama, its AdamW for the rest."""

    def __init__(self, groups: list[dict[str, Any]], config: RunConfig) -> None:
        train, embedding = config.train, (config.model.config or {})["vocab_size"]
        made: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for of in made:
                held = [p for p in group["params"] if (p.ndim == 2 and p.shape[0] != embedding) == of]
                if held:
                    made[of].append({**group, "params": held})
        self._fp32 = config.precision == "fp32"
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(made[True], lr=0.0, momentum=train.muon_momentum, adjust_lr_fn=train.muon_rate)
        ]
        if made[False]:
            self._parts.append(torch.optim.AdamW(made[False], lr=0.0, betas=train.betas, eps=train.eps))
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # torch's code always multiplies in bf16, whose rounding differs from the rounding of shards
            if self._fp32:
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torch 2.9
                patch.setattr(torch, "bfloat16", torch.float32)  # torch 2.15
            for part in self._parts:
                part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()


def assert_close(ours: Losses, theirs: Losses, tolerance: float, *, falls: float = 0.3) -> None:
    assert len(ours) == len(theirs) >= STEPS
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one[0] == pytest.approx(other[0], rel=tolerance), f"loss of step {step}"
        record([one[0]], [other[0]], tolerance)
    assert ours[-1][0] < ours[0][0] - falls  # it is learning, so that equal losses mean equal updates


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Truth:
    folder = tmp_path_factory.mktemp("truth")
    return {
        packing: plain_losses(configured(folder, corpus, data__packing=packing)) for packing in (True, False)
    }


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_losses_equal_hand_written_loop(packing: bool, truth: Truth, tmp_path: Path, corpus: Path) -> None:
    ours = our_losses(configured(tmp_path, corpus, data__packing=packing, train__micro_batch_size=6))
    assert_close(ours, truth[packing], 1e-6)


@pytest.mark.parametrize(("packing", "micro_batch_size"), [(True, 1), (True, 3), (False, 2)])
def test_micro_batch_size_does_not_change_loss(
    packing: bool,
    micro_batch_size: int,
    truth: Truth,
    tmp_path: Path,
    corpus: Path,
) -> None:
    settings = {"data__packing": packing, "train__micro_batch_size": micro_batch_size}
    assert_close(our_losses(configured(tmp_path, corpus, **settings)), truth[packing], 1e-5)
