"""expert_parallel_size: the results of expert-parallel ranks equal the results of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import Beside
from tests.promises import record
from tests.runs import TINY_MODEL

TOLERANCE = 2e-6
ROUTER_LOSS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTURE: dict[str, Any] = {**TINY_MODEL, "num_experts_per_tok": 2}
SHARED_EXPERTS: dict[str, Any] = {
    **MIXTURE,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**MIXTURE, "num_local_experts": 8},
    "qwen3_moe": {**MIXTURE, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "deepseek_v3": {
        **SHARED_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {**MIXTURE, "num_local_experts": 8, "head_dim": 8, "sliding_window": 12},
    "glm4_moe": {**SHARED_EXPERTS, "head_dim": 8},
}
EXPERTS: dict[str, Any] = {"strategy": "full_shard", "expert_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "4": (4, {"expert_parallel_size": 4}),
    "2 x 2": (4, {}),
    "HSDP": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
    "gathered": (4, {"strategy": "shard_grad_op"}),
}
PACKED: dict[str, Any] = {"data__packing": "documents", "train__steps": 12}


def mixture(family: str, **changed: Any) -> dict[str, Any]:
    return {"model__config": {**FAMILIES[family], **changed, "model_type": family}}


PARITY: list[Any] = [
    *((family, layout, {}) for family in FAMILIES for layout in ("2", "4", "2 x 2")),
    # A router loss is nonlinear, so the micro-batches have to be the same: one sequence each.
    *(
        (family, layout, ROUTER_LOSS)
        for family in ("mixtral", "qwen3_moe", "gpt_oss")
        for layout in ("2", "4", "2 x 2")
    ),
]


@pytest.mark.parametrize(("family", "layout", "router"), PARITY)
def test_expert_parallel_losses_equal_one_rank(
    family: str, layout: str, router: dict[str, Any], beside: Beside
) -> None:
    size, settings = LAYOUTS[layout]
    given = {**PACKED, **mixture(family, **router)} | ({"train__micro_batch_size": 1} if router else {})
    found, expected = beside.ranks(size, {**EXPERTS, **given, **settings}), beside.one(given)
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    record(found, expected, TOLERANCE)


COMPOSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "HSDP": ("HSDP", "mixtral", {}),
    "gathered": ("gathered", "qwen3_moe", {}),
    "recomputed": ("2", "gpt_oss", {"memory__activation_checkpointing": "full"}),
    "partly recomputed": ("2", "deepseek_v3", {"memory__activation_checkpointing": "selective"}),
    "compiled": ("2", "qwen3_moe", {"compile": True, "compile_backend": "aot_eager"}),
    "update on the host": ("2 x 2", "mixtral", {"memory__offload_optimizer": "cpu"}),
    "weights on the host": ("2 x 2", "mixtral", {"memory__offload_params": "cpu"}),
    "shared sequences": ("2 x 2", "qwen3_moe", {"context_parallel_size": 2}),
    "Muon": ("2 x 2", "qwen3_moe", {"train__optimizer": "muon"}),
    "SGD": ("2", "mixtral", {"train__optimizer": "sgd", "train__learning_rate": 0.1}),
    "average": ("2 x 2", "mixtral", {"train__ema": 0.9, "train__eval_ema": True}),
    "adapter": ("2", "mixtral", {"adapter__type": "lora", "adapter__target_modules": ["q_proj", "v_proj"]}),
    "one after another": ("2", "glm4_moe", {"model__experts": "eager"}),
    "padded": ("4", "mixtral", {"data__packing": False}),
    "all in one unit": ("2", "mixtral", {"fsdp__auto_wrap_policy": "no_wrap"}),
}
LAYOUT_KEYS = ("memory__", "compile", "context_parallel_size", "fsdp__")


@pytest.mark.parametrize("case", COMPOSED)
def test_expert_parallelism_composes(case: str, beside: Beside) -> None:
    layout, family, own = COMPOSED[case]
    size, settings = LAYOUTS[layout]
    given = {**PACKED, "train__steps": 3, **mixture(family, num_key_value_heads=4), **own}
    alone = {key: value for key, value in given.items() if not key.startswith(LAYOUT_KEYS)}
    found, expected = beside.ranks(size, {**EXPERTS, **given, **settings}), beside.one(alone)
    assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
