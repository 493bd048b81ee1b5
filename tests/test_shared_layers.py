"""tensor_parallel_size: what ranks that share layers compute equals what one rank does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.runs import TINY_MODEL, configured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines import Engines

MODELS: dict[str, dict[str, Any]] = {
    "windows": {**TINY_MODEL, "model_type": "mistral", "sliding_window": 12},
    "norms of heads": {**TINY_MODEL, "model_type": "qwen3", "head_dim": 8},
    "experts": {**TINY_MODEL, "model_type": "mixtral", "num_local_experts": 4},
}
STEPS: dict[str, Any] = {
    "data__seq_len": 64,
    "train__steps": 12,
    "train__global_batch_size": 4,
    "train__dropout": False,
    "precision": "fp32",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2, a group": (2, {}),
    "FSDP2, four ranks a layer": (4, {"tensor_parallel_size": 4}),
    "FSDP2, two groups": (4, {}),
    "gathered once": (4, {"strategy": "shard_grad_op"}),
    "HSDP": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 1}),
    "recomputed": (2, {"memory__activation_checkpointing": "full"}),
    "parameters on the host": (4, {"memory__offload_params": "cpu"}),
    "update on the host": (4, {"memory__offload_optimizer": "cpu"}),
}


def launched(config: Any) -> int:
    return run_rank("cpu", config)


def losses(engines: Engines, size: int, folder: Path, corpus: Path, settings: dict[str, Any]) -> list[float]:
    micro = 4 // (size // settings.get("tensor_parallel_size", 1)) // 2 or 1
    config = configured(folder, corpus, **{**STEPS, "train__micro_batch_size": micro, **settings})
    assert engines.run(config.strategy, size, launched, config) == 0
    rows = read_metrics(folder)
    return [row[name] for row in rows for name in ("loss", "eval_loss", "grad_norm") if name in row]


@pytest.fixture(scope="module")
def alone(engines: Engines, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The numbers of one rank, by its settings, computed once."""
    known: dict[str, list[float]] = {}

    def of(settings: dict[str, Any]) -> list[float]:
        if str(settings) not in known:
            folder = tmp_path_factory.mktemp("alone")
            given = {"strategy": "no_shard", **settings}
            known[str(settings)] = losses(engines, 1, folder, conversations, given)
        return known[str(settings)]

    return of


CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((layout, "windows", {"data__packing": "documents"}) for layout in LAYOUTS),
    *(("FSDP2, two groups", model, {"data__packing": "documents"}) for model in MODELS if model != "windows"),
    ("FSDP2, two groups", "windows", {"data__packing": False}),
    ("FSDP2, two groups", "experts", {"train__optimizer": "sgd", "train__learning_rate": 0.1}),
    ("FSDP2, two groups", "norms of heads", {"train__ema": 0.9, "train__eval_ema": True}),
]


@pytest.mark.parametrize(("layout", "model", "given"), CASES)
def test_equals_one_rank(
    layout: str,
    model: str,
    given: dict[str, Any],
    alone: Any,
    engines: Engines,
    conversations: Path,
    tmp_path: Path,
) -> None:
    size, settings = LAYOUTS[layout]
    given = {"model__config": {**MODELS[model], "num_key_value_heads": 4}, **given}
    settings = {"strategy": "full_shard", "tensor_parallel_size": 2, **given, **settings}
    found = losses(engines, size, tmp_path, conversations, settings)
    assert found == pytest.approx(alone(given), rel=2e-5, abs=2e-6)
