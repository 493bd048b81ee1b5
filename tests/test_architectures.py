"""Some text models of transformers with all checks of ``python -m tests.architectures``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures import (
    CHECKS,
    COMPOSITE,
    EXPORT_CHECKS,
    LOSS_CHECKS,
    Pair,
    export_findings,
    findings,
    page,
    write_records,
)
from tests.ranks import RankPool

# Each was once mistaken for another kind.
CHOSEN = [
    Pair("gpt_neox", "causal-lm"),  # its head has another name in files
    Pair("gemma4_text", "causal-lm"),  # sizes that differ from layer to layer
    Pair("ibert", "masked-lm"),  # buffers made after parameters
    Pair("squeezebert", "masked-lm"),  # layers that are called past their hooks
    Pair("mbart", "masked-lm"),  # its decoder reads its labels
    Pair("longcat_flash", "causal-lm"),  # experts that are called as often as tokens choose them
    Pair("llama4", COMPOSITE),  # transformers 5.24 reads a field that its output lacks
    Pair("qwen3_vl", COMPOSITE),  # no causal class
    Pair("qwen3_5_moe", COMPOSITE),  # a causal class without the vision tower
]
EXPORTED = [
    Pair("deepseek_v3", "causal-lm"),  # experts that peft adapts, and a bias that is a buffer
    Pair("nemotron_h", "causal-lm"),  # files have another prefix, and peft refuses some modules
    Pair("gemma3", "causal-lm"),  # the causal class has a tower
    Pair("camembert", "causal-lm"),  # the head precedes the embedding that it is tied to
    Pair("sarvam_moe", "causal-lm"),  # files have one tensor for projections of unequal sizes
    Pair("qwen3_5", COMPOSITE),
    Pair("qwen3_5_moe", COMPOSITE),
    Pair("qwen3_vl", COMPOSITE),
    Pair("llama4", COMPOSITE),  # routers that LoRA cannot adapt
    Pair("neomme", "masked-lm"),  # linear layers that are tied to each other
    Pair("reformer", "causal-lm"),  # layers whose parameters are not in the graph
]
"""Pairs for which only the export is checked."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("pair", CHOSEN, ids=lambda pair: f"{pair.model_type}-{pair.task}")
def test_architecture_losses_match_transformers(
    pair: Pair, tmp_path: Path, records: Path, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    results = findings(pair, ranks, tmp_path, records, LOSS_CHECKS)
    assert results.keys() == set(LOSS_CHECKS)
    assert {what: why for what, why in results.items() if why} == {}


@pytest.mark.parametrize("pair", EXPORTED, ids=lambda pair: f"{pair.model_type}-{pair.task}")
def test_architecture_export_and_adapter_match_published_class(
    pair: Pair, tmp_path: Path, records: Path, ranks: RankPool
) -> None:
    results = ranks.run(1, export_findings, pair, tmp_path, records, EXPORT_CHECKS)
    assert results == dict.fromkeys(EXPORT_CHECKS, "")


def test_architectures_page_groups_equal_results() -> None:
    complete = dict.fromkeys(CHECKS, "")
    lacking = {check: "" for check in CHECKS if check not in ("adapter", "merge")}
    results = {
        "one causal-lm": complete,
        "two causal-lm": {**complete, "bf16": "off"},
        "six causal-lm": complete,
    }
    text = page({**results, "ten masked-lm": lacking})
    assert "| causal-lm | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ | `one`, `six` |\n" in text
    assert "| causal-lm | ✓ | ✗ | ✓ | ✓ | ✓ | ✓ | ✓ | `two` |\n" in text
    assert "| masked-lm | ✓ | ✓ | ✓ | ✓ | ✓ | – | – | `ten` |\n" in text
    assert "- `two` causal-lm: bf16: `off`" in text
    assert "| Llama 2, Llama 3, " in text  # the table by name, which is written by hand, stays
