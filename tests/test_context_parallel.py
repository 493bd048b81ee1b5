"""context_parallel_size: the results of context-parallel ranks equal the results of one rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from portable.adapters.assemble import check_parallel_support
from portable.config import RunConfig
from portable.data.samples.loader import slice_sequence_part
from portable.engines.context_parallel import enable_context_parallelism
from portable.errors import UserError
from portable.model.document_attention import DOCUMENT_SEPARATING_TYPES
from portable.planner.memory_model import Cluster
from portable.planner.meta_model import MetaModel
from portable.reporting.metrics import read_metrics
from tests.alone import change_rope
from tests.engines import Engines
from tests.parity import Beside, launched, loss_and_gradients, off
from tests.promises import record
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import VOCABULARY, tiny_config

MODELS: dict[str, dict[str, Any]] = {
    "windows": {**TINY_MODEL, "model_type": "mistral", "sliding_window": 12},
    "chunks and norms": {**TINY_MODEL, "model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 8},
    "learned positions": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "experts": {
        **TINY_MODEL,
        "model_type": "mixtral",
        "num_key_value_heads": 1,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP": (2, {"strategy": "no_shard"}),
    "FSDP2, four ranks a sequence": (4, {"strategy": "full_shard", "context_parallel_size": 4}),
    "HSDP": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
    "ZeRO-1": (2, {"strategy": "zero1"}),
    "ZeRO-2, recomputed": (2, {"strategy": "zero2", "memory__activation_checkpointing": "full"}),
    "ZeRO-3, two sequences at a time": (4, {"strategy": "zero3"}),
}


PACKED: dict[str, Any] = {"data__packing": "documents"}
STREAMED = {**PACKED, "data__stream": True, "data__eval_fraction": 0}
CASES = [
    ("DDP", "windows", {"data__packing": False}),
    ("DDP", "chunks and norms", PACKED),
    ("DDP", "learned positions", PACKED),
    ("FSDP2, four ranks a sequence", "experts", PACKED),
    ("HSDP", "windows", PACKED),
    ("ZeRO-1", "experts", PACKED),
    ("ZeRO-2, recomputed", "windows", PACKED),
    ("ZeRO-3, two sequences at a time", "windows", STREAMED),
]


@pytest.mark.parametrize(("layout", "model", "given"), CASES)
def test_context_parallel_losses_equal_one_rank(
    layout: str, model: str, given: dict[str, Any], beside: Beside
) -> None:
    size, settings = LAYOUTS[layout]
    given = {"model__config": MODELS[model], **given}
    found, expected = beside.ranks(size, {"context_parallel_size": 2, **given, **settings}), beside.one(given)
    # The gradient of a router loss is summed over the ranks in another order.
    within = 1e-5 if model == "experts" else 2e-6
    assert found == pytest.approx(expected, rel=within, abs=2e-6)
    record(found, expected, within)


@pytest.mark.parametrize("packing", ["documents", False])
def test_context_parallel_losses_by_source_equal_one_rank(
    packing: Any, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    lines = corpus.read_text().splitlines(keepends=True)
    sources = [{"name": name, "source": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in ("a", "b")]
    for number, source in enumerate(sources):
        Path(str(source["source"])).write_text("".join(lines[number::2]))
    logged = []
    for size in (1, 2):
        config = configured(
            tmp_path / str(size),
            corpus,
            strategy="no_shard",
            context_parallel_size=size,
            data__source=None,
            data__sources=sources,
            data__packing=packing,
            train__steps=2,
            train__global_batch_size=4,
            train__micro_batch_size=2,
        )
        assert engines.run("no_shard", size, launched, config) == 0
        names = ("loss", *(f"{kind}/{name}" for kind in ("loss", "share") for name in ("a", "b")))
        rows = [row for row in read_metrics(tmp_path / str(size)) if "loss" in row]
        logged.append([row[name] for row in rows for name in names])
    assert len(logged[0]) == 10 and logged[1] == pytest.approx(logged[0], rel=2e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"data__seq_len": 63}, "data.seq_len: 63 is not divisible"),
    "task": ({"model__task": "masked-lm"}, "model.task: masked-lm does not work with context parallelism"),
    "noise": ({"train__neftune_noise_alpha": 5.0}, "train.neftune_noise_alpha: 5 does not work with context"),
    "custom samples": ({"data__format": "samples"}, "data.format: samples does not work with context"),
    "labels": (
        {"model__task": "sequence-classification"},
        "model.task: sequence-classification does not work",
    ),
    "preferences": ({"data__format": "preference", "train__loss": "dpo"}, "train.loss: dpo does not work"),
    "columns": (
        {"data__columns": ["score"], "data__packing": False, "train__loss": "my_code:loss"},
        "train.loss: my_code:loss does not work with context",
    ),
    "images": (
        {"data__images": True, "data__packing": False},
        "context_parallel_size: does not work with images",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_context_parallel_rejects_settings_that_need_full_sequences(
    case: str, corpus: Path, tmp_path: Path
) -> None:
    settings, told = REFUSED[case]
    with pytest.raises(UserError, match=told):
        configured(tmp_path, corpus, **{"context_parallel_size": 2, **settings})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "the attention heads .3. and key-value heads .3. cannot",
        ),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, "uses eager"),
        ({"model_type": "afmoe", "output_router_logits": True}, "the router loss .* needs complete"),
        ({"model_type": "mixtral", "output_router_logits": True}, "the router loss .* without padding"),
        ({"model_type": "falcon", "num_kv_heads": 4}, "the attention of .* cannot be divided among"),
        ({"model_type": "mamba"}, "uses eager"),
        ({"model_type": "bert", "is_decoder": False}, "attends in both directions|not been tested to keep"),
    ],
)
def test_context_parallel_rejects_unsupported_attention(changed: dict[str, Any], told: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**TINY_MODEL, "num_key_value_heads": 4, **changed})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    settings: Any = {"context_parallel_size": 2, "data": {"packing": config.model_type != "mixtral"}}
    with pytest.raises(UserError, match=f"^context_parallel_size: .*{told}"):
        check_parallel_support(model, RunConfig(**settings))


def beside_whole_sequences(types: list[str]) -> dict[str, str]:
    """On one of two ranks, return the difference from full sequences, or the error, by type."""
    dist.init_process_group("gloo")
    try:
        return {model_type: _beside_whole(model_type) for model_type in types}
    finally:
        dist.destroy_process_group()


def _beside_whole(model_type: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    name, _, rope_type = model_type.partition(" ")
    config = AutoConfig.for_model(**tiny_config(name, "causal-lm"))
    if rope_type:  # a rank has only some of its positions
        change_rope(config, rope_type)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = AutoModelForCausalLM.from_config(config)
    model.float().eval()
    batch = {name: torch.randint(5, VOCABULARY, (2, 32)) for name in ("input_ids", "labels")}
    positions = torch.cat([torch.arange(length) for length in (10, 15, 7)]).expand(2, 32)
    packed = {**batch, "position_ids": positions, "document_lengths": torch.tensor([[10, 15, 7, 0]] * 2)}
    for kind, whole in (("plain", batch), ("packed", packed)):
        expected = loss_and_gradients(model, whole)
        settings = RunConfig(context_parallel_size=2)
        try:
            check_parallel_support(model, settings)
        except UserError as error:
            return str(error)
        with ExitStack() as at_stop:
            enable_context_parallelism(model, settings, at_stop)
            found = loss_and_gradients(model, slice_sequence_part(whole, (dist.get_rank(), 2)))
        for value in found:
            dist.all_reduce(value)
        if apart := off(found, expected):
            return f"{kind}: {apart}"
    return ""


def sent_and_planned(model_type: str, parts: int) -> tuple[int, float]:
    """Return the bytes that this rank sends in a forward and backward pass, and the planned bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dist.init_process_group("gloo")
    sent = []
    exchange = dist.all_to_all_single

    def counted(received: torch.Tensor, given: torch.Tensor, **more: Any) -> Any:
        sent.append(given.nbytes // parts * (parts - 1))
        return exchange(received, given, **more)

    config = AutoConfig.for_model(**tiny_config(model_type, "causal-lm"))
    model: Any = AutoModelForCausalLM.from_config(config).float()
    settings: Any = {"context_parallel_size": parts, "data": {"seq_len": 32}, "precision": "fp32"}
    run = RunConfig(**settings | {"backend": "cpu", "train": {"micro_batch_size": 2}})
    batch = {name: torch.randint(5, VOCABULARY, (2, 32)) for name in ("input_ids", "labels")}
    try:
        dist.all_to_all_single = counted  # type: ignore[assignment]
        with ExitStack() as at_stop:
            enable_context_parallelism(model, run, at_stop)
            loss_and_gradients(model, slice_sequence_part(batch, (dist.get_rank(), parts)))
    finally:
        dist.all_to_all_single = exchange
        dist.destroy_process_group()
    return sum(sent), MetaModel(model, run).compute_context_parallel_traffic(
        run, Cluster(parts, parts)
    ).sent_bytes


@pytest.mark.parametrize(("model_type", "parts"), [("mistral", 4), ("deepseek_v3", 2)])
def test_context_parallel_planned_bytes_match_exchange(model_type: str, parts: int, ranks: RankPool) -> None:
    sent, planned = ranks.run(parts, sent_and_planned, model_type, parts)
    assert sent == planned > 0


# Models that make masks of ones, call attention by keyword, or have sizes by layer, and a plain one.
SOME = ["biogpt", "afmoe", "bert", "deepseek_v3", "dots3_note_text", "gemma3_text", "llama"]
SOME += ["phi3 longrope", "llama dynamic"]


@pytest.mark.parametrize(
    "types",
    [SOME, pytest.param(sorted(DOCUMENT_SEPARATING_TYPES), marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_context_parallel_types_equal_full_sequences_or_are_rejected(
    types: list[str], ranks: RankPool
) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = [name for name in types if name.split()[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    found = ranks.run(2, beside_whole_sequences, types)
    differ = {
        name: why for name, why in found.items() if why and not why.startswith("context_parallel_size: ")
    }
    assert differ == {}
    assert sum(not why for why in found.values()) >= (8 if types == SOME else 95)
