"""Packed documents compared with single ones: the same loss and gradients, for each method of separation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import flex_attention
from transformers import PreTrainedModel

from portable.batch import Batch
from portable.errors import UserError
from portable.evaluation.metrics import evaluate
from portable.model.activation_checkpointing import enable_activation_checkpointing
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.document_attention import (
    DOCUMENT_SEPARATING_LAYERS,
    DOCUMENT_SEPARATING_TYPES,
    STATEFUL_LAYERS,
    UNTESTED_LAYERS,
    check_causal_attention,
    check_document_separation,
    explain_document_mixing,
)
from portable.model.loss import compute_summed_cross_entropy
from portable.private.transformers_internals import skip_mask_value_checks
from portable.run.batches import build_eval_loader
from tests.composite import build_composite_config
from tests.parity import opened
from tests.runs import configured
from tests.tiny_models import tiny_config

LENGTH, WINDOW = 24, 4
ROWS = ([9, 5, 7], [13, 8], [24], [1, 2, 14])
"""The lengths of the documents of each sample; the rest is padding. Most are longer than the window."""
PAD = 3
INDEXED = ["deepseek_v32", "glm_moe_dsa"]
USUAL = [
    *INDEXED,
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "opt",
    "phi",
]


def packed() -> tuple[list[torch.Tensor], Batch]:
    """Return documents of random tokens, and the batch that packs them."""
    random = torch.Generator().manual_seed(0)
    shape = (len(ROWS), LENGTH)
    batch = {
        "input_ids": torch.full(shape, PAD),
        "labels": torch.full(shape, -100),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "document_lengths": torch.zeros(len(ROWS), 4, dtype=torch.int64),
    }
    documents = []
    for row, lengths in enumerate(ROWS):
        at = 0
        for number, length in enumerate([*lengths, LENGTH - sum(lengths)]):
            batch["document_lengths"][row, number] = length
            batch["position_ids"][row, at : at + length] = torch.arange(length)
            if number < len(lengths):
                documents.append(torch.randint(3, 300, (length + 1,), generator=random))
                batch["input_ids"][row, at : at + length] = documents[-1][:-1]
                batch["labels"][row, at : at + length] = documents[-1][1:]
            at += length
    return documents, batch


def tiny(
    model_type: str, attention: str = "sdpa", *, composite: bool = False, **settings: Any
) -> PreTrainedModel:
    """Build a tiny model with windows shorter than the documents, whose weights make every token matter."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(**{**tiny_config(model_type, "causal-lm"), **settings})
    for part in (config, config.get_text_config()):
        for name in ("sliding_window", "index_topk"):
            if getattr(part, name, None):
                setattr(part, name, WINDOW)
        if hasattr(part, "is_decoder"):
            part.is_decoder = True
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not composite:
        build = AutoModelForCausalLM.from_config
    else:
        config = build_composite_config(model_type)
        for name, value in settings.items():
            setattr(config.get_text_config(), name, value)
        build = getattr(transformers, config.architectures[0])._from_config
    torch.manual_seed(0)
    try:
        model: Any = build(config, attn_implementation=attention)
    except ValueError:  # the type has no sdpa
        model = build(config, attn_implementation="eager")
    model.config.use_cache = model.config.get_text_config().use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) / 10)
    return model.float().train()


def result(model: PreTrainedModel, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the summed loss and its gradients."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        with skip_mask_value_checks():
            loss = compute_summed_cross_entropy(model, batch)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gap(model: PreTrainedModel, batch: Batch, documents: list[torch.Tensor]) -> float:
    """Return the largest relative difference of loss and gradients between packed and single documents."""
    alone = [{"input_ids": tokens[None, :-1], "labels": tokens[None, 1:]} for tokens in documents]
    loss, gradients = result(model, alone)
    ours, found = result(model, [batch])
    gaps = [abs(ours - loss) / loss]
    for name, gradient in gradients.items():
        largest = gradient.abs().max()
        if largest > 1e-6:
            gaps.append(float((found[name] - gradient).abs().max() / largest))
    return float(torch.tensor(gaps).max())  # NaN if any is


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in USUAL else pytest.mark.exhaustive)
        for name in sorted(DOCUMENT_SEPARATING_TYPES)
    ],
)
def test_packed_documents_equal_single_documents(model_type: str) -> None:
    """The documents are separated by one call per document, or by masks."""
    documents, batch = packed()
    model = tiny(model_type)
    masked = {name: values for name, values in batch.items() if name != "document_lengths"}
    most = 1e-5 if model_type in USUAL else 1e-4
    assert gap(model, batch, documents) < most and gap(model, masked, documents) < most
    if model_type == "mistral":  # layers that are computed again run outside of the forward pass's context
        enable_activation_checkpointing(model, "full")
        assert gap(model, batch, documents) < most


def test_every_layer_type_of_transformers_is_classified() -> None:
    """If this test fails, compare packed with single documents, then add the new layer type to a set."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    sets = (DOCUMENT_SEPARATING_LAYERS, STATEFUL_LAYERS, UNTESTED_LAYERS)
    layer_types = {
        *ALLOWED_ATTN_LAYER_TYPES,
        "mlp",
    }  # transformers lists "mlp" only in the config of Nemotron-H
    assert set().union(*sets) == layer_types
    assert sum(map(len, sets)) == len(layer_types)


@pytest.mark.parametrize("model_type", INDEXED)
def test_indexed_attention_separates_documents(model_type: str) -> None:
    model = tiny(model_type)
    assert "indexed_attention" in model.config.layer_types and model.config.index_topk == WINDOW
    assert explain_document_mixing(model.config) is None
    check_document_separation(model)


def test_evaluation_of_packed_documents_equals_padded(tmp_path: Path, corpus: Path) -> None:
    """Both kinds of packing hold out the same documents."""
    found = []
    for packing in ("documents", False):
        with opened(configured(tmp_path, corpus, data__packing=packing, data__seq_len=64)) as trial:
            run = trial.run
            assert run.data.first_eval is not None
            found.append(
                evaluate(
                    trial.backend, trial.engine, build_eval_loader(run, run.data.first_eval), run.metrics
                )
            )
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_document_lengths_do_not_recompile_layers() -> None:
    """The lengths of the documents are not part of the compiled shapes."""
    from torch._dynamo.testing import CompileCounter

    documents, batch = packed()
    model, counter = tiny("gemma2"), CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter)
    assert gap(model, batch, documents) < 1e-5
    result(model, [batch])
    before = counter.frame_count
    other = {name: values.flip(0) for name, values in batch.items()}
    whole = {**other, "position_ids": torch.arange(LENGTH).expand(len(ROWS), -1).contiguous()}
    result(model, [other])
    result(model, [whole])
    assert counter.frame_count == before > 0


def test_flash_attention_receives_document_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over the sequences replaces the kernel, which needs a GPU."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen = []

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **keywords: Any) -> Any:
        ends = keywords.get("cu_seq_lens_q")
        if ends is None:
            return plain(module, query, key, value, mask, scaling=keywords["scaling"])
        assert mask is None and ends is keywords["cu_seq_lens_k"] and ends.dtype == torch.int32
        assert keywords["max_length_q"] == keywords["max_length_k"] == LENGTH
        seen.append(ends.tolist())
        one_row = [t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (query, key, value)]
        parts = zip(*(t.split(ends.diff().tolist(), dim=2) for t in one_row), strict=True)
        results = [
            plain(module, *part, None, scaling=keywords["scaling"])[0] for part in parts if len(part[0][0][0])
        ]
        return torch.cat(results, dim=1).view(query.shape[0], LENGTH, *results[0].shape[2:]), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    documents, batch = packed()
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    assert gap(model, batch, documents) < 1e-5
    assert len(seen) == 2 and len(seen[0]) == 1 + batch["document_lengths"].numel()
    assert seen[0][-1] == len(ROWS) * LENGTH


def attend_by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Compute causal attention of a sequence, ``[tokens, heads, head size]``, by the plain formula."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    is_visible = (distance >= 0) & (distance <= (len(q) if window is None or window < 0 else window))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_visible, -torch.inf).softmax(-1), v)


class FlashAttention3(ModuleType):
    """Functions of the package flash-attn-3, with the arguments of version 3 that are used here."""

    flash_attn_with_kvcache = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.offsets: list[list[int]] = []

    def flash_attn_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (-1, -1),
    ) -> Any:
        assert causal
        rows = zip(q, k, v, strict=True)
        return torch.stack([attend_by_formula(*row, softmax_scale, window_size[0]) for row in rows])

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (-1, -1),
    ) -> Any:
        assert causal and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == LENGTH
        self.offsets.append(cu_seqlens_q.tolist())
        queries, keys, values = (t.split(cu_seqlens_q.diff().tolist()) for t in (q, k, v))
        parts = zip(queries, keys, values, strict=True)
        return torch.cat([attend_by_formula(*part, softmax_scale, window_size[0]) for part in parts])


class FlashAttention4(FlashAttention3):
    """Functions of the package flash-attn-4, whose results contain the normalizers of the softmax."""

    def flash_attn_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (None, None),
        learnable_sink: Any = None,
    ) -> Any:
        return super().flash_attn_func(q, k, v, softmax_scale, causal, window_size), None

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = (None, None),
        learnable_sink: Any = None,
    ) -> Any:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return super().flash_attn_varlen_func(q, k, v, *lengths, softmax_scale, causal, window_size), None


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("kernel", "module", "package"),
    [
        ("flash_attention_3", "flash_attn_interface", FlashAttention3),
        ("flash_attention_4", "flash_attn.cute", FlashAttention4),
    ],
)
def test_flash_attention_packages_receive_documents(
    kernel: str, module: str, package: type[FlashAttention3], model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formulas replace the functions of the packages, which need a GPU. transformers calls them."""
    functions = package(module)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, module, functions)
    monkeypatch.setattr("transformers.modeling_flash_attention_utils._loaded_implementation", None)
    documents, batch = packed()
    model = tiny(model_type)
    model.config._attn_implementation = kernel
    check_document_separation(model)
    assert gap(model, batch, documents) < 1e-5
    assert len(functions.offsets) == model.config.num_hidden_layers
    assert functions.offsets[0][-1] == len(ROWS) * LENGTH


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral"])
def test_flex_attention_separates_documents(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a backward pass for CPUs, but rejects it because it is not compiled."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    documents, batch = packed()
    model = tiny(model_type, "flex_attention")
    assert model.config._attn_implementation == "flex_attention"
    mixed = {name: values for name, values in batch.items() if name in ("input_ids", "labels")}
    with torch.compiler.set_stance("force_eager"):
        assert gap(model, batch, documents) < 1e-5
        assert gap(model, mixed, documents) > 1e-3
    check_document_separation(model)


def test_document_packing_rejects_unsupported_models(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    for kind, more, why in (
        ("minimax", {}, "has layers of type linear_attention"),
        ("recurrent_gemma", {}, "has layers of type linear_attention"),
        ("rwkv", {}, "has not been tested to keep packed texts separate"),
        ("xlstm", {}, "has not been tested to keep packed texts separate"),
        ("bart", {}, "has not been tested to keep packed texts separate"),
        ("bert", {"is_decoder": False}, "attends in both directions; set is_decoder: true"),
    ):
        given = {**tiny_config(kind, "causal-lm"), **more}
        config = configured(tmp_path, corpus, model__config=given, data__packing="documents")
        model = build_model_on_meta(load_model_config(config.model), config.model)
        with pytest.raises(
            UserError, match=f"data.packing: {type(model).__name__} {why}.*(;|, or) set data.packing"
        ):
            check_document_separation(model)
    check_document_separation(tiny("llama"))
    monkeypatch.setitem(MASKS._global_mapping, "org/other", MASKS["sdpa"])
    with pytest.raises(
        UserError,
        match=r"data.packing: the attention kernel org/other does not separate packed texts; .*sdpa",
    ):
        model = tiny("llama")
        model.config._attn_implementation = "org/other"
        check_document_separation(model)


def sees_later_tokens(model: Any) -> bool:
    """Whether another last token changes the logits of earlier tokens."""
    tokens = torch.randint(5, 300, (1, 12))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 7) % 290 + 5
    with torch.no_grad():
        logits, others = (model(input_ids=ids).logits[:, :-1] for ids in (tokens, changed))
    return float((logits - others).abs().max()) > 1e-5 * float(logits.abs().max())


@pytest.mark.parametrize(
    ("model_type", "settings", "remedy"),
    [
        ("bert", {"is_decoder": False}, "set is_decoder: true in model.config"),
        ("bert", {"is_decoder": True}, None),
        ("roformer", {"is_decoder": False}, "set is_decoder: true in model.config"),  # custom masks
        ("rembert", {"is_decoder": True}, None),
        ("gpt_neox", {"is_decoder": False}, None),
        ("llama", {"is_decoder": False}, None),
        ("xlm", {"causal": False}, "set causal: true in model.config"),
        ("xlm", {"causal": True}, None),
        ("xlnet", {"attn_type": "bi"}, "set attn_type: uni in model.config"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "set use_bidirectional_attention: false in model",
        ),
        ("gemma3_text", {"use_bidirectional_attention": False}, None),
        ("cpmant", {}, "choose another model"),
        ("bart", {}, None),
    ],
)
def test_check_causal_attention_rejects_models_that_see_labels(
    model_type: str, settings: dict[str, Any], remedy: str | None
) -> None:
    config = transformers.AutoConfig.for_model(**{**tiny_config(model_type, "causal-lm"), **settings})
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.config.use_cache = False
    assert sees_later_tokens(model) == (remedy is not None)
    with torch.device("meta"):
        on_meta = transformers.AutoModelForCausalLM.from_config(config)
    if remedy is None:
        check_causal_attention(on_meta)
    else:
        with pytest.raises(UserError, match=f"attends in both directions.*; {remedy}"):
            check_causal_attention(on_meta)
