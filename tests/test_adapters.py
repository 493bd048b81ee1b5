"""Adapters on every engine, compared with a loop in plain torch and peft."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.config import RunConfig
from portable.registry import create_backend
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests.engines import ENGINES, Engines, accumulated
from tests.parity import plain_steps, take_steps
from tests.runs import TINY_MODEL, configured
from tests.test_engines import Seen, exercise
from tests.views import assert_same_bits, view

STEPS = 20
Losses = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

COMMON: dict[str, Any] = {
    "adapter__type": "lora",
    "train__micro_batch_size": 1,
    "train__global_batch_size": 12,
    "train__steps": STEPS,
    "train__learning_rate": 1e-2,
}


def peft_losses(config: RunConfig, steps: int = STEPS, quantize: Any = None) -> Losses:
    """Return the losses of :func:`train_with_peft`."""
    return train_with_peft(config, steps, quantize)[0]


def train_with_peft(config: RunConfig, steps: int = STEPS, quantize: Any = None) -> tuple[Losses, Any]:
    """Train the same run with only peft: one process, and the full batch at once.

    ``quantize(base, state)`` sets the values of the base model, and returns the other values.

    Returns:
        The losses, and the trained model of peft.
    """
    import peft
    import transformers

    from portable.model.build import AUTO_CLASSES

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    backend = create_backend("cpu")
    run = prepare_run(resolve_run(config.replaced({"adapter.base": "auto"}), backend.name), backend)
    engine = restore_run(run, None).engine  # only for its initial weights
    assert run.adapter is not None
    auto: Any = getattr(transformers, AUTO_CLASSES[config.model.task])
    base = auto.from_config(run.model_config, attn_implementation=run.model_config._attn_implementation)
    state = engine.model.state_dict()
    state = quantize(base, state) if quantize else state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, run.adapter.config)
    assert not model.get_base_model().load_state_dict(state, strict=not quantize).unexpected_keys
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    spared = ("bias", "norm")
    decay = [p for name, p in trained.items() if not any(word in name for word in spared)]
    rest = [p for name, p in trained.items() if any(word in name for word in spared)]
    groups = [
        {"params": decay, "weight_decay": config.train.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    beta1, beta2 = config.train.betas
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=(beta1, beta2), eps=config.train.eps
    )
    return plain_steps(model, optimizer, run, steps), model


def worst(ours: list[float], theirs: Losses) -> float:
    """Return the largest relative difference of two loss curves, both of which must fall."""
    assert len(ours) == len(theirs) > 0
    assert ours[-1] < ours[0] - 0.04  # it is learning, so that equal losses mean equal updates
    return max(abs(one - other) / other for one, (other, _) in zip(ours, theirs, strict=True))


UNTIED = {**TINY_MODEL, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MOE = {**TINY_MODEL, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
MOE |= {"num_experts_per_tok": 2}
T5 = {"model_type": "t5", "vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
T5 |= {"num_heads": 4, "dropout_rate": 0.0}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model__config": {**TINY_MODEL, "model_type": "qwen3", "head_dim": 12}},
    "gpt2": {"model__config": GPT2},
    "phi3": {"model__config": {**TINY_MODEL, "model_type": "phi3", "pad_token_id": 0}},
    "moe": {"model__config": MOE},
    "experts": {
        "model__config": MOE,
        "adapter__target_modules": ["q_proj"],
        "adapter__target_parameters": EXPERTS,
    },
    "t5": {
        "model__task": "seq2seq-lm",
        "model__config": T5,
        "data__target_field": "text",
        "data__seq_len": 16,
    },
    "dora": {"adapter__use_dora": True},
    "dora, conv1d": {"model__config": GPT2, "adapter__use_dora": True, "adapter__init": "gaussian"},
    "rslora": {"adapter__use_rslora": True, "adapter__target_modules": ["q_proj", "v_proj"]},
    "embedding": {
        "model__config": UNTIED,
        "adapter__target_modules": ["embed_tokens", "q_proj"],
        "adapter__use_dora": True,
    },
    "head": {
        "model__config": UNTIED,
        "adapter__modules_to_save": ["lm_head"],
        "memory__loss_chunk_tokens": 40,
        "train__learning_rate": 3e-3,
    },
    "tokens": {"adapter__trainable_token_indices": [97, 10, 32, 116]},
    "tokens of two tables": {
        "model__config": UNTIED,
        "adapter__trainable_token_indices": {"embed_tokens": [97, 32], "lm_head": [32, 10]},
    },
    "biases": {"model__config": {**TINY_MODEL, "attention_bias": True}, "adapter__bias": "all"},
    "one layer": {"adapter__layers": [1], "adapter__init": "orthogonal"},
    "ia3": {"adapter__type": "ia3", "train__learning_rate": 0.3},
}
SHORT = 4
"""Number of steps of the short tests."""


def settings_of(case: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, **CASES[case], **more}


@pytest.fixture(scope="module")
def truth(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the losses of the loop with peft, by case and number of steps."""

    @functools.cache
    def losses(case: str, steps: int) -> Losses:
        return peft_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **settings_of(case)), steps)

    return losses


@pytest.mark.parametrize("case", CASES)
def test_adapter_losses_equal_loop_with_peft(case: str, truth: Any, corpus: Path, tmp_path: Path) -> None:
    steps = STEPS if case in ("llama", "dora") else SHORT
    config = configured(tmp_path, corpus, **settings_of(case, train__micro_batch_size=12))
    assert worst(take_steps(config, steps).losses, truth(case, steps)) < 1e-6


RECOMPUTED = {"memory__activation_checkpointing": "full"}
MIXED: list[tuple[str, str, int, dict[str, Any]]] = [
    ("dora", "zero3", 2, {}),
    ("dora", "xla", 2, {"xla__scan_layers": True}),
    ("experts", "full_shard", 3, {}),
    ("experts", "zero3", 2, {}),
    ("experts", "xla", 2, {}),
    ("head", "zero1", 2, {"memory__loss_chunk_tokens": "auto"}),
    ("head", "xla", 4, {"memory__loss_chunk_tokens": "auto", **RECOMPUTED}),
    ("t5", "zero2", 2, RECOMPUTED),
    ("tokens", "zero2", 2, {}),
    ("tokens", "xla", 2, {}),
    ("biases", "hybrid_shard", 4, {}),
    ("ia3", "zero3", 2, RECOMPUTED),
    ("one layer", "full_shard", 2, {"compile": True, "compile_backend": "aot_eager"}),
]


@pytest.mark.parametrize(
    ("case", "name", "size", "more"), MIXED, ids=[f"{case}-{name}" for case, name, *_ in MIXED]
)
def test_adapter_losses_match_on_engines(
    case: str,
    name: str,
    size: int,
    more: dict[str, Any],
    truth: Any,
    engines: Engines,
    corpus: Path,
    tmp_path: Path,
) -> None:
    whole = {"train__micro_batch_size": 12 // size}
    config = configured(tmp_path, corpus, **settings_of(case, **{**whole, **ENGINES[name].settings, **more}))
    assert worst(engines.run(name, size, take_steps, config, SHORT).losses, truth(case, SHORT)) < 1e-5


@pytest.fixture(scope="module")
def one(engines: Engines, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("one")
    config = configured(folder / "run", corpus, **settings_of("dora", data__packing=False, train__steps=4))
    seen: Seen = engines.run("no_shard", 1, exercise, config, folder)
    return seen


@pytest.mark.parametrize("name", ["full_shard", "zero3", "xla"])
def test_adapter_engine_evaluates_generates_and_skips_updates(
    name: str, one: Seen, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    more = {**accumulated(2), **ENGINES[name].settings}
    settings = settings_of("dora", data__packing=False, train__steps=4, **more)
    seen: Seen = engines.run(name, 2, exercise, configured(tmp_path / "run", corpus, **settings), tmp_path)
    assert seen.losses == pytest.approx(one.losses, rel=1e-5)
    assert seen.evaluated == pytest.approx(one.evaluated, rel=1e-5)
    assert name == "xla" or seen.continued == one.continued  # which has a separate random generator
    assert seen.skipped == 1
    assert_same_bits(view(tmp_path / "masked"), view(tmp_path / "trained"))
    assert seen.models[1] == seen.models[0]
