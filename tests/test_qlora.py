"""Adapters on a base in 4 and 8 bits, compared with a loop in plain torch, peft and bitsandbytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from portable.converters import open_checkpoint
from portable.data.dataset import build_data
from portable.errors import UserError
from portable.private.bitsandbytes_internals import import_bitsandbytes
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests import test_adapters as of_adapters
from tests.engines import accumulated
from tests.gpu.test_pretrained_memory import peak_of
from tests.parity import launched, take_steps
from tests.runs import TINY_MODEL, configured

try:
    bnb: Any = import_bitsandbytes()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

from pathlib import Path

from portable.config import RunConfig
from tests.engines import Engines

STEPS = 4
COMMON: dict[str, Any] = {
    "model__config": {**TINY_MODEL, "hidden_size": 64, "intermediate_size": 96},
    "adapter__type": "lora",
    "train__micro_batch_size": 3,
    "train__global_batch_size": 12,
    "train__steps": STEPS,
    "train__learning_rate": 1e-2,
}


def in_place_of(linear: nn.Linear, kind: str) -> Any:
    """Return bitsandbytes' layer with the values of ``linear``."""
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    if kind == "nf4":
        made = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
    else:
        made = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def peft_losses(config: RunConfig) -> list[float]:
    """Train the same run with only peft and bitsandbytes' layers."""
    kind = config.adapter.base

    def quantize(base: Any, state: dict[str, Any]) -> dict[str, Any]:
        lora = {name: tensor for name, tensor in state.items() if "lora" in name}
        base.load_state_dict({n.replace(".base_layer", ""): state[n] for n in state.keys() - lora.keys()})
        for name, module in list(base.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                base.set_submodule(name, in_place_of(module, kind))
        setattr(base, f"is_loaded_in_{4 if kind == 'nf4' else 8}bit", True)
        return lora

    return [loss for loss, _ in of_adapters.peft_losses(config, config.train.steps or STEPS, quantize)]


@pytest.fixture(scope="module")
def truth(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("truth")
    return {
        kind: peft_losses(configured(folder, corpus, **COMMON, adapter__base=kind))
        for kind in ("nf4", "int8")
    }


@pytest.mark.parametrize(
    ("kind", "size", "settings"),
    [
        ("nf4", 1, {"strategy": "no_shard"}),
        ("int8", 2, {"strategy": "no_shard"}),
        ("nf4", 3, {"strategy": "full_shard"}),
        ("int8", 2, {"strategy": "shard_grad_op", "memory__activation_checkpointing": "full"}),
        ("nf4", 2, {"strategy": "full_shard", "memory__offload_params": "cpu"}),
    ],
)
def test_qlora_losses_equal_loop_with_peft_and_bitsandbytes(
    kind: str,
    size: int,
    settings: dict[str, Any],
    truth: dict[str, list[float]],
    engines: Engines,
    corpus: Path,
    tmp_path: Path,
) -> None:
    settings = {**COMMON, **accumulated(size), **settings}
    config = configured(tmp_path, corpus, adapter__base=kind, **settings)
    losses = engines.run("full_shard", size, take_steps, config, STEPS).losses
    assert losses[-1] < losses[0] - 0.1
    assert truth["nf4"] != pytest.approx(truth["int8"], rel=1e-4)
    assert losses == pytest.approx(truth[kind], rel=1e-6 if size == 1 and kind == "nf4" else 1e-5)


def test_qlora_run_resumes_and_exports_adapter(engines: Engines, corpus: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **COMMON,
        "adapter__base": "nf4",
        "precision": "bf16",
        "checkpoint__every_steps": 2,
    }
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = configured(whole, corpus, **settings, strategy="full_shard")
    assert engines.run("full_shard", 2, launched, config) == 0
    for size, more in ((2, {"train__stop_after": 2}), (1, {"strategy": "no_shard"})):
        assert engines.run("full_shard", size, launched, configured(run, corpus, **settings, **more)) == 0
    losses = [[row["loss"] for row in read_metrics(folder) if "loss" in row] for folder in (whole, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1][:2] == losses[0][:2]
    ours, theirs = (open_checkpoint(folder / "final").tensors for folder in (run, whole))
    assert ours.keys() == theirs.keys()
    assert all("lora" in name for name in ours)


def refused(settings: dict[str, Any], folder: Path, corpus: Path) -> str:
    with pytest.raises(UserError) as raised:
        prepare_run(
            resolve_run(configured(folder, corpus, **{**COMMON, **settings}), "cpu"), create_backend("cpu")
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "zero2"}, "adapter.base: nf4 is not supported with strategy zero2"),
        ({"adapter__use_dora": True}, "adapter.use_dora: does not work with adapter.base: nf4"),
        ({"compile": True}, "compile: does not work with adapter.base: nf4"),
        (
            {"model__config": {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 4}},
            "adapter.base: GPT2LMHeadModel has no frozen linear layer that could be quantized to nf4",
        ),
    ],
)
def test_qlora_rejects_unsupported_settings(
    settings: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    assert refused({"adapter__base": "nf4", **settings}, tmp_path, corpus).startswith(message)


def grown(config: RunConfig) -> tuple[int, int]:
    """Return the memory growth while the engine gets its weights, and the bytes of its parameters."""
    backend = create_backend("cpu")
    backend.start()
    try:
        run = prepare_run(resolve_run(config, backend.name), backend)
        found: list[int] = []
        with peak_of(found):
            engine: Any = restore_run(run, None).engine
        return found[0], sum(p.numel() * p.itemsize for p in engine.model.parameters())
    finally:
        backend.stop()


@pytest.mark.slow
def test_qlora_host_memory_does_not_grow_with_model(corpus: Path, tmp_path: Path) -> None:
    beyond = []
    for layers in (2, 14):  # the twelve more are 78 MiB in bf16
        folder = tmp_path / f"model{layers}"
        sizes = {"num_hidden_layers": layers, "hidden_size": 512, "intermediate_size": 1536}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY_MODEL, **sizes}))
        model.save_pretrained(folder)
        build_data(configured(folder, corpus).data, model_vocab_size=384).tokenizer.save_pretrained(folder)
        settings = {**COMMON, "model__config": None, "model__name_or_path": str(folder)}
        config = configured(tmp_path / "run", corpus, **settings, adapter__base="nf4", precision="bf16")
        most, size = grown(config)
        whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert size < 0.3 * whole
        beyond.append(most - size)
    assert beyond[1] < beyond[0] + 40 * 2**20, beyond
