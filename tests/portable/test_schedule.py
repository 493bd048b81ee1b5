"""Learning rate and weight decay of a step, as in transformers, and its batch and FLOPs."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, get_scheduler

from portable.adapters.adapter import build_training_model
from portable.batch_plan import compute_batch_plan, compute_total_steps
from portable.checks import check_config
from portable.config import RunConfig, load_config
from portable.data.samples.loader import iter_rank_positions
from portable.errors import UserError
from portable.model import build as models
from portable.model.build import AUTO_CLASSES
from portable.model.flops import _compute_idle_expert_share, compute_flops_per_token, get_experts_per_token
from portable.model.parameter_groups import assign_parameter_groups, list_decayed_names
from portable.optim.schedule import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    WarmupStableDecay,
    build_schedule,
)
from tests.composite import build_composite_config
from tests.runs import TINY_MODEL, checked
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(
    ("kind", "floor", "theirs", "params"),
    [
        (Cosine, 0.0, "cosine", None),
        (Cosine, 1e-4, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        (Linear, 0.0, "linear", None),
        (Constant, 0.0, "constant_with_warmup", None),
        (InverseSqrt, 0.0, "inverse_sqrt", None),
        (partial(InverseSqrt, timescale=3), 0.0, "inverse_sqrt", {"timescale": 3}),
    ],
)
def test_schedules_match_transformers(kind: Any, floor: float, theirs: str, params: Any, warmup: int) -> None:
    found = rates_of(theirs, warmup, 40, params)
    assert [kind(1e-3, floor, warmup, 40)(step) for step in range(40)] == pytest.approx(found, rel=1e-9)
    if theirs == "inverse_sqrt":
        lowest = [max(rate, 4e-4) for rate in found[warmup:]]
        ours = [kind(1e-3, 4e-4, warmup, 40)(step) for step in range(warmup, 40)]
        assert ours == pytest.approx(lowest, rel=1e-9)


@pytest.mark.parametrize("decay", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize(
    ("warmup", "warmup_type", "share", "floor"),
    [(0, "linear", 0.2, 0.0), (5, "cosine", 0.5, 0.1), (3, "1-sqrt", 0.0, 0.0), (11, "linear", 1.0, 0.3)],
)
def test_warmup_stable_decay_matches_transformers(
    decay: Any, warmup: int, warmup_type: Any, share: float, floor: float
) -> None:
    length = min(math.ceil(share * 23), 23 - warmup)
    params = {"num_decay_steps": length, "decay_type": decay, "warmup_type": warmup_type}
    found = rates_of("warmup_stable_decay", warmup, 23, {**params, "min_lr_ratio": floor})
    ours = WarmupStableDecay(1e-3, floor * 1e-3, warmup, 23, length / 23, decay, warmup_type)
    assert [ours(step) for step in range(23)] == pytest.approx(found, rel=1e-9, abs=1e-12)
    cut = WarmupStableDecay(1e-3, floor * 1e-3, warmup, 23, share, decay, warmup_type)
    assert [cut(step) for step in range(23)] == pytest.approx(found, rel=1e-9, abs=1e-12)


def rates_of(name: str, warmup: int, steps: int, params: dict[str, Any] | None = None) -> list[float]:
    """Return the learning rates of a schedule of transformers, as its Trainer steps it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=params)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def halving(step: int, total_steps: int, every: int = 10) -> float:
    return 0.5 ** (step // every) * (total_steps == 30)


def falling_below_zero(step: int, total_steps: int) -> float:
    return 1 - step


def test_custom_schedule_is_used() -> None:
    train = {"steps": 30, "learning_rate": 0.01, "schedule": f"{__name__}:halving(every=7)"}
    config = load_config({"train": train})
    assert config.train.warmup_ratio is None
    schedule = build_schedule(config.train, 30)
    halved = [0.01 * 0.5 ** (step // 7) for step in range(30)]
    assert [schedule(step) for step in range(30)] == pytest.approx(halved)


def test_custom_schedule_with_errors_is_rejected() -> None:
    def config(name: str, **more: Any) -> RunConfig:
        return checked({"train": {"schedule": f"{__name__}:{name}", "steps": 30, **more}})

    with pytest.raises(UserError, match=r"train.schedule: .*:falling_below_zero: returns -1 for step 2"):
        build_schedule(config("falling_below_zero").train, 30)(2)
    with pytest.raises(
        UserError, match=r"halving.*: raises an error \(ZeroDivisionError.*; correct the code"
    ):
        build_schedule(config("halving(every=0)").train, 30)(2)


@pytest.mark.parametrize("steps", [1, 7, 333])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 1.0])
def test_warmup_ratio_matches_trainer(steps: int, ratio: float) -> None:
    from transformers import TrainingArguments

    theirs = TrainingArguments(output_dir="/nowhere", warmup_steps=ratio) if ratio < 1 else None
    expected = steps if theirs is None else theirs.get_warmup_steps(steps)
    by_steps = load_config(None, {"train.steps": steps, "train.warmup_ratio": ratio})
    by_epochs = load_config(None, {"train.epochs": 2.5, "train.warmup_ratio": ratio})
    for config in (by_steps, by_epochs):
        assert build_schedule(config.train, steps).warmup_steps == expected
    both = load_config(None, {"train.warmup_ratio": ratio, "train.warmup_steps": 0})
    assert build_schedule(both.train, steps).warmup_steps == expected


# -- weight decay and groups -----------------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
TYPES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    # Name of a parameter, and whether it has weight decay, contrary to its number of dimensions.
    "gpt_oss": ("causal-lm", {"num_local_experts": 4}, "mlp.experts.gate_up_proj_bias", False),
    "gpt_oss, sinks": ("causal-lm", {"num_local_experts": 4}, "self_attn.sinks", True),
    "t5": ("seq2seq-lm", {"d_model": 16, "d_kv": 8, "d_ff": 24}, "relative_attention_bias.weight", False),
    "mamba": ("causal-lm", {"state_size": 4}, "mixer.D", True),
    "rwkv": ("causal-lm", {"attention_hidden_size": 16}, "attention.time_decay", True),
    # Types for which both rules agree.
    "qwen3": ("causal-lm", {}, "q_norm.weight", False),
    "bert": ("masked-lm", {}, "embeddings.LayerNorm.weight", False),
}


@pytest.mark.parametrize("name", TYPES)
def test_weight_decay_matches_trainer(name: str) -> None:
    task, settings, telling, decays = TYPES[name]
    model_type = name.split(",")[0]
    known = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **sizes | settings)
        model: nn.Module = getattr(transformers, AUTO_CLASSES[task]).from_config(config)
    rule: Any = transformers.Trainer.get_decay_parameter_names
    assert list_decayed_names(model) == set(rule(None, model))
    found = [other for other, _ in model.named_parameters() if other.endswith(telling)]
    assert found and all((other in list_decayed_names(model)) == decays for other in found)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["nrom"], "'nrom' matches no parameter; did you mean norm?"),
        (["embed"], "'embed' matches only parameters that are frozen; correct or remove this pattern"),
        (["mlp", "up_proj"], "'up_proj' matches only parameters that an earlier pattern matches; correct"),
        (["("], "'(' is not a valid regular expression"),
    ],
)
def test_parameter_group_without_effect_is_rejected(patterns: list[str], message: str) -> None:
    groups = [{"pattern": pattern} for pattern in patterns]
    given = {"model.config": TINY_MODEL, "train.frozen": "embed", "train.parameter_groups": groups}
    with pytest.raises(UserError) as raised:
        config = load_config(None, given)
        assign_parameter_groups(
            models.build_and_freeze_model(models.load_model_config(config.model), config), config.train
        )
    assert str(raised.value).startswith(f"train.parameter_groups: {message}")


# -- batches and operations ------------------------------------------------------------------------------


def batches(**train: object) -> RunConfig:
    return load_config({"train": train})


@pytest.mark.parametrize(
    ("total", "world", "micro", "accumulation"),
    [(8, 1, 4, 2), (8, 4, 2, 1), (12, 3, 4, 1), (7, 7, 1, 1)],
)
def test_batch_plan_default_micro_batch_follows_world_size(
    total: int, world: int, micro: int, accumulation: int
) -> None:
    plan = compute_batch_plan(batches(global_batch_size=total), world_size=world, rank=0)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (micro, accumulation)
    assert plan.micro_batch_size * plan.accumulation_steps * world == total


@pytest.mark.parametrize(("micro", "size", "accumulation"), [(None, 3, 1), (1, 1, 3), (2, 2, 2), (3, 3, 1)])
def test_batch_plan_of_uneven_ranks_takes_sequences_once(
    micro: int | None, size: int, accumulation: int
) -> None:
    config = batches() if micro is None else batches(micro_batch_size=micro)
    check_config(config)
    taken: list[int] = []
    for rank in range(3):
        plan = compute_batch_plan(config, world_size=3, rank=rank)
        assert (plan.micro_batch_size, plan.accumulation_steps) == (size, accumulation)
        loader = iter_rank_positions(
            position=16, global_batch_size=8, micro_batch_size=size, rank=rank, world_size=3
        )
        for positions, trained in islice(loader, accumulation):
            assert len(positions) == size
            taken += positions[:trained]
    assert taken == list(range(16, 24))


def test_batch_plan_error_names_divisors() -> None:
    with pytest.raises(UserError, match=r"divided evenly among 9 ranks; set train.global_batch_size to 9"):
        compute_batch_plan(batches(), world_size=9, rank=0)
    with pytest.raises(UserError, match=r"4 does not divide 2, the number .*; use a divisor of 2, such as 2"):
        compute_batch_plan(batches(micro_batch_size=4), world_size=4, rank=0)


def test_dropout_seed_depends_on_samples_not_on_rank() -> None:
    config = batches(micro_batch_size=1)
    alone = compute_batch_plan(config, world_size=1, rank=0)
    second = compute_batch_plan(config, world_size=2, rank=1)
    assert (
        second.compute_dropout_seed(16, 3)
        == alone.compute_dropout_seed(16, 4 + 3)
        == alone.compute_dropout_seed(23, 0)
    )
    seeds = {alone.compute_dropout_seed(first, i) for first in range(0, 800, 8) for i in range(8)}
    assert len(seeds) == 800


def test_compute_total_steps_converts_epochs() -> None:
    assert compute_total_steps(batches(steps=7), 100) == 7
    assert compute_total_steps(batches(epochs=2, global_batch_size=8), 100) == 25
    assert compute_total_steps(batches(epochs=0.01, global_batch_size=8), 100) == 1
    # As documented in docs/migrate.md; the Trainer's epochs end in a smaller batch, 33 steps in all.
    assert compute_total_steps(batches(epochs=3, global_batch_size=10), 105) == 32


@pytest.mark.parametrize(
    "given",
    [
        {"model.config.tie_word_embeddings": False, "train.frozen": "embed|layers.0|layers.2"},
        {"model.config.tie_word_embeddings": False, "train.frozen": "layers"},
        {"model.config": tiny_config("qwen2_moe")},  # only the experts of a token
    ],
    ids=["in part", "layers", "mixture"],
)
def test_flops_per_token_match_torch_counter(given: dict[str, Any]) -> None:
    run = load_config(None, {**given, "model.attention": "eager"})  # it counts no attention kernels of CPUs
    config = models.load_model_config(run.model)
    model = models.build_and_freeze_model(config, run).to_empty(device="cpu")
    if "model.config" in given:
        model.set_experts_implementation("eager")  # nor products of groups
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(64)[None]).logits.sum().backward()
    assert compute_flops_per_token(model, config, 64) == pytest.approx(
        counter.get_total_flops() / 64, rel=0.02
    )


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}),
        ("aria_text", {"moe_num_experts": 8, "moe_topk": 2}),
        ("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2}),
    ],
)
def test_experts_of_token_are_read_from_config(model_type: str, sizes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **sizes)
    assert get_experts_per_token(config) == 2
    assert _compute_idle_expert_share(config) == 0.75


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_flops_per_token_leave_out_image_tower(adapter: str | None, tmp_path: Path) -> None:
    """The work of an image tower depends on the images, and not on the tokens."""
    flops = []
    for depth in (1, 3):
        config = build_composite_config("qwen3_vl")
        config.vision_config.depth = depth
        config.save_pretrained(tmp_path)
        run = load_config(None, {"adapter.type": adapter, "model.name_or_path": str(tmp_path)})
        model = build_training_model(models.load_model_config(run.model), run)
        assert sum("visual.blocks" in name for name, _ in model.named_modules()) > depth
        flops.append(compute_flops_per_token(model, model.config, 64))
    assert flops[0] == flops[1]
