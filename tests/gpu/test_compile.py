"""torch.compile per layer: at most one compilation per kind of layer. ``test_settings`` compares losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from portable.checks import check_config
from portable.config import RunConfig, load_config
from portable.engines.compiling import compile_layers
from portable.errors import UserError
from portable.evaluation.metrics import evaluate
from portable.registry import World, load_backend_package
from portable.run.batches import build_eval_loader
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured

# The compiled graphs do not depend on the number of ranks, so each value is used once.
EAGER: dict[str, Any] = {"compile": True, "compile_backend": "eager"}


def graphs() -> int:
    """Return the number of graphs that dynamo has compiled in this process since its reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compilations(config: RunConfig) -> list[int]:
    """Return the number of graphs after each of three steps, an evaluation, a step and an evaluation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with opened(config) as trial:

        def step() -> int:
            trial.step(1e-3)
            return graphs()

        def evaluation() -> int:
            held_out = trial.run.data.first_eval
            assert held_out is not None
            evaluate(trial.backend, trial.engine, build_eval_loader(trial.run, held_out))
            return graphs()

        return [step(), step(), step(), evaluation(), step(), evaluation()]


@pytest.mark.parametrize(
    ("world_size", "recompute"),
    [(1, "none"), (2, "full"), (1, "selective")],
)
def test_compilations_do_not_grow_with_layers(
    world_size: int, recompute: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings: dict[str, Any] = {
        **EAGER,
        "memory__activation_checkpointing": recompute,
        "train__global_batch_size": 2 * world_size,
        "train__micro_batch_size": 1,
    }
    few, many = (
        ranks.run(
            world_size,
            compilations,
            configured(
                tmp_path, corpus, model__config={**TINY_MODEL, "num_hidden_layers": layers}, **settings
            ),
        )
        for layers in (2, 3)
    )
    assert few == many
    assert few[0] >= 1
    assert few[0] == few[1] == few[2]  # the first step compiles everything for training
    assert few[3] == few[4] == few[5]  # and the first evaluation the rest


@pytest.fixture
def fresh() -> Iterator[None]:
    saved = torch._dynamo.config.get_config_copy()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.load_config(saved)


def test_compile_layers_compiles_all_different_layers(fresh: None) -> None:
    """By default, the ninth layer of a kind would run uncompiled."""
    config = GPT2Config(
        vocab_size=32,
        n_embd=8,
        n_head=2,
        n_layer=10,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    compile_layers(model, load_config(None, EAGER))
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    assert graphs() == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile_backend": "inductr"}, "compile_backend: unknown backend inductr; use one of "),
        ({"compile_backend": "cpu"}, "compile_backend: unknown backend cpu; use one of "),
        (
            {"compile_mode": "reduce-overhead", "strategy": "zero2"},
            "compile_mode: reduce-overhead captures CUDA graphs",
        ),
        ({"strategy": "zero3"}, "compile: is not supported with strategy zero3"),
    ],
)
def test_compile_rejects_invalid_settings(
    settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path
) -> None:
    config = configured(tmp_path, corpus, compile=True, **settings)
    with pytest.raises(UserError) as refused:
        check_config(config, is_resolved=True)
        load_backend_package("cpu").check_config(config, World(1))
    assert message in str(refused.value)
