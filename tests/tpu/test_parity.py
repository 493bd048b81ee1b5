"""Losses on virtual XLA devices compared with the CPU backend: models, strategies, devices, precisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.parity import Steps, take_steps
from tests.promises import record
from tests.runs import TINY_MODEL, configured
from tests.xla import XlaPool

STEPS = 6
BATCH: dict[str, Any] = {"train__global_batch_size": 8, "train__micro_batch_size": 2}
WIDTHS = {"vocab_size": 384, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model__config": TINY_MODEL},
    "gpt2": {
        "model__config": {
            "model_type": "gpt2",
            "vocab_size": 384,
            "n_positions": 64,
            "n_embd": 48,
            "n_layer": 1,
            "n_head": 4,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        }
    },
    "qwen3": {
        "model__config": {
            **WIDTHS,
            "model_type": "qwen3",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "tie_word_embeddings": False,
        }
    },
    "bert": {
        "model__task": "masked-lm",
        "data__packing": False,
        "model__config": {
            **WIDTHS,
            "model_type": "bert",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0,
            "attention_probs_dropout_prob": 0,
        },
    },
    "mixtral": {
        "model__config": {
            **WIDTHS,
            "model_type": "mixtral",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
        }
    },
    # With a smooth activation: at the kink of a ReLU the last bit of a sum decides over an entire gradient.
    "t5": {
        "model__task": "seq2seq-lm",
        "data__target_field": "text",
        "model__config": {
            "model_type": "t5",
            "vocab_size": 384,
            "d_model": 48,
            "d_ff": 80,
            "d_kv": 12,
            "num_layers": 1,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.0,
        },
    },
}


# Compilation takes most of the time, and is the same for each layer. Therefore, all models above except Llama
# have one layer.
ONE_LAYER: dict[str, Any] = {"model__config": {**TINY_MODEL, "num_hidden_layers": 1}}


def on_xla(
    xla: XlaPool,
    devices: int,
    folder: Path,
    corpus: Path,
    steps: int = STEPS,
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> Steps:
    settings = {**BATCH, "backend": "xla", "train__steps": steps, **settings}
    config = configured(folder, corpus, **settings)
    taken: Steps = xla.run(devices, take_steps, config, steps, environment=environment)
    return taken


def assert_close(ours: Steps, theirs: Steps, tolerance: float) -> None:
    for step, (one, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert one == pytest.approx(other, rel=tolerance), f"loss of step {step}"
        record([one], [other], tolerance)
    assert ours.losses[-1] < ours.losses[0] - 0.3  # it is learning, so that equal losses mean equal updates


def assert_frugal(steps: Steps, graphs: dict[str, int]) -> None:
    """Check that at most these graphs were compiled, and that no value was read from the device."""
    assert steps.graphs == graphs
    assert steps.figures["graphs_compiled"] <= sum(graphs.values())
    assert steps.figures["transfers_from_device"] == 0


def cpu_steps(folder: Path, corpus: Path, steps: int, **settings: Any) -> Steps:
    return take_steps(configured(folder, corpus, **{**BATCH, "train__steps": steps, **settings}), steps)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[..., Steps]:
    """Return steps on the CPU backend, with clipping, by settings."""
    done: dict[str, Steps] = {}

    def taken(source: Path = corpus, steps: int = STEPS, **settings: Any) -> Steps:
        if (key := repr((source, steps, settings))) not in done:
            done[key] = cpu_steps(tmp_path_factory.mktemp("truth"), source, steps, **settings)
        return done[key]

    return taken


@dataclass(frozen=True)
class Case:
    """Settings of the run on XLA and on the CPU, settings only for XLA, and the tolerance of the losses."""

    both: dict[str, Any]
    xla: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6
    devices: int = 4
    graphs: dict[str, int] = field(default_factory=lambda: {"step": 1})


TWO = {"micro-batch": 1, "update": 1}
"""The graphs of a step of several micro-batches."""
RECOMPUTED: dict[str, Any] = {"memory__activation_checkpointing": "full"}
HYBRID: dict[str, Any] = {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}
BF16: dict[str, Any] = {"precision": "bf16", **RECOMPUTED}
SGD: dict[str, Any] = {**ONE_LAYER, "train__optimizer": "sgd", "train__learning_rate": 0.1}
MUON: dict[str, Any] = {**ONE_LAYER, "train__optimizer": "muon", "train__learning_rate": 0.03}
RULES: dict[str, Any] = {"xla__sharding": {"mlp": 1, "k_proj|v_proj": None}}
WINDOWS: dict[str, Any] = {
    "data__packing": "documents",
    "data__seq_len": 64,
    "model__config": {
        **TINY_MODEL,
        "model_type": "mistral",
        "sliding_window": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    },
}
TWO_A_SEQUENCE: dict[str, Any] = {"context_parallel_size": 2}
FOUR_A_SEQUENCE: dict[str, Any] = {"context_parallel_size": 4}
UNTIED: dict[str, Any] = {"model__config": {**TINY_MODEL, "tie_word_embeddings": False}}
CASES: dict[str, Case] = {
    **{name: Case(settings) for name, settings in MODELS.items()},
    "one device": Case(MODELS["llama"], devices=1, graphs=TWO),
    "two devices": Case(MODELS["llama"], devices=2, graphs=TWO),
    "accumulation and recomputation": Case(
        ONE_LAYER, {"train__micro_batch_size": 1, **RECOMPUTED}, graphs=TWO
    ),
    "no_shard": Case(ONE_LAYER, {"strategy": "no_shard"}),
    "shard_grad_op": Case(ONE_LAYER, {"strategy": "shard_grad_op"}),
    "hybrid_shard": Case(ONE_LAYER, HYBRID),
    "a barrier in the backward pass": Case(ONE_LAYER, {"xla__optimization_barrier_in_backward": True}),
    "first dim, and a rule": Case(ONE_LAYER, {"xla__shard_param_on_dim_0": True, **RULES}),
    # No input of the first layer needs a gradient, but its parameters do.
    "recomputation after frozen parameters": Case({**UNTIED, "train__frozen": "embed_tokens"}, RECOMPUTED),
    "without clipping": Case({**ONE_LAYER, "train__max_grad_norm": None}),
    "SGD with momentum": Case({**SGD, "train__betas": [0.9, 0.9]}),
    "muon, hybrid_shard": Case(MUON, HYBRID, 1e-5),
    # The attention mask of documents has no effect here, because their lengths are not read.
    "noise": Case({**ONE_LAYER, "data__packing": False}, {"train__neftune_noise_alpha": 1e-7}),
    "two devices a sequence, twice": Case(WINDOWS, TWO_A_SEQUENCE, graphs=TWO),
    "four devices a sequence, recomputed": Case(WINDOWS, {**FOUR_A_SEQUENCE, **RECOMPUTED}, graphs=TWO),
    "two devices a sequence, experts": Case(MODELS["mixtral"], TWO_A_SEQUENCE, graphs=TWO),
    "two devices a sequence, learned positions": Case(MODELS["gpt2"], TWO_A_SEQUENCE, graphs=TWO),
    "two devices a sequence, hybrid_shard": Case(WINDOWS, {**TWO_A_SEQUENCE, **HYBRID}, graphs=TWO),
    "two devices a sequence, muon": Case(MUON, TWO_A_SEQUENCE, 1e-5, graphs=TWO),
}
ROUNDED: dict[str, dict[str, Any]] = {
    "buffers in a type of their own": {"xla__buffer_dtype": "bfloat16"},
    "bf16": BF16,
    "bf16, hybrid_shard_zero2": {**BF16, **HYBRID, "strategy": "hybrid_shard_zero2"},
}


@pytest.mark.parametrize("name", CASES)
def test_xla_losses_equal_cpu_backend(
    name: str, on_cpu: Callable[..., Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    case = CASES[name]
    steps = on_xla(xla, case.devices, tmp_path, corpus, **case.both, **case.xla)
    truth = on_cpu(**case.both)
    assert_close(steps, truth, case.tolerance)
    assert steps.norms == pytest.approx(truth.norms, rel=1e-4 if case.tolerance < 1e-5 else 1e-3)
    assert_frugal(steps, case.graphs)


def placed() -> tuple[list[list[int]], list[list[int]], str]:
    """Return a batch placed by one host and by one of several hosts, and the error for a too small group."""
    import torch

    from portable.config import load_config
    from portable.errors import UserError
    from portable.tpu.xla import layout, runtime

    runtime.start_xla_runtime()
    given: dict[str, Any] = {"backend": "xla", **TWO_A_SEQUENCE}
    laid = layout.MeshLayout(load_config(None, given), 4)
    batch = torch.arange(24).reshape(4, 6)
    with pytest.MonkeyPatch.context() as patch:
        here = laid.place_batch_tensor(batch)
        patch.setattr(runtime.xr, "process_count", lambda: 2)
        there = laid.place_batch_tensor(batch)
    try:
        layout.MeshLayout(
            load_config(None, {**given, "strategy": "hybrid_shard", "fsdp.shard_group_size": 1}), 4
        )
    except UserError as error:
        return here.tolist(), there.tolist(), str(error)
    return here.tolist(), there.tolist(), ""


def test_mesh_layout_places_batch_of_each_host(xla: XlaPool) -> None:
    here, there, said = xla.run(4, placed)
    assert here == there == [list(range(at, at + 6)) for at in range(0, 24, 6)]
    assert said == (
        "context_parallel_size: the shard group size (1) is not divisible by 2; use a divisor of 1"
    )


@pytest.mark.parametrize("settings", ROUNDED.values(), ids=list(ROUNDED))
def test_xla_16_bit_losses_match_cpu_backend(
    settings: dict[str, Any], on_cpu: Callable[..., Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    steps, truth = on_xla(xla, 4, tmp_path, corpus, **ONE_LAYER, **settings), on_cpu(**ONE_LAYER)
    assert_close(steps, truth, 1e-2)
    assert steps.losses != truth.losses  # it was rounded


def test_recomputation_repeats_dropout_on_xla(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    config = {**ONE_LAYER["model__config"], "attention_dropout": 0.2}
    plain = on_xla(xla, 4, tmp_path / "a", corpus, model__config=config)
    again = on_xla(xla, 4, tmp_path / "b", corpus, model__config=config, **RECOMPUTED)
    without = on_xla(xla, 4, tmp_path / "c", corpus, **ONE_LAYER)
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)
    assert plain.losses != without.losses
    assert_frugal(again, {"step": 1})
