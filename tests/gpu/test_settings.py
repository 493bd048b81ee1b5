"""Settings and the number of ranks do not change the losses: they equal the losses of one rank.

They equal plain torch's if :func:`tests.gpu.test_parity.plain_losses` supports the optimizer and the model.
``test_engines`` tests strategies without other settings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from portable.config import RunConfig
from tests.gpu.test_parity import Losses, assert_close, our_losses, plain_losses
from tests.ranks import RankError, RankPool
from tests.runs import TINY_MODEL, configured, write_labelled
from tests.tpu.test_parity import MODELS


class Case(NamedTuple):
    """A run to compare.

    Attributes:
        ranks: Number of ranks.
        settings: Settings that must not change the losses.
        of: Settings of both runs.
        plain: Whether the expected losses are from a loop in plain torch; otherwise from a run of one rank.
        within: Relative tolerance; a hundredth in 16 bits.
        falls: Minimum decrease of the loss.
    """

    ranks: int
    settings: dict[str, Any]
    of: dict[str, Any]
    plain: bool = False
    within: float = 1e-5
    falls: float = 0.3


TEXT: dict[str, Any] = {"train__global_batch_size": 8}
ADAFACTOR: dict[str, Any] = {**TEXT, "train__optimizer": "adafactor", "train__learning_rate": 0.08}
SGD: dict[str, Any] = {
    "train__global_batch_size": 6,
    "train__optimizer": "sgd",
    "train__betas": [0.9, 0.9],
    "train__learning_rate": 0.1,
}
HYBRID: dict[str, Any] = {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}
ON_HOST: dict[str, Any] = {"memory__offload_optimizer": "cpu"}
FULL, SELECTIVE = ({"memory__activation_checkpointing": kind} for kind in ("full", "selective"))
COMPILED: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
FP16: dict[str, Any] = {"precision": "fp16", "fp16__initial_scale_power": 12}
# hpZ keeps a second copy of the weights in each node, which the forward pass uses.
TWO_COPIES: dict[str, Any] = {
    "strategy": "zero3",
    "deepspeed__config": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
}
ON_TEXT: dict[str, tuple[int, dict[str, Any]]] = {
    "hybrid zero2, 2 x 2, selective recomputation": (
        4,
        {**HYBRID, "strategy": "hybrid_shard_zero2", **SELECTIVE},
    ),
    "hybrid, 1 x 2, the ranks of the node": (2, {"strategy": "hybrid_shard"}),
    "hybrid on one rank": (1, {"strategy": "hybrid_shard"}),
    "offload": (2, {"memory__offload_params": "cpu"}),
    "offload the optimizer alone": (2, ON_HOST),
    "offload the optimizer alone, hybrid": (4, {**HYBRID, **ON_HOST}),
    "selective recomputation, no_shard": (2, {"strategy": "no_shard", **SELECTIVE}),
    "full recomputation, full_shard": (2, FULL),
    "no wrap": (2, {"fsdp__auto_wrap_policy": "no_wrap"}),
    "by size": (2, {"fsdp__auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp__min_num_params": 4000}),
    "by class": (2, {"fsdp__transformer_layer_cls_to_wrap": ["LlamaMLP", "LlamaDecoderLayer"]}),
    "no prefetch": (2, {"fsdp__forward_prefetch": False, "fsdp__backward_prefetch": "no_prefetch"}),
    "micro-batches of one": (1, {"train__micro_batch_size": 1}),
    "eight sequences on three ranks, full_shard": (3, {"train__micro_batch_size": 1}),
    "eight sequences on three ranks, no_shard": (3, {"strategy": "no_shard", "train__micro_batch_size": 3}),
    "eight sequences on three ranks, zero1": (3, {"strategy": "zero1", "train__micro_batch_size": 2}),
    "eight sequences on three ranks, zero3": (3, {"strategy": "zero3", "train__micro_batch_size": 3}),
    "two copies of the parameters": (4, TWO_COPIES),
    "compiled, no_shard": (2, {"strategy": "no_shard", **COMPILED, **FULL}),
    "compiled, full_shard": (2, {**COMPILED, **SELECTIVE}),
    "compiled, zero2": (2, {"strategy": "zero2", **COMPILED}),
}
IN_16_BITS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16, full_shard": (2, {"precision": "bf16"}),
    "bf16, zero1": (2, {"strategy": "zero1", "precision": "bf16"}),
    "bf16, zero3": (2, {"strategy": "zero3", "precision": "bf16"}),
    "fp16 on one rank": (1, {"strategy": "no_shard", **FP16}),
    "fp16, no_shard": (2, {"strategy": "no_shard", **FP16}),
    "fp16, full_shard": (2, FP16),
    "fp16, shard_grad_op": (2, {"strategy": "shard_grad_op", **FP16}),
}

# -- other models and tasks ------------------------------------------------------------------------------

CLASSIFIER: dict[str, Any] = {**TEXT, **MODELS["bert"], "model__task": "sequence-classification"}
# A position that is masked has an embedding, and this task masks none.
XLNET: dict[str, Any] = {
    **TEXT,
    "train__learning_rate": 0.01,
    "model__config": {
        "model_type": "xlnet",
        "attn_type": "uni",  # otherwise each token sees its own label
        "vocab_size": 384,
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 64,
        "dropout": 0.0,
    },
}
# A sentence has 16 tokens, so that some of the 8 experts may get none.
SWITCH: dict[str, Any] = {
    "model__task": "seq2seq-lm",
    "model__config": {
        "model_type": "switch_transformers",
        "vocab_size": 384,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 1,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 8,
        "dropout_rate": 0.0,
        "router_jitter_noise": 0.0,
    },
    "data__target_field": "text",
    "data__seq_len": 16,
    "seed": 1,  # with seed 0 two experts are nearly equal for a token, and rounding decides
    "train__global_batch_size": 2,
}
# Each expert is a matrix, which is sharded or not.
MUON_OF_EXPERTS: dict[str, Any] = {
    "train__optimizer": "muon",
    "train__learning_rate": 0.01,
    "train__global_batch_size": 12,
    "model__config": {
        **TINY_MODEL,
        "model_type": "mixtral",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    },
}
ALONE: dict[str, Any] = {"strategy": "no_shard"}
ZERO3: dict[str, Any] = {"strategy": "zero3"}

CASES: dict[str, Case] = {
    **{name: Case(*given, TEXT, plain=True) for name, given in ON_TEXT.items()},
    **{name: Case(*given, TEXT, plain=True, within=1e-2) for name, given in IN_16_BITS.items()},
    "two copies of parameters that are frozen": Case(4, TWO_COPIES, {**TEXT, "train__frozen": "norm"}),
    "SGD without momentum": Case(3, ALONE, {**SGD, "train__betas": [0.0, 0.9]}, plain=True, falls=0.2),
    "SGD": Case(3, {}, SGD, plain=True, falls=0.2),
    "SGD, padded, zero3": Case(3, ZERO3, {**SGD, "data__packing": False}, plain=True, falls=0.2),
    "Adafactor, its state on the host": Case(2, ON_HOST, ADAFACTOR),
    "Adafactor, hybrid": Case(4, HYBRID, ADAFACTOR),
    "Muon of experts, full_shard": Case(2, {}, MUON_OF_EXPERTS),
    "Muon of experts, zero3": Case(2, ZERO3, MUON_OF_EXPERTS),
    "a parameter without a gradient, no_shard": Case(2, ALONE, XLNET),
    "a parameter without a gradient, full_shard": Case(2, {}, XLNET),
    "experts that no token of a rank chooses, full_shard": Case(2, {}, SWITCH, falls=0.1),
    "experts that no token of a rank chooses, zero3": Case(2, ZERO3, SWITCH, falls=0.1),
    "masked-lm": Case(2, {}, {**TEXT, **MODELS["bert"]}),
    "seq2seq-lm": Case(2, {}, {**TEXT, **MODELS["t5"]}),
    "classes": Case(2, {}, CLASSIFIER, falls=0.1),  # from ln 2
    "a number": Case(2, ALONE, {**CLASSIFIER, "data__label_field": "number"}, falls=0.1),
    "several classes": Case(2, {}, {**CLASSIFIER, "data__label_field": "kinds"}, falls=0.0),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[Case], Path]:
    labelled = write_labelled(tmp_path_factory.mktemp("labelled"), 160)
    return lambda case: labelled if "classification" in case.of.get("model__task", "") else corpus


@pytest.fixture(scope="module")
def truth(
    tmp_path_factory: pytest.TempPathFactory, source: Callable[[Case], Path]
) -> Callable[[Case], Losses]:
    """Return the losses of one rank, computed once per distinct run."""
    known: dict[str, Losses] = {}

    def losses(case: Case) -> Losses:
        key = repr((case.of, case.plain))
        if key not in known:
            find = plain_losses if case.plain else our_losses
            config = configured(tmp_path_factory.mktemp("truth"), source(case), **ALONE, **case.of)
            known[key] = find(config)
        return known[key]

    return losses


def seen_losses(config: RunConfig) -> Losses:
    """Return a rank's losses, after a check that layers were compiled if `compile` is set."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = our_losses(config)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == config.compile
    return losses


@pytest.mark.parametrize("name", CASES)
def test_settings_losses_match_one_rank(
    name: str,
    truth: Callable[[Case], Losses],
    source: Callable[[Case], Path],
    tmp_path: Path,
    ranks: RankPool,
) -> None:
    case = CASES[name]
    if str(case.settings.get("strategy")).startswith("zero"):
        pytest.importorskip("deepspeed")
    batch = case.of["train__global_batch_size"]
    # Two micro-batches if there are enough sequences.
    sizes = {"train__micro_batch_size": max(batch // case.ranks // 2, 1)}
    config = configured(tmp_path, source(case), **{**sizes, **case.of, **case.settings})
    found, expected = ranks.run(case.ranks, seen_losses, config), truth(case)
    assert_close(found, expected, case.within, falls=case.falls)
    norms = [[norm for _, norm in losses] for losses in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * case.within)
    if config.precision != "fp32":  # ranks in fp32 agree to 1e-6
        least = 1e-4 if config.precision == "bf16" else 1e-5
        assert any(abs(one - other) > least for (one, _), (other, _) in zip(found, expected, strict=True))


@pytest.mark.exhaustive
def test_zero2_rejects_experts_with_different_orders(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(RankError, match=r"strategy: zero2 [^\n]* set strategy to zero1, zero3 or full_shard"):
        ranks.run(2, our_losses, configured(tmp_path, corpus, strategy="zero2", **SWITCH))
