"""Updates during the backward pass (``train.fused_backward``) equal updates after it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from portable.config import RunConfig
from portable.engines.fsdp.fused_backward import FusedBackward
from portable.errors import RunError, UserError
from portable.model.build import build_model_on_meta, load_model_config
from portable.optim.optimizers import FusedAdamW
from portable.registry import World, load_backend_package
from portable.run.rank import run_rank
from tests.gpu.test_footprint import planned
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured
from tests.views import assert_same_bits, view

STEPS = 4
EXPERTS = {**TINY_MODEL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw, bf16, average": (1, {"precision": "bf16", "train__ema": 0.9}),
    "adafactor": (1, {"train__optimizer": "adafactor"}),
    "adamw_8bit": (1, {"train__optimizer": "adamw_8bit"}),
    "weights in bf16": (1, {"precision": "bf16", "train__master_dtype": "bf16"}),
    "sgd, recomputed layers": (
        1,
        {"train__optimizer": "sgd", "memory__activation_checkpointing": "full"},
    ),
    "adapter": (1, {"adapter__type": "lora"}),
    "experts": (1, {"model__config": EXPERTS}),
    "compiled": (1, {"compile": True, "compile_backend": "aot_eager"}),
    "chunked loss": (1, {"memory__loss_chunk_tokens": 7}),
    "groups": (1, {"train__parameter_groups": [{"pattern": "mlp", "learning_rate": 1e-2}]}),
    "full_shard": (2, {"strategy": "full_shard", "precision": "bf16"}),
    "shard_grad_op, adamw_8bit": (3, {"strategy": "shard_grad_op", "train__optimizer": "adamw_8bit"}),
    "hybrid_shard": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
}
"""Number of ranks and settings."""


def build_config(folder: Path, corpus: Path, ranks: int, *, fused: bool, **settings: Any) -> RunConfig:
    """Build the config of a run with one micro-batch per step and without clipping."""
    common: dict[str, Any] = {
        "train__global_batch_size": 12,
        "train__micro_batch_size": 12 // ranks,
        "train__max_grad_norm": None,
        "train__fused_backward": fused,
    }
    return configured(folder, corpus, **{**common, **settings})


def train(config: RunConfig, folder: Path) -> tuple[list[float], list[float], int]:
    """Train and save on a rank.

    Returns:
        Losses, gradient norms, and the largest number of gradients that existed at the same time.
    """
    most = 0
    with opened(config) as trial:
        trained = [parameter for parameter in trial.engine.model.parameters() if parameter.requires_grad]

        def count_gradients(_: torch.Tensor) -> None:
            nonlocal most
            most = max(most, sum(parameter.grad is not None for parameter in trained))

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(count_gradients)
        results = [trial.step() for _ in range(STEPS)]
        losses = trial.backend.read_to_host([result.loss for result in results])
        norms = trial.backend.read_to_host([result.grad_norm for result in results])
        folder.mkdir(parents=True, exist_ok=True)
        trial.engine.save_shards(folder, background=False).wait()
    return losses, norms, most


@pytest.mark.parametrize("name", CASES)
def test_fused_backward_matches_separate_updates(
    name: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    count, settings = CASES[name]
    results = [
        ranks.run(
            count,
            train,
            build_config(tmp_path / f"run-{fused}", corpus, count, fused=fused, **settings),
            tmp_path / f"saved-{fused}",
        )
        for fused in (False, True)
    ]
    (losses, norms, most_gradients), (fused_losses, fused_norms, most_fused_gradients) = results
    assert fused_losses == losses
    assert fused_norms == (norms if count == 1 else pytest.approx(norms, rel=1e-6))
    assert most_gradients > 10
    assert most_fused_gradients == 0
    assert_same_bits(view(tmp_path / "saved-True"), view(tmp_path / "saved-False"))


def test_run_resumes_with_and_without_fused_backward(tmp_path: Path, corpus: Path) -> None:
    short: dict[str, Any] = {"checkpoint__export": False, "log__sample_tokens": 0, "train__steps": 6}
    folders = [tmp_path / "whole", tmp_path / "legs"]
    assert run_rank("cpu", build_config(folders[0], corpus, 1, fused=False, **short)) == 0
    for stop, fused in ((2, True), (4, False), (None, True)):
        config = build_config(folders[1], corpus, 1, fused=fused, **short, train__stop_after=stop)
        assert run_rank("cpu", config) == 0
    assert_same_bits(*(view(folder / "checkpoints" / "step-000006") for folder in folders))


def test_plan_counts_gradients_of_one_parameter(tmp_path: Path, corpus: Path) -> None:
    """FSDP2 plans no gradients in addition to the gradients of the unit that is being reduced."""
    vocabulary = {"data__vocab_size": 384, "data__tokenizer": None}
    sizes = []
    for ranks, strategy, fused in ((1, "no_shard", False), (1, "no_shard", True), (2, "full_shard", True)):
        config = build_config(tmp_path, corpus, ranks, fused=fused, strategy=strategy, **vocabulary)
        sizes.append(planned(config, ranks).gradients)
    model = build_model_on_meta(load_model_config(config.model), config.model)
    elements = [parameter.numel() for parameter in model.parameters()]
    assert sizes == [4 * sum(elements), 4 * max(elements), 0]


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (2, {"strategy": "no_shard"}, "strategy no_shard sums gradients over 2 ranks only after"),
        (2, {"train__optimizer": "adafactor"}, "adafactor sums its moments over 2 ranks"),
        (1, {"train__micro_batch_size": 4}, ".*a step has 3 micro-batches.*train.micro_batch_size to 12"),
        (2, {"train__micro_batch_size": 3}, ".*a step has 2 micro-batches.*train.micro_batch_size to 6"),
    ],
)
def test_fused_backward_needs_complete_gradients(
    ranks: int, settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path
) -> None:
    config = build_config(tmp_path, corpus, ranks, fused=True, **settings)
    with pytest.raises(UserError, match=f"train.fused_backward: {message}"):
        load_backend_package("cpu").check_config(config, World(ranks))


def test_second_gradient_of_parameter_is_error() -> None:
    """A model that calls backward inside of its backward pass would update a parameter twice."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([{"params": [weight]}], lr=0.1, betas=(0.9, 0.9), eps=1e-8)
    fused = FusedBackward(optimizer, {weight: "layer.weight"}, torch.device("cpu"))
    fused.begin_backward(is_skipped=torch.tensor(False))
    weight.sum().backward()
    with pytest.raises(RunError, match=r"the gradient of layer\.weight in several parts"):
        weight.sum().backward()


def test_updates_stop_at_non_finite_gradient() -> None:
    """Later updates of the pass are skipped, and so is every update if the loss is not finite."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([{"params": [first, second]}], lr=0.1, betas=(0.9, 0.9), eps=1e-8)
    fused = FusedBackward(optimizer, {first: "first", second: "second"}, torch.device("cpu"))
    for is_skipped in (True, False):
        fused.begin_backward(is_skipped=torch.tensor(is_skipped))
        (first * torch.inf * second.detach()).sum().backward()
        second.sum().backward()
        assert (first == 1).all() and (second == 1).all()
        assert not torch.isfinite(fused.compute_grad_norm())
    fused.begin_backward(is_skipped=torch.tensor(False))
    second.sum().backward()
    assert (first == 1).all() and (second != 1).all()
