"""Matrix products in fp8 with torchao, which a CPU emulates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

from portable.converters import open_checkpoint
from portable.model.fp8_layers import find_fp8_layers, install_fp8_layers
from tests.gpu.test_optimizers import WIDE, leg
from tests.ranks import RankPool
from tests.runs import losses

torchao_float8 = pytest.importorskip("torchao.float8")
BF16: dict[str, Any] = {"precision": "bf16", "model__config": WIDE}
NO_SHARD: dict[str, Any] = {"strategy": "no_shard"}


def test_fp8_layers_keep_names_and_parameters() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**WIDE, "num_hidden_layers": 2, "intermediate_size": 136}))
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    names = find_fp8_layers(model)
    install_fp8_layers(model, "rowwise", "cpu")
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    replaced = [
        name for name, m in model.named_modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear
    ]
    assert sorted(replaced) == sorted(names)
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    expected = {f"model.layers.{index}.{name}" for index in (0, 1) for name in attention}
    assert set(names) == expected - {"model.layers.1.self_attn.q_proj"}  # 136 is not a multiple of 16


def test_fp8_layers_include_shared_experts() -> None:
    """A routed expert may receive no token, but a shared expert receives all tokens."""
    model = DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            first_k_dense_replace=0,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        )
    )
    model.model.layers[0].mlp.experts.up_proj = nn.Linear(32, 32)
    names = [name for name in find_fp8_layers(model) if ".mlp." in name]
    assert names == [f"model.layers.0.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_layer_computes_products_of_rounded_values(recipe: str) -> None:
    """The output is compared with values that are rounded to fp8 by hand."""
    model = LlamaForCausalLM(LlamaConfig(**WIDE)).bfloat16()
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach().float()
    inputs = torch.randn(19, weight.shape[1], dtype=torch.bfloat16)
    install_fp8_layers(model, recipe, "cpu")
    output = model.model.layers[0].mlp.up_proj(inputs)

    def round_to_fp8(values: torch.Tensor) -> torch.Tensor:
        largest = values.abs().amax() if recipe == "tensorwise" else values.abs().amax(1, keepdim=True)
        scale = torch.finfo(torch.float8_e4m3fn).max / largest.double()
        scale = (
            scale.float() if recipe == "tensorwise" else torch.exp2(torch.floor(torch.log2(scale))).float()
        )
        return (values * scale).to(torch.float8_e4m3fn).float() / scale

    expected = round_to_fp8(inputs.float()) @ round_to_fp8(weight).T
    assert (output.float() - expected).norm() < 0.01 * expected.norm()
    exact = inputs.float() @ weight.T
    assert (output.float() - exact).norm() > 0.02 * exact.norm()


@pytest.mark.parametrize(("recipe", "size"), [("tensorwise", 1), ("rowwise", 2)])
def test_fp8_run_resumes_and_moves(
    recipe: str, size: int, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    """The losses are near the losses in bf16. A run resumes bit for bit, and moves from bf16."""
    settings = BF16 | {"fp8": recipe} | (NO_SHARD if size == 1 else {})
    bf16, whole, run, moved = (tmp_path / name for name in ("bf16", "whole", "run", "moved"))
    assert ranks.run(size, leg, bf16, corpus, settings | {"fp8": "none"}) == 0
    assert ranks.run(size, leg, whole, corpus, settings) == 0
    assert losses(whole) == pytest.approx(losses(bf16), rel=1e-2)
    assert losses(whole) != losses(bf16)
    assert ranks.run(size, leg, run, corpus, settings | {"train__stop_after": 2}) == 0
    assert ranks.run(size, leg, run, corpus, settings) == 0
    assert losses(run) == losses(whole)
    tensors, expected = (open_checkpoint(folder / "final").tensors for folder in (run, bf16))
    assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
    assert ranks.run(size, leg, moved, corpus, settings | {"fp8": "none", "train__stop_after": 2}) == 0
    shutil.copytree(moved, other := tmp_path / "other")
    allowed = {"checkpoint__allow_changes": True}
    assert ranks.run(size, leg, moved, corpus, settings | allowed | {"train__stop_after": 4}) == 0
    assert ranks.run(2, leg, moved, corpus, BF16 | allowed) == 0
    assert losses(moved) == pytest.approx(losses(bf16), rel=1e-2)
    with pytest.raises(Exception, match="allow-changes"):
        ranks.run(size, leg, other, corpus, settings)
