"""context_parallel_size: what ranks that share sequences compute equals what one rank does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from gpu.common.shared_sequences import check
from portable.errors import UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.runs import TINY_MODEL, configured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines import Engines

MODELS: dict[str, dict[str, Any]] = {
    "windows": {
        **TINY_MODEL,
        "model_type": "mistral",
        "sliding_window": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "chunks and norms": {
        **TINY_MODEL,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "learned positions": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "experts": {**TINY_MODEL, "model_type": "mixtral", "num_attention_heads": 4, "num_key_value_heads": 1},
}
STEPS: dict[str, Any] = {
    "data__seq_len": 64,
    "train__steps": 4,
    "train__global_batch_size": 4,
    "train__dropout": False,
    "precision": "fp32",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP": (2, {"strategy": "no_shard"}),
    "FSDP2, four ranks a sequence": (4, {"strategy": "full_shard", "context_parallel_size": 4}),
    "HSDP": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
    "ZeRO-1": (2, {"strategy": "zero1"}),
    "ZeRO-2, recomputed": (2, {"strategy": "zero2", "memory__activation_checkpointing": "full"}),
    "ZeRO-3, two sequences at a time": (4, {"strategy": "zero3"}),
}


def launched(config: Any) -> int:
    return run_rank("cpu", config)


def losses(engines: Engines, size: int, folder: Path, corpus: Path, settings: dict[str, Any]) -> list[float]:
    parts = settings.get("context_parallel_size", 1)
    micro = 4 // (size // parts) // 2 or 1
    config = configured(folder, corpus, **{**STEPS, "train__micro_batch_size": micro, **settings})
    assert engines.run(config.strategy, size, launched, config) == 0
    rows = read_metrics(folder)
    return [row[name] for row in rows for name in ("loss", "eval_loss", "grad_norm") if name in row]


@pytest.fixture(scope="module")
def alone(engines: Engines, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The numbers of one rank, by model and packing, computed once."""
    known: dict[tuple[str, str], list[float]] = {}

    def of(model: str, packing: Any) -> list[float]:
        if (model, str(packing)) not in known:
            settings = {"strategy": "no_shard", "model__config": MODELS[model], "data__packing": packing}
            folder = tmp_path_factory.mktemp("alone")
            known[model, str(packing)] = losses(engines, 1, folder, conversations, settings)
        return known[model, str(packing)]

    return of


CASES = [
    *((layout, "windows", "documents") for layout in LAYOUTS),
    *(("DDP", model, "documents") for model in MODELS if model != "windows"),
    *(("DDP", "windows", packing) for packing in (True, False)),
]


@pytest.mark.parametrize(("layout", "model", "packing"), CASES)
def test_equals_one_rank(
    layout: str, model: str, packing: Any, alone: Any, engines: Engines, conversations: Path, tmp_path: Path
) -> None:
    size, settings = LAYOUTS[layout]
    settings = {"context_parallel_size": 2, "model__config": MODELS[model], **settings}
    found = losses(engines, size, tmp_path, conversations, {**settings, "data__packing": packing})
    assert found == pytest.approx(alone(model, packing), rel=2e-5, abs=2e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"data__seq_len": 63}, "data.seq_len 63 cannot be divided"),
    "task": ({"model__task": "masked-lm"}, "model.task masked-lm needs whole sequences"),
    "noise": ({"train__neftune_noise_alpha": 5.0}, "train.neftune_noise_alpha 5.0 needs whole sequences"),
    "backend": ({"backend": "xla"}, "backend xla needs whole sequences"),
    "search": ({"train__micro_batch_size": "auto"}, "train.micro_batch_size auto needs whole sequences"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_need_whole_sequences(case: str, corpus: Path, tmp_path: Path) -> None:
    settings, told = REFUSED[case]
    with pytest.raises(UserError, match=told):
        configured(tmp_path, corpus, **{"context_parallel_size": 2, **settings})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, "3 heads .3 of keys."),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, "runs with eager"),
        ({"model_type": "mixtral", "output_router_logits": True}, "the router loss"),
        ({"model_type": "falcon", "num_kv_heads": 4}, "attention that ranks cannot share"),
        ({"model_type": "mamba"}, "runs with eager"),
        ({"model_type": "bert", "is_decoder": False}, "attends in both directions|not found to keep"),
    ],
)
def test_models_whose_attention_cannot_be_shared(changed: dict[str, Any], told: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **{**TINY_MODEL, "num_attention_heads": 4, "num_key_value_heads": 4, **changed}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"^context_parallel_size: .*{told}"):
        check(model, 2)
