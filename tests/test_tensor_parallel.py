"""tensor_parallel_size: the results of tensor-parallel ranks equal the results of one rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from portable.adapters.assemble import inspect_run
from portable.commands.convert import main as convert
from portable.config import RunConfig
from portable.engines.engine_interface import RankInfo
from portable.engines.experts import register_zero_gradient_hooks
from portable.engines.fsdp.footprint import compute_shard_group_size
from portable.engines.fsdp.optimizer_state import fill_local_shard
from portable.engines.fsdp.sharding import shard_model
from portable.errors import UserError, to_one_line
from portable.model.parameters import get_state_tensors, replace_tensors
from portable.model.regularization import remove_dropout
from portable.model.tensor_parallel_plan import (
    TENSOR_PARALLEL_TYPES,
    check_tensor_parallel_support,
    map_sharded_dims,
)
from portable.model.weight_sources import ComputedTensor
from tests.parity import Beside, loss_and_gradients, off
from tests.promises import record
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import VOCABULARY, tiny_config
from tests.views import assert_same_view, view

MODELS: dict[str, dict[str, Any]] = {
    # 82: two ranks have 41 rows each, which cannot be divided equally by two other ranks.
    "windows": {**TINY_MODEL, "model_type": "mistral", "sliding_window": 12, "intermediate_size": 82},
    "norms of heads": {**TINY_MODEL, "model_type": "qwen3", "head_dim": 8},
    "experts": {**TINY_MODEL, "model_type": "mixtral", "num_local_experts": 4},
}
SHARED: dict[str, Any] = {"strategy": "full_shard", "tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2, a group": (2, {}),
    "FSDP2, four ranks a layer": (4, {"tensor_parallel_size": 4}),
    "FSDP2, two groups": (4, {}),
    "HSDP, copies of a group": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 1}),
    "HSDP": (8, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 4}),
    "recomputed": (2, {"memory__activation_checkpointing": "full"}),
    "update on the host": (4, {"memory__offload_optimizer": "cpu"}),
}


PACKED: dict[str, Any] = {"data__packing": "documents"}
STREAMED = {**PACKED, "data__stream": True, "data__eval_fraction": 0}
CASES: list[Any] = [
    ("FSDP2, a group", "norms of heads", {**PACKED, "train__ema": 0.9, "train__eval_ema": True}),
    ("FSDP2, a group", "experts", {"train__optimizer": "sgd", "train__learning_rate": 0.1}),
    ("FSDP2, four ranks a layer", "norms of heads", PACKED),
    ("FSDP2, two groups", "windows", STREAMED),
    ("HSDP, copies of a group", "windows", {"data__packing": False}),
    # The two above together.
    pytest.param("HSDP", "windows", PACKED, marks=pytest.mark.exhaustive),
    ("recomputed", "windows", {"adapter__type": "lora", "adapter__use_rslora": True}),
    ("update on the host", "windows", PACKED),
]


@pytest.mark.parametrize(("layout", "model", "given"), CASES)
def test_tensor_parallel_losses_equal_one_rank(
    layout: str, model: str, given: dict[str, Any], beside: Beside
) -> None:
    size, settings = LAYOUTS[layout]
    given = {"model__config": {**MODELS[model], "num_key_value_heads": 4}, **given}
    found, expected = beside.ranks(size, {**SHARED, **given, **settings}), beside.one(given)
    assert found == pytest.approx(expected, rel=2e-6, abs=2e-6)
    record(found, expected, 2e-6)


def test_tensor_parallel_losses_match_one_rank_in_bf16(beside: Beside) -> None:
    given = {"model__config": {**MODELS["norms of heads"], "num_key_value_heads": 4}, "precision": "bf16"}
    assert beside.ranks(2, {**SHARED, **given}) == pytest.approx(beside.one(given), rel=1e-2)


@pytest.mark.parametrize(
    "changed",
    [{"intermediate_size": 82}, {"model_type": "mixtral", "num_local_experts": 2}],
    ids=["uneven rows", "an expert for two ranks"],
)
def test_tensor_parallel_checkpoint_equals_one_rank(
    changed: dict[str, Any], beside: Beside, tmp_path: Path
) -> None:
    """The converter also opens it, with the moments."""
    settings = {"model__config": {**TINY_MODEL, **changed}}
    beside.ranks(1, {"strategy": "no_shard", **settings}, tmp_path / "one")
    beside.ranks(4, {**SHARED, **settings}, tmp_path / "shared")
    one, found = (tmp_path / run / "checkpoints" / "step-000002" for run in ("one", "shared"))
    assert_same_view(view(found), view(one), 1e-3)
    assert convert([str(found), str(tmp_path / "out"), "--optimizer", "--verify"]) == 0


def test_shard_group_size_with_tensor_parallelism_across_nodes() -> None:
    config = RunConfig(strategy="hybrid_shard", tensor_parallel_size=4)
    assert compute_shard_group_size(config, 8, 2) == 1
    with pytest.raises(
        UserError, match=r"the number of groups of 4 tensor-parallel ranks \(2\) is not a multiple"
    ):
        compute_shard_group_size(config.replaced({"fsdp.shard_group_size": 8}), 8, 2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DDP": ({"strategy": "no_shard"}, "strategy: no_shard"),
    "ZeRO": ({"strategy": "zero3"}, "strategy: zero3"),
    "backend": ({"backend": "xla"}, "backend: xla"),
    "sequences": ({"context_parallel_size": 2}, "context_parallel_size: 2"),
    "precision": ({"precision": "fp16"}, "precision: fp16"),
    "optimizer": ({"train__optimizer": "muon"}, "train.optimizer: muon"),
    "task": ({"model__task": "masked-lm"}, "model.task: masked-lm"),
    "search": ({"train__micro_batch_size": "auto"}, "train.micro_batch_size: auto"),
    "compiled": ({"compile": True}, "compile: true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensor_parallel_rejects_untested_settings(case: str, corpus: Path, tmp_path: Path) -> None:
    settings, told = REFUSED[case]
    with pytest.raises(UserError, match=f"{told} does not work with tensor parallelism"):
        configured(tmp_path, corpus, **{"tensor_parallel_size": 2, **settings})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "its number of attention heads is 3"),
        ({"num_key_value_heads": 1}, "its number of key-value heads .* is 1"),
        (
            {"intermediate_size": 81},
            "its number of rows or columns of model.layers.0.mlp.gate_proj.weight is 81",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 3},
            "its number of rows or columns of .*experts.* is 3",
        ),
        ({"model_type": "cohere", "use_qk_norm": True}, "a norm for each head"),
        ({"model_type": "apertus"}, "has not been tested with tensor parallelism"),
    ],
)
def test_tensor_parallel_rejects_unsupported_models(changed: dict[str, Any], told: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**TINY_MODEL, **changed})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"^tensor_parallel_size: .*{told}"):
        check_tensor_parallel_support(model, 2)


@pytest.mark.parametrize("given", [{"adapter__type": "ia3"}, {"adapter__use_dora": True}])
def test_tensor_parallel_rejects_unsupported_adapters(
    given: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    given = {"tensor_parallel_size": 2, "strategy": "full_shard", "adapter__type": "lora", **given}
    with pytest.raises(UserError, match=r"^tensor_parallel_size: with an adapter, only LoRA"):
        inspect_run(configured(tmp_path, corpus, **given))


SWITCHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"use_qk_norm": True},
    "phi": {"qk_layernorm": True},
    "glm4_moe_lite with plain queries": {"q_lora_rank": None},
}
"""Settings that add modules outside the plans of these types: norms of heads, and a product."""


def beside_one_rank(types: list[str]) -> dict[str, str]:
    """On one of two ranks, return the difference from one rank, or the error, by type."""
    dist.init_process_group("gloo")
    try:
        return {model_type: _beside_one(model_type) for model_type in types}
    finally:
        dist.destroy_process_group()


def _beside_one(model_type: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    try:
        given = tiny_config(model_type.partition(" ")[0], "causal-lm")
        config = AutoConfig.for_model(**{**given, **SWITCHED.get(model_type, {})})
        plain = AutoModelForCausalLM.from_config(config).float().train()  # some compute otherwise then
        remove_dropout(plain)
        with torch.no_grad():
            for parameter in plain.parameters():  # none at a symmetric point, such as a norm's ones
                parameter.add_(torch.randn_like(parameter) * 0.03)
        batch = {name: torch.randint(5, VOCABULARY, (2, 32)) for name in ("input_ids", "labels")}
        model = copy.deepcopy(plain)
        replace_tensors(model, lambda _, p: torch.nn.Parameter(p.to("meta")), lambda _, buffer: buffer)
        settings = RunConfig(strategy="full_shard", tensor_parallel_size=2, precision="fp32")
        register_zero_gradient_hooks(model)
        sharded = shard_model(model, settings, RankInfo(torch.device("cpu"), dist.get_rank(), 2, 2))
        values = get_state_tensors(plain)
        for name, tensor in get_state_tensors(model).items():
            fill_local_shard(tensor, ComputedTensor.from_tensor(values[name].detach()))
        found = loss_and_gradients(model, batch, sharded.average_gradients)
        apart = off(found, loss_and_gradients(plain, batch))
    except Exception as error:
        return to_one_line(error)
    return apart or ("" if map_sharded_dims(plain, 2) else "nothing is cut")


def types_with_a_plan() -> list[str]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = (name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
    return sorted(name for name in known if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None))


# A plain one, norms of heads, experts, compressed keys, a packed product; and a type whose plan is wrong.
SOME = ["apertus", "deepseek_v3", "gpt_oss", "llama", "phi3", "qwen3_moe", "sarvam_moe", *SWITCHED]


@pytest.mark.parametrize(
    "types",
    [SOME, pytest.param(types_with_a_plan(), marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_tensor_parallel_types_equal_one_rank(types: list[str], ranks: RankPool) -> None:
    found = ranks.run(2, beside_one_rank, types, timeout=900)
    differ = {name: why for name, why in found.items() if why}
    compared = {name for name in types if name.partition(" ")[0] in TENSOR_PARALLEL_TYPES}
    assert set(types) - set(differ) == compared, differ


def test_docs_count_tensor_parallel_types() -> None:
    page = Path(__file__).parents[1] / "docs" / "parallelism.md"
    sentence = f"Tensor parallelism supports {len(TENSOR_PARALLEL_TYPES)} model types, "
    assert sentence in page.read_text("utf-8")
