"""The planner's estimates of activation memory, compared with torch's allocator for the same passes."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.allocator import allocations
from portable.adapters.adapter import build_training_model
from portable.config import RunConfig, load_config
from portable.data.images import ImageSize
from portable.data.tokens.image_processing import load_image_processor
from portable.model import build as models
from portable.model.activation_checkpointing import enable_activation_checkpointing
from portable.model.activation_offloading import offload_activations
from portable.model.chunked_loss import install_chunked_head
from portable.model.freezing import freeze_parameters, list_frozen_names
from portable.model.image_features import compute_flops_per_feature
from portable.model.layers import find_transformer_layers, gives_all_parameters_gradients
from portable.model.loss import compute_summed_cross_entropy
from portable.model.parameters import replace_tensors
from portable.planner.activations import (
    TORCH_DTYPES,
    UnstoredCopier,
    build_fake_batch,
    measure_activations,
    measure_image_tower,
)
from portable.planner.pass_cost import Activations, ComputeMode, PassRequest, Peak
from portable.private.transformers_internals import skip_mask_value_checks
from tests.image_models import PROCESSORS, write_image_model
from tests.promises import record

FAMILIES = yaml.safe_load(Path(__file__).with_name("activations_models.yaml").read_text("utf-8"))
TASKS = {"bert": "masked-lm", "t5": "seq2seq-lm", "longformer": "masked-lm"}
BATCH = 4


def config_of(family: str, precision: str, recompute: str, **more: Any) -> RunConfig:
    return load_config(
        None,
        {
            "backend": "cpu",
            "precision": precision,
            "model.config": FAMILIES[family],
            "model.task": TASKS.get(family, "causal-lm"),
            "data.source": "texts.jsonl",
            "data.seq_len": 64,
            "memory.activation_checkpointing": recompute,
            **more,
        },
    )


def built(config: RunConfig) -> Any:
    return build_training_model(models.load_model_config(config.model), config)


def measured(model: nn.Module, request: PassRequest) -> int:
    """Return the peak of the allocator in forward and backward, without parameters and gradients."""
    real = copy.deepcopy(model)
    computed = TORCH_DTYPES[request.precision]
    dtype = computed if request.compute == "cast" else None
    replace_tensors(
        real,
        lambda _, p: nn.Parameter(0.02 * torch.randn(p.shape).to(dtype or p.dtype), p.requires_grad),
        lambda _, b: torch.zeros(b.shape, dtype=b.dtype),
    )
    head = install_chunked_head(real, request.loss_chunk_tokens)
    if request.recompute != "none":
        enable_activation_checkpointing(real, request.recompute)
    if request.offload_activations:
        offload_activations(real, request.recompute, UnstoredCopier())
    real.train()
    if request.compiled:  # inductor's graphs, run as they are
        for _, layer in find_transformer_layers(real):
            layer.compile(backend="aot_eager_decomp_partition")
    batch = build_fake_batch(real, request)

    def passes() -> None:
        cast = request.compute == "autocast"
        with torch.autocast("cpu", computed) if cast else nullcontext(), skip_mask_value_checks():
            loss = compute_summed_cross_entropy(real, batch, head)
        loss.backward()

    passes()
    with allocations() as recording, recording.phase("passes"):
        passes()
    return recording.phases["passes"].peak


FROZEN = {"train.frozen": ["embed_tokens", r"layers\.[012]\."]}
# With an adapter, a layer's first gradient comes when much of it is recomputed.
ADAPTER = {"adapter.type": "lora", "adapter.r": 2, "model.config.num_hidden_layers": 8}
OFFLOADED = {"memory.offload_activations": True, "model.config.num_hidden_layers": 8}
CASES: list[tuple[str, str, ComputeMode, str, dict[str, Any]]] = [
    ("llama", "bf16", "cast", "none", {}),
    ("llama", "bf16", "autocast", "selective", {}),
    ("gpt2", "bf16", "cast", "full", {}),
    ("bert", "fp32", "plain", "none", {}),
    ("t5", "bf16", "cast", "none", {}),
    ("mixtral", "bf16", "cast", "full", {}),
    ("gemma2", "bf16", "autocast", "none", {}),
    ("gemma2", "bf16", "cast", "full", {}),
    ("llama", "bf16", "cast", "none", FROZEN),
    ("llama", "bf16", "autocast", "none", {"train.frozen": ["mlp"]}),
    ("llama", "bf16", "cast", "full", ADAPTER),
    ("llama", "bf16", "autocast", "full", ADAPTER),
    ("llama", "bf16", "cast", "full", {"memory.loss_chunk_tokens": 32}),
    # On an H200, the measured peak is 1.005 times the estimate for a Llama with 1.2 billion parameters;
    # uncompiled, 0.78.
    ("llama", "bf16", "autocast", "none", {"compile": True}),
    ("gpt2", "bf16", "cast", "none", {"compile": True}),
    ("llama", "bf16", "cast", "none", OFFLOADED),
    ("llama", "bf16", "autocast", "none", OFFLOADED),
    ("llama", "bf16", "cast", "full", OFFLOADED),
]


@pytest.mark.parametrize(("family", "precision", "compute", "recompute", "more"), CASES)
def test_activation_estimate_is_within_tenth_of_allocation(
    family: str, precision: str, compute: ComputeMode, recompute: str, more: dict[str, Any]
) -> None:
    config = config_of(family, precision, recompute, **more)
    model = built(config)
    if "train.frozen" in more:
        freeze_parameters(model, list_frozen_names(model), torch.bfloat16)
    request = PassRequest.from_config(config, micro_batch=BATCH, compute=compute, on_gpu=False)
    assert request.compiled == ("compile" in more)
    planned, allocated = measure_activations(model, request).total_bytes, measured(model, request)
    assert planned == pytest.approx(allocated, rel=0.1)
    record([planned], [allocated], 0.1)
    if request.compiled:
        assert planned < measure_activations(model, replace(request, compiled=False)).total_bytes


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_activation_estimate_of_quantized_base_adds_one_weight(kind: str) -> None:
    """A quantized base needs at most one dequantized weight more than an adapter on an unquantized base."""
    pytest.importorskip("bitsandbytes")
    found = {}
    for base in ("auto", kind):
        config = config_of("llama", "bf16", "full", **{"adapter.type": "lora", "adapter.base": base})
        model = build_training_model(models.load_model_config(config.model), config)
        request = PassRequest.from_config(config, micro_batch=1, compute="autocast", on_gpu=True)
        peaks = measure_activations(model, request)
        assert peaks.failure is None and peaks.in_layers.copy_bytes >= 0
        found[base] = peaks.total_bytes
    largest = 2 * FAMILIES["llama"]["hidden_size"] * FAMILIES["llama"]["intermediate_size"]
    assert -largest <= found[kind] - found["auto"] <= 2 * largest


def test_gives_all_parameters_gradients_if_unused_ones_are_frozen() -> None:
    model = built(config_of("xlnet", "fp32", "none"))  # no batch uses its mask and segment embeddings
    assert "transformer.mask_emb" in list_frozen_names(model) and gives_all_parameters_gradients(model)


@pytest.mark.parametrize("family", ["longformer", "opt"])
def test_gives_all_parameters_gradients_detects_unused_parameters(family: str) -> None:
    assert not gives_all_parameters_gradients(built(config_of(family, "fp32", "none")))


@pytest.mark.parametrize("trainable", [None, ["."]], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", PROCESSORS)
def test_tower_estimate_is_within_tenth_of_allocation(
    tmp_path: Path, family: str, trainable: list[str] | None
) -> None:
    folder = write_image_model(tmp_path, family)
    processor = load_image_processor(str(folder), offline=True)
    assert processor is not None
    arrays = processor.build_blank_columns([ImageSize(32, 32), ImageSize(24, 40)])
    columns = {name: torch.from_numpy(values) for name, values in arrays.items()}
    config = load_config(
        None,
        {
            "backend": "cpu",
            "model.name_or_path": str(folder),
            "data.source": "squares.jsonl",
            "train.trainable": trainable,
        },
    )
    model: Any = built(config)
    request = PassRequest.from_config(config, micro_batch=1, compute="plain", on_gpu=False)
    estimate = measure_image_tower(model, request, columns)
    flops_per_feature = compute_flops_per_feature(model, columns)
    replace_tensors(
        model,
        lambda _, p: nn.Parameter(0.02 * torch.randn(p.shape), p.requires_grad),
        lambda _, b: torch.zeros(b.shape, dtype=b.dtype),
    )
    model.train()
    names = inspect.signature(model.get_image_features).parameters
    features: list[Any] = []

    def run() -> None:
        inputs = {name: values.clone() for name, values in columns.items() if name in names}
        features[:] = [inputs, model.get_image_features(**inputs)]

    run()
    features.clear()
    with allocations() as recording, recording.phase("tower"):
        run()
    assert estimate.peak.total_bytes == pytest.approx(recording.phases["tower"].peak, rel=0.1)
    assert estimate.failure is None and estimate.kept.total_bytes < estimate.peak.total_bytes
    features.clear()
    with FlopCounterMode(display=False) as counter:
        run()
        values = getattr(features[1], "pooler_output", features[1])
        tensors = [values] if isinstance(values, torch.Tensor) else list(values)
        if trainable:
            torch.cat([tensor.flatten() for tensor in tensors]).sum().backward()
    count = sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)
    assert flops_per_feature * count == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_samples_share_copies_of_tower_weights(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path, "qwen2_5_vl")
    processor = load_image_processor(str(folder), offline=True)
    assert processor is not None
    arrays = processor.build_blank_columns([ImageSize(32, 32)])
    columns = {name: torch.from_numpy(values) for name, values in arrays.items()}
    settings = {"backend": "cpu", "model.name_or_path": str(folder), "data.source": "squares.jsonl"}
    config = load_config(None, {**settings, "precision": "bf16", "train.trainable": ["."]})
    request = PassRequest.from_config(config, micro_batch=1, compute="autocast", on_gpu=False)
    tower = measure_image_tower(built(config), request, columns)
    assert 0 < tower.kept.copy_bytes <= tower.peak.copy_bytes
    first, second = (Activations(Peak(0, 0), Peak(0, 0)).add_tower(tower, number) for number in (1, 2))
    assert second.in_layers.copy_bytes == first.in_layers.copy_bytes == tower.kept.copy_bytes
    assert second.in_layers.work_bytes == 2 * first.in_layers.work_bytes
    assert second.before_layers.total_bytes - first.before_layers.total_bytes == tower.peak.work_bytes
