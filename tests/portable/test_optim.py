"""What weight decay is for: the parameters that the Trainer's own rule names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from portable.config import load_config
from portable.errors import UserError
from portable.model.build import AUTO_CLASSES
from portable.model.groups import decaying, groups_of
from portable.optim.optimizers import parameter_groups
from tests.engines import Engines
from tests.gpu.test_parity import Losses, assert_close, our_losses
from tests.runs import configured

SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
TYPES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    # What one of its parameters is called, and whether weight decay is for it: unlike by the number of dims.
    "gpt_oss": ("causal-lm", {"num_local_experts": 4}, "mlp.experts.gate_up_proj_bias", False),
    "gpt_oss, sinks": ("causal-lm", {"num_local_experts": 4}, "self_attn.sinks", True),
    "t5": ("seq2seq-lm", {"d_model": 16, "d_kv": 8, "d_ff": 24}, "relative_attention_bias.weight", False),
    "mamba": ("causal-lm", {"state_size": 4}, "mixer.D", True),
    "rwkv": ("causal-lm", {"attention_hidden_size": 16}, "attention.time_decay", True),
    # And where the two agree.
    "qwen3": ("causal-lm", {}, "q_norm.weight", False),
    "bert": ("masked-lm", {}, "embeddings.LayerNorm.weight", False),
}


@pytest.mark.parametrize("name", TYPES)
def test_weight_decay_is_for_what_the_trainer_has_it_for(name: str) -> None:
    task, settings, telling, decays = TYPES[name]
    model_type = name.split(",")[0]
    known = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **sizes | settings)
        model: nn.Module = getattr(transformers, AUTO_CLASSES[task]).from_config(config)
    rule: Any = transformers.Trainer.get_decay_parameter_names
    assert decaying(model) == set(rule(None, model))
    found = [other for other, _ in model.named_parameters() if other.endswith(telling)]
    assert found and all((other in decaying(model)) == decays for other in found)


def test_what_is_inside_a_norm_does_not_decay() -> None:
    norm = nn.LayerNorm(4)
    norm.inner = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": norm, "ab": nn.Linear(4, 4, bias=False)})
    rule: Any = transformers.Trainer.get_decay_parameter_names
    assert decaying(model) == set(rule(None, model)) == {"ab.weight"}


def grouped(model: nn.Module, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups of ``model``, of names."""
    settings = load_config({"train": {"parameter_groups": list(groups)}}).train
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = parameter_groups(
        dict(model.named_parameters()), groups_of(model, settings), settings.learning_rate
    )
    return [{**group, "params": [names[p] for p in group["params"]]} for group in found]


@pytest.fixture
def model() -> nn.Module:
    parts = {"a": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)}
    parts["c"].requires_grad_(False)
    tied: Any = nn.ModuleDict({**parts, "d": nn.Linear(2, 2, bias=False)})
    tied["d"].weight = tied["b"].weight
    return cast("nn.Module", tied)


def test_groups_of_a_pattern(model: nn.Module) -> None:
    """The first pattern counts, a tied parameter has all its names, biases and norms stay without decay."""
    spared = ["a.bias", "norm.weight", "norm.bias", "b.bias"]
    weights = {"params": ["a.weight", "b.weight"], "weight_decay": 0.1}
    assert grouped(model) == [weights, {"params": spared, "weight_decay": 0.0}]
    found = grouped(
        model,
        {"pattern": "^d", "learning_rate": 3e-3},
        {"pattern": r"^[ab]\.|norm", "weight_decay": 0.5},
    )
    assert found == [
        {"params": ["b.weight"], "weight_decay": 0.1, "lr": 3e-3, "initial_lr": 3e-3},
        {"params": ["a.weight"], "weight_decay": 0.5},
        {"params": spared, "weight_decay": 0.0},
    ]


def test_a_pattern_without_effect_is_refused(model: nn.Module) -> None:
    for patterns, message in (
        (["nrom"], "'nrom' matches no parameter; did you mean norm?"),
        (["c"], "'c' matches only parameters that are frozen; correct or remove it"),
        (["a", r"a\.w"], r"'a\\.w' matches only parameters that an earlier pattern matches; correct"),
        (["("], "'(' is not a regular expression"),
    ):
        with pytest.raises(UserError) as raised:
            grouped(model, *({"pattern": pattern} for pattern in patterns))
        assert str(raised.value).startswith(f"train.parameter_groups: {message}")


OSS: dict[str, Any] = {
    "model__config": {**SMALL, "model_type": "gpt_oss", "num_local_experts": 4, "vocab_size": 384},
    "data__seq_len": 16,
    "train__global_batch_size": 4,
    "train__weight_decay": 3.0,
    "train__learning_rate": 0.03,
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    return our_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **OSS))


@pytest.mark.parametrize("name", ["full_shard", "zero2"])
def test_it_is_by_name_where_parameters_are_cut(
    name: str, truth: Losses, tmp_path: Path, corpus: Path, engines: Engines
) -> None:
    """Flat or sharded, what decays is the same; at this rate another group shows in the fourth step."""
    config = configured(tmp_path, corpus, **OSS, strategy=name)
    found = engines.run(name, 2, our_losses, config)
    assert_close(found, truth, 1e-5, falls=-10)
