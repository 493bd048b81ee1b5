"""What weight decay is for: the parameters that the Trainer's own rule names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from converters import open_checkpoint
from portable.model.build import AUTO_CLASSES
from portable.optim.optimizers import decaying, parameter_groups
from portable.run.rank import run_rank
from tests.gpu.test_fsdp import losses
from tests.gpu.test_parity import assert_close, our_losses
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines import Engines
    from tests.gpu.test_parity import Losses

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
    "llama": ("causal-lm", {}, "input_layernorm.weight", False),
    "qwen3": ("causal-lm", {}, "q_norm.weight", False),
    "gpt2": ("causal-lm", {"n_embd": 16, "n_layer": 1, "n_head": 2}, "ln_1.weight", False),
    "bert": ("masked-lm", {}, "embeddings.LayerNorm.weight", False),
}


def built(name: str) -> nn.Module:
    task, settings, _, _ = TYPES[name]
    known = AutoConfig.for_model(name.split(",")[0])
    config = AutoConfig.for_model(
        name.split(",")[0], **{k: v for k, v in SMALL.items() if hasattr(known, k)} | settings
    )
    with torch.device("meta"):
        return cast("nn.Module", getattr(transformers, AUTO_CLASSES[task]).from_config(config))


@pytest.mark.parametrize("name", TYPES)
def test_weight_decay_is_for_what_the_trainer_has_it_for(name: str) -> None:
    model = built(name)
    _, _, telling, decays = TYPES[name]
    rule: Any = transformers.Trainer.get_decay_parameter_names
    assert decaying(model) == set(rule(None, model))
    found = [other for other, _ in model.named_parameters() if other.endswith(telling)]
    assert found
    assert all((other in decaying(model)) == decays for other in found)


def test_what_is_inside_a_norm_does_not_decay() -> None:
    class Scaled(nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(4)
            self.inner = nn.Linear(4, 4)

    model = nn.ModuleDict({"a": Scaled(), "ab": nn.Linear(4, 4, bias=False)})
    rule: Any = transformers.Trainer.get_decay_parameter_names
    assert decaying(model) == set(rule(None, model)) == {"ab.weight"}


def test_groups_are_by_name_and_leave_out_what_is_frozen() -> None:
    parameters = {name: nn.Parameter(torch.zeros(2), requires_grad=name != "c") for name in "abc"}
    groups = parameter_groups(parameters, 0.1, {"b", "c"})
    found = [(group["params"], group["weight_decay"]) for group in groups]
    assert found == [([parameters["b"]], 0.1), ([parameters["a"]], 0.0)]


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


@pytest.mark.parametrize("name", ["full_shard", "zero2", "zero3"])
def test_it_is_by_name_where_parameters_are_cut(
    name: str, truth: Losses, tmp_path: Path, corpus: Path, engines: Engines
) -> None:
    """Flat or sharded, what decays is the same; at this rate another group shows in the fourth step."""
    config = configured(tmp_path, corpus, **OSS, strategy=name)
    found = engines.run(name, 2, our_losses, config)
    assert_close(found, truth, 1e-5, falls=-10)


def test_a_checkpoint_with_other_groups_goes_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is found by name: what a group was before has no bearing on it."""
    settings = {**OSS, "strategy": "no_shard", "train__steps": 4, "train__weight_decay": 1e-9}
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_rank("cpu", configured(whole, corpus, **settings)) == 0

    def by_dims(module: nn.Module) -> set[str]:
        return {name for name, p in module.named_parameters() if p.dim() >= 2}

    with monkeypatch.context() as patch:
        patch.setattr("gpu.fsdp.engine.decaying", by_dims)
        assert run_rank("cpu", configured(run, corpus, **settings, train__stop_after=2)) == 0
    first = [set(g["params"]) for g in optimizer_groups(run)]
    assert run_rank("cpu", configured(run, corpus, **settings)) == 0
    assert first != [set(g["params"]) for g in optimizer_groups(run)]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6)


def optimizer_groups(folder: Path) -> Any:
    optimizer = open_checkpoint(folder).optimizer
    assert optimizer is not None
    return optimizer.param_groups
