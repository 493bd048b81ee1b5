"""The planner's memory of a device, compared with the shards of live XLA devices and XLA's compiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.xla_memory import measure, told_in
from portable.adapters.adapter import build_training_model
from portable.adapters.settings import resolve_adapter_config
from portable.config import RunConfig
from portable.model import build as models
from portable.planner.memory_model import Cluster, StrategySetting
from portable.planner.meta_model import MetaModel, build_inventory
from portable.planner.plan import Planner, PlanTarget
from portable.registry import create_backend
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from portable.tpu.xla.footprint import compute_footprint
from tests.runs import TINY_MODEL, configured
from tests.xla import QUICK, XlaPool

if TYPE_CHECKING:
    from portable.tpu.xla.optim import XlaOptimizer


def kept(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of parameters and of optimizer state on the first device."""
    backend = create_backend("xla")
    resolved = resolve_run(config, backend.name)
    backend.start()
    try:
        engine: Any = restore_run(prepare_run(resolved, backend), None).engine
        optimizer: XlaOptimizer = engine._optimizer
        state = [t for tensors in optimizer.get_state_tensors().values() for t in tensors.values()]
        return on_first_device(engine.model.parameters()), on_first_device([*state, optimizer._step_counts])
    finally:
        backend.stop()


def on_first_device(tensors: Any) -> int:
    from portable.tpu.xla.torch_xla_internals import xla

    held = 0
    for tensor in tensors:
        (shards,) = xla.local_shards([tensor])
        values, device = shards[0]
        assert device.endswith(":0")
        held += values.nbytes
    return held


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (4, {"strategy": "full_shard"}),
        (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
        (2, {"strategy": "no_shard", "train__optimizer": "sgd"}),
        (4, {"strategy": "full_shard", "train__optimizer": "adafactor"}),
        (4, {"strategy": "full_shard", "train__frozen": ["embed_tokens", r"layers\.0"]}),
        (4, {"strategy": "full_shard", "precision": "bf16", "adapter__type": "lora"}),
    ],
)
def test_planned_state_bytes_on_xla_are_exact(
    devices: int, settings: dict[str, Any], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    sizes = {"train__global_batch_size": 8, "train__micro_batch_size": 1, "model__config": TINY_MODEL}
    config = configured(tmp_path, corpus, **{**sizes, "backend": "xla", **settings})
    model = build_training_model(models.load_model_config(config.model), resolve_adapter_config(config))
    found = compute_footprint(build_inventory(model, config.train), config, Cluster(devices, devices))
    assert (found.parameters, found.optimizer) == xla.run(devices, kept, config)


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process whose compiler records the memory of its graphs."""
    told = told_in(tmp_path_factory.mktemp("compiler") / "graphs.txt")
    return {**told, "XLA_FLAGS": f"{told['XLA_FLAGS']} {QUICK}"}  # the bytes are the same


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "memory__activation_checkpointing": "full"},
        {"strategy": "no_shard"},
    ],
)
def test_planned_step_bytes_match_compiler(
    settings: dict[str, Any], tmp_path: Path, corpus: Path, telling: dict[str, str], xla: XlaPool
) -> None:
    """The plan is for TPUs, but the compiler is for CPUs, which need about twice the memory.

    On a CPU, the operands of a product are written first. ``tests/tpu/test_planned_steps.py`` compares plans
    with TPUs. The head is tied, and its logits need most of the memory. With the logits of all devices'
    tokens on each device, it would be four times as large.
    """
    devices = 4
    wide = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    sizes = {"train__global_batch_size": 32, "train__micro_batch_size": 4, "data__seq_len": 64}
    config = configured(
        tmp_path, corpus, **{**sizes, "backend": "xla", "model__config": {**TINY_MODEL, **wide}, **settings}
    )
    model = build_training_model(models.load_model_config(config.model), resolve_adapter_config(config))
    target = PlanTarget("xla", Cluster(devices, devices), None, None)
    planned = (
        Planner(config, MetaModel(model, config), target)
        .build_option(StrategySetting.from_config(config))
        .device_bytes
    )
    taken = xla.run(devices, measure, config, environment=telling)
    assert planned.resident == pytest.approx(taken.resident, rel=0.01)
    assert 0.4 < planned.total / taken.peak < 0.8
