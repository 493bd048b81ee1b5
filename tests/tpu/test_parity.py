"""Losses on virtual XLA devices against the CPU backend: models, strategies, devices, precisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.parity import Steps, take_steps
from tests.runs import TINY_MODEL, configured, write_labelled

if TYPE_CHECKING:
    from pathlib import Path

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
    # With a smooth activation: at the kink of a ReLU the last bit of a sum decides over a whole gradient.
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


# Compiling takes most of the time, and what follows is the same for each layer. So the models above have one
# each, but for Llama.
ONE_LAYER: dict[str, Any] = {"model__config": {**TINY_MODEL, "num_hidden_layers": 1}}


def on_cpu(folder: Path, corpus: Path, steps: int = STEPS, **settings: Any) -> Steps:
    return take_steps(configured(folder, corpus, **{**BATCH, "train__steps": steps, **settings}), steps)


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
    assert ours.losses[-1] < ours.losses[0] - 0.3  # it is learning, so that equal losses mean equal updates


def assert_frugal(steps: Steps, graphs: dict[str, int]) -> None:
    """Nothing was compiled but these graphs (fewer, if an earlier test had some), and nothing was read."""
    assert steps.graphs == graphs
    assert steps.figures["graphs_compiled"] <= sum(graphs.values())
    assert steps.figures["transfers_from_device"] == 0


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Steps]:
    """Every model on the CPU backend, with clipping."""
    folder = tmp_path_factory.mktemp("truth")
    wanted = {**MODELS, "one layer": ONE_LAYER}
    return {name: on_cpu(folder, corpus, **settings) for name, settings in wanted.items()}


@pytest.mark.parametrize("model", list(MODELS))
def test_equals_the_cpu_backend(
    model: str, truth: dict[str, Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    steps = on_xla(xla, 4, tmp_path, corpus, **MODELS[model])
    assert_close(steps, truth[model], 1e-6)
    assert steps.norms == pytest.approx(truth[model].norms, rel=1e-4)
    assert_frugal(steps, {"step": 1})


@pytest.mark.parametrize(
    "model",
    ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS if name != "llama")],
)
def test_equals_the_cpu_backend_over_thirty_steps(
    model: str, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    """With the compiler as it comes."""
    steps = on_xla(xla, 4, tmp_path / "xla", corpus, 30, {"XLA_FLAGS": ""}, **MODELS[model])
    assert_close(steps, on_cpu(tmp_path / "cpu", corpus, 30, **MODELS[model]), 1e-6)
    assert_frugal(steps, {"step": 1})


@pytest.mark.parametrize("devices", [1, 2])
def test_the_number_of_devices_does_not_change_the_loss(
    devices: int, truth: dict[str, Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    steps = on_xla(xla, devices, tmp_path, corpus)
    assert_close(steps, truth["llama"], 1e-6)
    assert_frugal(steps, {"micro-batch": 1, "update": 1})


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and recomputation": {
        "train__micro_batch_size": 1,
        "memory__activation_checkpointing": "full",
    },
    "recomputation by its XLA name": {"xla__xla_fsdp_grad_ckpt": True},
    "no_shard": {"strategy": "no_shard"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "hybrid_shard": {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2},
    "a barrier in the backward pass": {"xla__optimization_barrier_in_backward": True},
    "first dim, and a rule": {
        "xla__shard_param_on_dim_0": True,
        "xla__sharding": {"mlp": 1, "k_proj|v_proj": None},
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_how_it_is_computed_does_not_change_the_loss(
    settings: dict[str, Any], truth: dict[str, Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    steps = on_xla(xla, 4, tmp_path, corpus, **ONE_LAYER, **settings)
    assert_close(steps, truth["one layer"], 1e-6)
    several = "train__micro_batch_size" in settings
    assert_frugal(steps, {"micro-batch": 1, "update": 1} if several else {"step": 1})


def test_buffers_in_a_type_of_their_own(
    truth: dict[str, Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    steps = on_xla(xla, 4, tmp_path, corpus, **ONE_LAYER, xla__buffer_dtype="bfloat16")
    assert_close(steps, truth["one layer"], 1e-2)
    assert steps.losses != truth["one layer"].losses  # the frequencies of the rotary embedding were rounded


def test_recomputation_after_frozen_parameters(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    """No input of the first layer needs a gradient, but its parameters do."""
    model = {**TINY_MODEL, "tie_word_embeddings": False}
    settings: dict[str, Any] = {"model__config": model, "train__frozen": "embed_tokens"}
    steps = on_xla(xla, 4, tmp_path / "xla", corpus, **settings, memory__activation_checkpointing="full")
    truth = on_cpu(tmp_path / "cpu", corpus, **settings)
    assert_close(steps, truth, 1e-6)
    assert steps.norms == pytest.approx(truth.norms, rel=1e-4)


def test_recomputation_in_an_encoder_decoder(
    truth: dict[str, Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    steps = on_xla(xla, 4, tmp_path, corpus, **MODELS["t5"], memory__activation_checkpointing="full")
    assert_close(steps, truth["t5"], 1e-6)


@pytest.mark.parametrize("labels", ["number", pytest.param("kinds", marks=pytest.mark.exhaustive)])
def test_labels_that_are_numbers(labels: str, tmp_path: Path, xla: XlaPool) -> None:
    source = write_labelled(tmp_path, 80)
    settings = {**MODELS["bert"], "model__task": "sequence-classification", "data__label_field": labels}
    truth = on_cpu(tmp_path, source, **settings)
    steps = on_xla(xla, 4, tmp_path, source, **settings)
    assert steps.losses == pytest.approx(truth.losses, rel=1e-5)
    assert steps.norms == pytest.approx(truth.norms, rel=1e-4)
    assert_frugal(steps, {"step": 1})


def test_without_clipping(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    settings: dict[str, Any] = {**ONE_LAYER, "train__max_grad_norm": None}
    assert_close(
        on_xla(xla, 4, tmp_path / "xla", corpus, **settings),
        on_cpu(tmp_path / "cpu", corpus, **settings),
        1e-6,
    )


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard_zero2"])
def test_bf16_follows_fp32(
    strategy: str, truth: dict[str, Steps], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    group: dict[str, Any] = {"fsdp__shard_group_size": 2} if strategy.startswith("hybrid") else {}
    steps = on_xla(
        xla,
        4,
        tmp_path,
        corpus,
        precision="bf16",
        strategy=strategy,
        memory__activation_checkpointing="full",
        **ONE_LAYER,
        **group,
    )
    assert_close(steps, truth["one layer"], 1e-2)
    assert steps.losses != truth["one layer"].losses  # it did compute in bf16


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float, tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    settings: dict[str, Any] = {
        **ONE_LAYER,
        "train__optimizer": "sgd",
        "train__betas": [momentum, 0.9],
        "train__learning_rate": 0.1,
    }
    ours = on_xla(xla, 4, tmp_path / "xla", corpus, **settings)
    assert_close(ours, on_cpu(tmp_path / "cpu", corpus, **settings), 1e-6)


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_muon(strategy: str, tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    muon: dict[str, Any] = {**ONE_LAYER, "train__optimizer": "muon", "train__learning_rate": 0.03}
    sharded = {**muon, "strategy": strategy}
    if strategy == "hybrid_shard":
        sharded["fsdp__shard_group_size"] = 2
    ours = on_xla(xla, 4, tmp_path / "xla", corpus, **sharded)
    assert_close(ours, on_cpu(tmp_path / "cpu", corpus, **muon), 1e-5)


@pytest.mark.parametrize("packing", [False, "documents"])
def test_noise_on_embeddings(packing: Any, tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    """Of so little that it changes nothing, by the lengths of documents, which are not read."""
    settings: dict[str, Any] = {**ONE_LAYER, "data__packing": packing}
    steps = on_xla(xla, 4, tmp_path / "xla", corpus, **settings, train__neftune_noise_alpha=1e-7)
    assert_close(steps, on_cpu(tmp_path / "cpu", corpus, **settings), 1e-6)
    assert_frugal(steps, {"step": 1})


def test_dropout_recomputes_what_was_dropped(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    config = {**ONE_LAYER["model__config"], "attention_dropout": 0.2}
    plain = on_xla(xla, 4, tmp_path / "a", corpus, model__config=config)
    again = on_xla(
        xla, 4, tmp_path / "b", corpus, model__config=config, memory__activation_checkpointing="full"
    )
    without = on_xla(xla, 4, tmp_path / "c", corpus, **ONE_LAYER)
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)
    assert plain.losses != without.losses
    assert_frugal(again, {"step": 1})
