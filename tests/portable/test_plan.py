"""What a step takes: of the batch, of the epochs, and in operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from portable.batch_plan import plan_batches, total_steps
from portable.config import RunConfig, load_config
from portable.errors import UserError
from portable.model import build as models
from portable.model.flops import flops_per_token
from tests.tiny_models import tiny_config


def batches(**train: object) -> RunConfig:
    return load_config({"train": train})


@pytest.mark.parametrize(
    ("total", "world", "micro", "accumulation"),
    [(8, 1, 4, 2), (8, 4, 2, 1), (12, 3, 4, 1), (7, 7, 1, 1)],
)
def test_the_default_micro_batch_follows_the_world(
    total: int, world: int, micro: int, accumulation: int
) -> None:
    plan = plan_batches(batches(global_batch_size=total), world_size=world, rank=0)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (micro, accumulation)
    assert plan.micro_batch_size * plan.accumulation_steps * world == total


def test_what_cannot_be_divided_is_refused_with_what_can() -> None:
    with pytest.raises(UserError, match=r"8 sequences cannot be divided among 3 ranks; set it to 6 or 9"):
        plan_batches(batches(), world_size=3, rank=0)
    with pytest.raises(UserError, match=r"4 does not divide the 2 sequences .*; use 2 or another divisor"):
        plan_batches(batches(micro_batch_size=4), world_size=4, rank=0)
    config = batches(global_batch_size=24).replaced({"context_parallel_size": 3})
    with pytest.raises(UserError, match=r"4 devices cannot be divided into groups of 3; use a divisor of 4"):
        plan_batches(config, world_size=1, rank=0, devices_per_rank=4)
    with pytest.raises(UserError, match=r"2 ranks cannot be divided into groups of 3; use a divisor of 2"):
        plan_batches(config, world_size=2, rank=0, devices_per_rank=1)


@pytest.mark.parametrize(
    ("hosts", "devices", "parts", "expected"),
    [(2, 4, 2, (2, 1, 8, 2)), (4, 4, 4, (4, 3, 4, 1)), (4, 4, 8, (2, 1, 8, 1)), (4, 4, 16, (1, 0, 16, 1))],
)
def test_devices_that_share_sequences_may_be_those_of_several_hosts(
    hosts: int, devices: int, parts: int, expected: tuple[int, ...]
) -> None:
    """The last host's share: of how many, which one, sequences, and those of a micro-batch."""
    config = batches(global_batch_size=16, micro_batch_size=1).replaced({"context_parallel_size": parts})
    plan = plan_batches(config, world_size=hosts, rank=hosts - 1, devices_per_rank=devices, one_program=True)
    assert (plan.world_size, plan.rank, plan.sequences_per_rank, plan.micro_batch_size) == expected
    assert plan.part == (0, 1)  # the compiler cuts sequences


def test_dropout_is_keyed_by_the_samples_and_not_by_who_computes_them() -> None:
    config = batches(micro_batch_size=1)
    alone = plan_batches(config, world_size=1, rank=0)
    second = plan_batches(config, world_size=2, rank=1)
    assert second.dropout_seed(16, 3) == alone.dropout_seed(16, 4 + 3) == alone.dropout_seed(23, 0)
    seeds = {alone.dropout_seed(first, i) for first in range(0, 800, 8) for i in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)  # what torch.manual_seed takes


def test_epochs_become_steps() -> None:
    assert total_steps(batches(steps=7), 100) == 7
    assert total_steps(batches(epochs=2, global_batch_size=8), 100) == 25
    assert total_steps(batches(epochs=0.01, global_batch_size=8), 100) == 1
    # As docs/migrate.md has it; the Trainer's epochs end in a smaller batch, 33 steps in all.
    assert total_steps(batches(epochs=3, global_batch_size=10), 105) == 32


@pytest.mark.parametrize(
    "given",
    [
        {"model.config.tie_word_embeddings": False, "train.frozen": "embed|layers.0|layers.2"},
        {"model.config.tie_word_embeddings": False, "train.frozen": "layers"},
        {"model.config": tiny_config("qwen2_moe")},  # of the experts, only those that a token goes through
    ],
    ids=["in part", "layers", "mixture"],
)
def test_flops_are_those_that_torch_counts(given: dict[str, Any]) -> None:
    run = load_config(None, {**given, "model.attention": "eager"})  # it counts no attention kernels of CPUs
    config = models.model_config(run.model)
    model = models.training_model(config, run).to_empty(device="cpu")
    if "model.config" in given:
        model.set_experts_implementation("eager")  # nor products of groups
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(64)[None]).logits.sum().backward()
    assert flops_per_token(model, config, 64) == pytest.approx(counter.get_total_flops() / 64, rel=0.02)
