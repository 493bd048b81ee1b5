"""Recurrent layers on packed documents: the same loss and gradients as on single documents."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from portable.batch import attach_host_copy, read_host_copy
from portable.config import RunConfig
from portable.errors import UserError
from portable.evaluation.metrics import evaluate
from portable.model import document_states
from portable.model.activation_checkpointing import enable_activation_checkpointing
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.document_attention import (
    apply_default_packing,
    build_packing_notes,
    can_separate_states,
    check_document_separation,
    explain_document_mixing,
)
from portable.model.document_states import (
    STATE_FUNCTIONS,
    STATE_SEPARATING_TYPES,
    PackedDocuments,
    find_stateful_layers,
)
from portable.private.transformers_internals import get_module_namespace, is_fused_kernel
from portable.run.batches import build_eval_loader
from tests.engines import ENGINES, Engines
from tests.gpu.test_parity import plain_losses
from tests.parity import opened, take_steps
from tests.portable.test_document_attention import packed, result, tiny
from tests.promises import record
from tests.runs import configured
from tests.tiny_models import tiny_config

LIMIT = 1e-6
"""Largest relative difference of the loss, and of the norm of all gradients."""
LEAK = 1e-3
"""Smallest relative difference of the gradients if states are not reset."""


class Family(NamedTuple):
    """Tiny model with recurrent layers.

    Attributes:
        model_type: Type of its config.
        settings: Changes of the config.
        composite: Whether to build the class that also takes images.
    """

    model_type: str
    settings: Mapping[str, Any] = MappingProxyType({})
    composite: bool = False


_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES = {
    "Qwen3-Next": Family("qwen3_next"),
    "Qwen3.5": Family("qwen3_5_text"),
    "Kimi Linear": Family("kimi_linear"),
    "Nemotron-H": Family(
        "nemotron_h",
        {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"], "num_hidden_layers": 4},
    ),
    "Granite 4": Family("granitemoehybrid", _MIXED),
    "LFM2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Falcon H1": Family("falcon_h1"),
    "Mamba": Family("mamba"),
}
OTHERS = {
    "Qwen3.5, composite": Family("qwen3_5", composite=True),
    "Qwen3.5-MoE": Family("qwen3_5_moe_text"),
    "Qwen3.5-MoE, composite": Family("qwen3_5_moe", composite=True),
    "Bailing hybrid": Family("bailing_hybrid"),
    "Bamba": Family("bamba", {"attn_layer_indices": [1]}),
    "Falcon Mamba": Family("falcon_mamba"),
    "Jamba": Family("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "Lara mini": Family("lara_mini"),
    "LFM2-MoE": Family("lfm2_moe"),
    "LFM2-VL": Family("lfm2_vl", {"layer_types": ["conv", "full_attention"]}, composite=True),
    "LFM3": Family("lfm3"),
    "LFM3-VL": Family("lfm3_vl", composite=True),
    "OLMo hybrid": Family("olmo_hybrid"),
    "Zamba": Family("zamba"),
    "Mamba 2": Family("mamba2"),
    "Zamba2": Family("zamba2"),
}


def build(family: Family) -> PreTrainedModel:
    """Build a tiny model whose weights make leaks large, and rounding errors small."""
    model = tiny(family.model_type, composite=family.composite, **family.settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.div_(1.5)
    return model


class Gaps(NamedTuple):
    """Relative differences between packed and single documents."""

    loss: float
    gradients: float


def compute_gaps(model: PreTrainedModel) -> Gaps:
    """Compare the loss, and the norm of all gradients."""
    documents, batch = packed()
    alone = [{"input_ids": tokens[None, :-1], "labels": tokens[None, 1:]} for tokens in documents]
    expected_loss, expected = result(model, alone)
    loss, gradients = result(model, [batch])
    assert gradients.keys() == expected.keys()
    differences = {name: gradients[name] - gradient for name, gradient in expected.items()}
    return Gaps(abs(loss - expected_loss) / expected_loss, norm(differences) / norm(expected))


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()))


def check_gaps(model: PreTrainedModel) -> None:
    gaps = compute_gaps(model)
    assert max(gaps) < LIMIT, gaps
    record([1 + gap for gap in gaps], [1.0, 1.0], LIMIT)


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, id=name) for name, family in FAMILIES.items()),
        *(pytest.param(family, id=name, marks=pytest.mark.exhaustive) for name, family in OTHERS.items()),
    ],
)
def test_states_do_not_leak_into_next_document(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leak without the transform."""
    model = build(family)
    assert explain_document_mixing(model.config) is None
    assert explain_document_mixing(model.config, separates_states=False) is not None
    check_document_separation(model)
    with monkeypatch.context() as patch:
        patch.setattr(document_states, "find_stateful_layers", lambda _: [])
        assert compute_gaps(copy.deepcopy(model)).gradients > LEAK
    check_gaps(model)


def test_every_type_is_compared() -> None:
    rows = [*FAMILIES.values(), *OTHERS.values()]
    assert {family.model_type for family in rows} == STATE_SEPARATING_TYPES


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", ["Qwen3-Next", "Nemotron-H", "Mamba"])
def test_recomputed_layers_reset_states(name: str, kind: str) -> None:
    model = build(FAMILIES[name])
    enable_activation_checkpointing(model, kind)
    check_gaps(model)


def test_adapted_layers_reset_states() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = build(FAMILIES["Qwen3.5"])
    config = LoraConfig(target_modules=["in_proj_qkv", "out_proj", "q_proj"], init_lora_weights=False)
    adapted: Any = inject_adapter_in_model(config, model)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert any("linear_attn.in_proj_qkv.lora_A" in name for name in trained)
    check_gaps(adapted)


def test_copied_model_resets_states_of_its_own_layers() -> None:
    model = build(FAMILIES["LFM2"])
    compute_gaps(model)
    check_gaps(copy.deepcopy(model))


def test_states_of_one_sample_continue_without_packing() -> None:
    """Generation and padded batches run the layers of transformers without changes, after a packed batch."""
    model, plain = build(FAMILIES["Qwen3-Next"]), build(FAMILIES["Qwen3-Next"])
    compute_gaps(model)
    tokens = torch.randint(5, 300, (2, 24))
    for training in (True, False):
        model.train(training)
        plain.train(training)
        batch = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
        assert result(model, [batch])[0] == result(plain, [batch])[0]
    generated = [each.generate(tokens[:, :7], max_new_tokens=5, do_sample=False) for each in (model, plain)]
    assert torch.equal(*generated)


def test_compiled_layers_reset_states() -> None:
    """Other lengths of documents compile nothing."""
    from torch._dynamo.testing import CompileCounter

    model, counter = build(FAMILIES["Qwen3-Next"]), CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter)
    check_gaps(model)
    _, batch = packed()
    result(model, [batch])
    before = counter.frame_count
    result(model, [{name: values.flip(0) for name, values in batch.items()}])
    assert counter.frame_count == before > 0


# -- fused kernels -----------------------------------------------------------------------------------------


def build_kernel(name: str, function: Any, calls: list[str]) -> Any:
    """Build a stand-in for a kernel of fla, causal_conv1d or mamba_ssm, with their rules for boundaries."""

    def run_delta_rule(*arguments: Any, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, **keywords: Any) -> Any:
        assert torch.equal(cu_seqlens, cu_seqlens_cpu) and (cu_seqlens.diff() > 0).all()
        assert all(tensor.shape[:2] == (1, cu_seqlens[-1]) for tensor in arguments)
        parts = zip(*(tensor.split(cu_seqlens.diff().tolist(), 1) for tensor in arguments), strict=True)
        split = {name: keywords.pop(name).split(cu_seqlens.diff().tolist(), 1) for name in ("g", "beta")}
        gates = zip(*split.values(), strict=True)
        outputs = [
            function(*part, g=g, beta=beta, **keywords)[0]
            for part, (g, beta) in zip(parts, gates, strict=True)
        ]
        return torch.cat(outputs, 1), None

    def run_rows(*arguments: Any, seq_idx: Tensor, **keywords: Any) -> Any:
        assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in seq_idx]
        positions = torch.cat([torch.cat([torch.arange(n) for n in row])[None] for row in lengths])
        if name == "causal_conv1d_fn":
            assert arguments[0].stride(1) == 1  # causal_conv1d needs channels last
        return PackedDocuments(lengths, positions).compute(name, function, *arguments, **keywords)

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        run = run_rows if STATE_FUNCTIONS[name].boundaries == "seq_idx" else run_delta_rule
        return run(*arguments, **keywords)

    return functools.wraps(function)(kernel)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("Qwen3-Next", {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}),
        ("Kimi Linear", {"causal_conv1d_fn", "chunk_kimi_delta_attention"}),
        ("Granite 4", {"causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"}),
        ("LFM2", {"causal_conv1d_fn"}),
    ],
)
def test_fused_kernels_receive_boundaries(
    name: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins replace the kernels, which need a GPU. Mamba 2 has one kernel for all, and several others."""
    model = build(FAMILIES[name])
    namespace, calls = get_module_namespace(find_stateful_layers(model)[0]), list[str]()
    replaced = {kernel: build_kernel(kernel, namespace[kernel], calls) for kernel in kernels}
    documents, batch = packed()
    alone = [{"input_ids": tokens[None, :-1], "labels": tokens[None, 1:]} for tokens in documents]
    expected_loss, expected = result(model, alone)
    with monkeypatch.context() as patch:
        for kernel, function in replaced.items():
            patch.setitem(namespace, kernel, function)
        patch.setattr(document_states, "is_fused_kernel", lambda each: each in replaced.values())
        loss, gradients = result(model, [batch])
    assert set(calls) == kernels
    assert loss == pytest.approx(expected_loss, rel=LIMIT)
    assert norm({key: gradients[key] - value for key, value in expected.items()}) < LIMIT * norm(expected)


def test_fused_kernels_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    package = ModuleType("some_kernels")
    package.fast = lambda value, seq_idx=None: value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_kernels", package)

    def reference(value: Any, **_: Any) -> Any:
        return value

    assert is_fused_kernel(use_kernel_func_from_hub_with_fallback("fast", "some_kernels")(reference))
    assert not is_fused_kernel(use_kernel_func_from_hub_with_fallback("fast", "no_kernels")(reference))
    assert not is_fused_kernel(reference)


def test_lengths_are_read_from_host() -> None:
    """A tensor on the meta device has no values that could be read."""
    lengths = torch.tensor([[3, 5, 0]])
    column = lengths.to("meta")
    attach_host_copy(column, lengths)
    assert read_host_copy(column) == read_host_copy(lengths) == [[3, 5, 0]]


# -- runs --------------------------------------------------------------------------------------------------

CONVERSATIONS: dict[str, Any] = {
    "data__chat_template": "chatml",
    "data__format": "messages",
    "data__seq_len": 64,
    "data__eval_fraction": 0,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 2,
    "train__steps": 2,
}


def describe(model_type: str, **settings: Any) -> dict[str, Any]:
    return {**CONVERSATIONS, "model__config": {**tiny_config(model_type, "causal-lm"), **settings}}


def losses_and_norms(config: RunConfig) -> list[tuple[float, float]]:
    taken = take_steps(config, 2)
    return list(zip(taken.losses, taken.norms, strict=True))


@pytest.mark.parametrize(
    ("engine", "size", "family", "settings"),
    [
        ("full_shard", 2, "Qwen3-Next", {}),
        ("zero2", 2, "Qwen3-Next", {}),
        ("zero3", 2, "Nemotron-H", {}),
        ("full_shard", 2, "Granite 4", {"memory__activation_checkpointing": "full"}),
    ],
)
def test_engine_losses_of_packed_conversations_match_single_ones(
    engine: str,
    size: int,
    family: str,
    settings: dict[str, Any],
    engines: Engines,
    conversations: Path,
    tmp_path: Path,
) -> None:
    """On each rank, samples have other numbers of documents."""
    model = FAMILIES[family]
    common = describe(model.model_type, **model.settings)
    plain = configured(tmp_path / "plain", conversations, **common)
    assert apply_default_packing(plain).data.packing == "documents"
    expected = plain_losses(plain, 2)
    more = {**ENGINES[engine].settings, **settings, "train__micro_batch_size": 1}
    config = configured(tmp_path / "run", conversations, **common | more)
    taken = engines.run(engine, size, losses_and_norms, config)
    assert [loss for loss, _ in taken] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [grad for _, grad in taken] == pytest.approx([grad for _, grad in expected], rel=1e-4)


def test_evaluation_resets_states(conversations: Path, tmp_path: Path) -> None:
    metrics = []
    for packing in ("documents", False):
        settings = {**describe("qwen3_next"), "data__eval_fraction": 0.2, "data__packing": packing}
        with opened(configured(tmp_path, conversations, **settings)) as trial:
            run = trial.run
            assert run.data.first_eval is not None
            loader = build_eval_loader(run, run.data.first_eval)
            metrics.append(evaluate(trial.backend, trial.engine, loader, run.metrics))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


def test_conversations_are_packed_unless_states_would_leak(conversations: Path, tmp_path: Path) -> None:
    def resolve(model_type: str, **settings: Any) -> tuple[Any, list[str]]:
        config = configured(tmp_path, conversations, **describe(model_type) | settings)
        config = apply_default_packing(config)
        model = build_model_on_meta(load_model_config(config.model), config.model)
        return config.data.packing, build_packing_notes(config, model)

    assert resolve("qwen3_next") == ("documents", [])
    reason = "has layers of type linear_attention, which carry a state from one text to the next"
    for model_type, settings in (
        ("qwen3_next", {"backend": "xla"}),
        ("qwen3_next", {"backend": "tpu"}),
        ("qwen3_next", {"context_parallel_size": 2}),
        ("minimax", {}),
        ("recurrent_gemma", {}),
    ):
        packing, notes = resolve(model_type, **settings)
        assert packing is False and len(notes) == 1 and reason in notes[0], model_type


def test_xla_rejects_packed_documents_of_recurrent_layers(conversations: Path, tmp_path: Path) -> None:
    settings = {**describe("lfm2", layer_types=["conv", "full_attention"]), "data__packing": "documents"}
    config = configured(tmp_path, conversations, backend="xla", **settings)
    model = build_model_on_meta(load_model_config(config.model), config.model)
    with pytest.raises(
        UserError, match=r"data.packing: Lfm2ForCausalLM has layers of type conv, which carry"
    ):
        check_document_separation(model, separates_states=can_separate_states(config))
