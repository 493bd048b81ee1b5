"""Attention a few rows at a time, compared with the attention of all rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from portable.config import load_config
from portable.errors import UserError
from tests.parity import Steps, take_steps
from tests.runs import configured
from tests.tpu.test_parity import BATCH, MODELS, ONE_LAYER, assert_close, cpu_steps
from tests.xla import XlaPool

TOKENS = 21  # not a multiple of the rows


def case(name: str) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(1)
    among = torch.rand(2, 1, TOKENS, TOKENS, generator=draws) > 0.5
    among |= torch.eye(TOKENS, dtype=torch.bool)
    cases: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": among},
        "added": {"attn_mask": among.float() * 3},
        "padding": {"attn_mask": torch.rand(2, 1, 1, TOKENS, generator=draws) > 0.2},
        "all": {"scale": 0.1},
    }
    return cases[name]


CASES = ["causal", "mask", "added", "padding", "all"]


def attended(name: str, device: str) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, TOKENS, 8, generator=draws).to(device) for _ in range(4)]
    inputs: Any = [tensor.requires_grad_() for tensor in given[:3]]
    options: Any = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in case(name).items()}
    result = functional.scaled_dot_product_attention(*inputs[:3], **options)
    (result * given[3]).sum().backward()
    return [tensor.detach().cpu() for tensor in (result, *(i.grad for i in inputs if i.grad is not None))]


def by_rows(names: list[str]) -> tuple[dict[str, list[torch.Tensor]], list[int]]:
    from portable.tpu.xla import attention, runtime
    from portable.tpu.xla.layout import MeshLayout
    from portable.tpu.xla.runtime import torch_xla

    runtime.start_xla_runtime()
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa", model_type="llama"))
    layout = MeshLayout(load_config(None, {"backend": "xla"}), 1)
    attention.configure_attention(model, 8, layout)
    found = {name: attended(name, "xla:0") for name in names}
    query = torch.zeros(2, 4, TOKENS, 8, device="xla:0")
    hlo = torch_xla._XLAC._get_xla_tensors_hlo
    text = hlo([functional.scaled_dot_product_attention(query, query, query, is_causal=True)])
    attention.configure_attention(model, None, layout)
    whole = hlo([functional.scaled_dot_product_attention(query, query, query)])
    return found, [t.count(f"{TOKENS},{TOKENS}]") for t in (text, whole)]


def test_attention_by_rows_equals_attention_of_all_rows(xla: XlaPool) -> None:
    found, scores = xla.run(1, by_rows, CASES)
    for name in CASES:
        for ours, theirs in zip(found[name], attended(name, "cpu"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6, msg=name)
    assert scores[0] == 0 < scores[1]


WINDOWS = {
    **ONE_LAYER["model__config"],
    "model_type": "mistral",
    "sliding_window": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
CHUNKS = {  # every second layer attends within chunks
    **{key: value for key, value in WINDOWS.items() if key != "sliding_window"},
    "model_type": "llama4_text",
    "attention_chunk_size": 12,
    "intermediate_size_mlp": 80,
    "num_local_experts": 2,
    "head_dim": 8,
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
}
BY_ROWS: dict[str, dict[str, Any]] = {
    "a window, padded": {"model__config": WINDOWS, "data__packing": False},
    "documents": {"data__packing": "documents"},
    "a window, documents, in a loop": {
        "model__config": WINDOWS,
        "data__packing": "documents",
        "xla__scan_layers": True,
        "memory__activation_checkpointing": "full",
    },
    "chunks, documents": {"model__config": CHUNKS, "data__packing": "documents"},
}
LENGTH = 52  # different from all other sizes


def steps_and_graph(config: Any) -> tuple[Steps, str]:
    """Return four steps, and the first graph that torch_xla passes to the compiler."""
    from portable.tpu.xla.graphs import GraphRunner
    from portable.tpu.xla.runtime import torch_xla

    texts: list[str] = []
    run = GraphRunner.run

    def seen(graphs: Any, kind: str, results: Any) -> None:
        texts.append("" if texts else torch_xla._XLAC._get_xla_tensors_hlo(list(results)))
        run(graphs, kind, results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunner, "run", seen)
        return take_steps(config, 4), texts[0]


@pytest.mark.parametrize(("name", "shared"), [*zip(BY_ROWS, (1, 2, 2, 1), strict=True)])
def test_attention_by_rows_builds_no_full_mask(
    name: str, shared: int, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    both = {"data__seq_len": LENGTH, **BY_ROWS[name]}
    own = {"xla__attention_rows": 8, "context_parallel_size": shared, "train__micro_batch_size": 1}
    config = configured(
        tmp_path / "xla", corpus, **{**BATCH, **both, **own, "backend": "xla", "train__steps": 4}
    )
    steps, text = xla.run(4, steps_and_graph, config)
    assert_close(steps, cpu_steps(tmp_path / "cpu", corpus, 4, **both), 1e-6)
    assert f"{LENGTH},8]" in text and f"{LENGTH},{LENGTH}]" not in text


def with_a_bias(device: str) -> list[torch.Tensor]:
    """Return the result in bf16 of attention with a trained bias, and the gradients."""
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, TOKENS, 8, generator=draws) for _ in range(4)]
    given.append(torch.randn(1, 4, TOKENS, TOKENS, generator=draws))
    # A row that attends to nothing.
    given[-1][:, :, 3] = -torch.inf
    query, key, value, weights, bias = (tensor.bfloat16().to(device) for tensor in given)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    result = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.5)
    (result * weights).sum().backward()
    return [
        tensor.detach().float().cpu() for tensor in (result, *(i.grad for i in inputs if i.grad is not None))
    ]


def on_a_device() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    from portable.tpu.xla import attention, runtime
    from portable.tpu.xla.layout import MeshLayout

    runtime.start_xla_runtime()
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa", model_type="t5"))
    theirs = with_a_bias("xla:0")
    attention.configure_attention(model, None, MeshLayout(load_config(None, {"backend": "xla"}), 1))
    return with_a_bias("xla:0"), theirs


def test_attention_by_rows_with_trained_bias_matches(xla: XlaPool) -> None:
    ours, theirs = xla.run(1, on_a_device)
    assert len(ours) == 5
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-2)  # a bf16 of 4 to 8 is within 0.03


def test_attention_by_rows_rejects_custom_attention(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    settings = {**MODELS["bert"], "model__attention": "eager", "xla__attention_rows": 8}
    said = xla.run(1, refusal, tmp_path, corpus, settings)
    assert said == (
        "xla.attention_rows: needs the attention implementation sdpa, but bert uses eager; remove "
        "xla.attention_rows"
    )


def refusal(folder: Path, corpus: Path, settings: dict[str, Any]) -> str:
    try:
        take_steps(configured(folder, corpus, backend="xla", **settings), 1)
    except UserError as error:
        return str(error)
    return "none"
