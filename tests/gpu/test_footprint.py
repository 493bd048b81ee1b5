"""The planner's memory of an engine, compared with the tensors of the live engine on its first rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from torch.distributed.tensor import DTensor

from portable.adapters.adapter import build_training_model
from portable.adapters.settings import resolve_adapter_config
from portable.config import RunConfig
from portable.engines.footprint import compute_footprint, find_gathered_units
from portable.model import build as models
from portable.planner.memory_model import Cluster
from portable.planner.meta_model import build_inventory
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured

if TYPE_CHECKING:
    from portable.gpu.zero.engine import ZeroEngine

# Sizes that no number of ranks divides; one group of parameters is larger than a bucket, one smaller.
MODEL = {
    **TINY_MODEL,
    "vocab_size": 385,
    "hidden_size": 56,
    "intermediate_size": 83,
    "tie_word_embeddings": False,
}
BUCKETS = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 100}

# Additional bytes per parameter and rank: DCP wraps each tensor in a separate archive.
METADATA = 8 << 10

Kept = dict[str, int]
Result = TypeVar("Result")


def storages(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of the tensors. Shared storages count once."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = part.detach().untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def state_of(optimizer: Any) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def kept_by_fsdp(engine: Any) -> Kept:
    on_host = engine._host_copies
    return {
        "parameters": storages(engine.model.parameters()),
        "gradients": storages(p.grad for p in engine.model.parameters()),
        "optimizer": storages(state_of(engine._optimizer)),
        "copies": 0 if on_host is None else storages(on_host.copies.values()),
    }


def kept_by_zero(engine: Any) -> Kept:
    zero = engine._engine.optimizer
    stage = int(engine._engine.zero_optimization_stage())
    if stage == 3:
        flats = zero.fp32_partitioned_groups_flat
        parameters = storages(p.ds_tensor for p in engine.model.parameters())
        gradients = storages([zero.grad_partitions_flat_buffer])
    else:
        flats = zero.single_partition_of_fp32_groups
        parameters = storages(engine.model.parameters())
        if stage == 1:
            gradients = storages(p.grad for p in engine.model.parameters())
        else:
            gradients = storages(g for group in zero.averaged_gradients.values() for g in group)
    optimizer = storages(flats) + storages(state_of(zero.optimizer))
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "copies": 0}


def on_host_by_zero(engine: Any) -> int:
    """Return the bytes of DeepSpeed's state on the host if the optimizer or parameters are offloaded."""
    zero = engine._engine.optimizer
    if int(engine._engine.zero_optimization_stage()) == 3:
        flats = zero.fp32_partitioned_groups_flat
        zero_engine: ZeroEngine = engine
        buffers = [zero.grad_partitions_flat_buffer, *zero_engine._exact_frozen.values()]
        if zero.offload_param:
            buffers += [p.ds_tensor for p in engine.model.parameters()]
    else:
        flats = zero.single_partition_of_fp32_groups
        buffers = [
            *zero.param_buffer_of_bit16_for_cpu_offload_groups,
            zero.temp_grad_buffer_for_cpu_offload,
            *zero.accumulated_grads_in_cpu.values(),
        ]
    return storages([*flats, *(flat.grad for flat in flats), *state_of(zero.optimizer), *buffers])


def live(config: RunConfig) -> Kept:
    """Return the memory of the first rank after the last micro-batch of the second step."""
    return stepped(config, kept_by_zero if config.strategy.startswith("zero") else kept_by_fsdp)


def live_host(config: RunConfig) -> int:
    """Return the bytes of ZeRO's host memory."""
    return stepped(config, on_host_by_zero)


def saved(config: RunConfig) -> int:
    """Return the bytes of the files of a checkpoint after a step."""
    folder = Path(config.output_dir) / "saved"
    folder.mkdir(parents=True, exist_ok=True)

    def save(engine: Any) -> None:
        engine.save_shards(folder, background=False).wait()

    stepped(config, save)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def stepped(config: RunConfig, look: Callable[[Any], Result]) -> Result:
    """Return the result of ``look`` for the engine after the last micro-batch of the second step."""
    sizes = {"train.global_batch_size": 2 * int(os.environ["WORLD_SIZE"]), "train.micro_batch_size": 1}
    with opened(config.replaced(sizes)) as trial:
        trial.step(1e-3)
        # Stage 1 reduces gradients with the last micro-batch. Before that, all gradients exist.
        first = config.strategy == "zero1"
        batch = trial.backend.copy_to_device(next(trial.batches))
        trial.engine.accumulate_gradients(batch, torch.tensor(100), is_last_micro_batch=not first)
        return look(trial.engine)


def planned(config: RunConfig, ranks: int) -> Any:
    model = build_training_model(models.load_model_config(config.model), resolve_adapter_config(config))
    sharing = config.tensor_parallel_size
    inventory = build_inventory(model, config.train, find_gathered_units(model, config), sharing=sharing)
    return compute_footprint(inventory, config, Cluster(ranks, ranks))


def config_for(folder: Path, corpus: Path, strategy: str, **settings: Any) -> RunConfig:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
        document = {"zero_optimization": {"stage": int(strategy[-1]), **BUCKETS}}
        settings["deepspeed__config"] = document
    sizes = {"train__global_batch_size": 12, "train__micro_batch_size": 1, "data__vocab_size": 384}
    return configured(folder, corpus, **{"strategy": strategy, "model__config": MODEL, **sizes, **settings})


PART: dict[str, Any] = {
    "train__frozen": ["embed_tokens", r"layers\.0\.mlp", "norm"],
    "train__parameter_groups": [{"pattern": "q_proj", "learning_rate": 1e-3}],
}
"""A model in part frozen, and with three groups of parameters."""
LORA: dict[str, Any] = {
    "adapter__type": "lora",
    "adapter__r": 4,
    "train__parameter_groups": [{"pattern": "lora_B", "learning_rate": 1e-2}],
}
SHARED_LAYERS = {"tensor_parallel_size": 2, "model__config": {**MODEL, "intermediate_size": 82}}
EXPERTS: dict[str, Any] = {
    "expert_parallel_size": 2,
    "model__config": {**MODEL, "model_type": "mixtral", "num_local_experts": 6, "intermediate_size": 88},
}
EXPERT_ADAPTER: dict[str, Any] = {
    **LORA,
    "adapter__target_modules": ["q_proj"],
    "adapter__target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = [
    (1, "full_shard", {}),
    (2, "no_shard", {}),
    (2, "full_shard", {"precision": "bf16"}),
    (3, "shard_grad_op", {}),
    (4, "hybrid_shard", {"fsdp__shard_group_size": 2}),
    (3, "full_shard", {"train__optimizer": "adafactor"}),
    (3, "full_shard", {"train__optimizer": "adamw_8bit"}),
    (3, "zero2", {"precision": "bf16", "train__optimizer": "muon"}),
    (2, "zero3", {"train__optimizer": "muon"}),
    (2, "zero1", {"precision": "bf16"}),
    (3, "zero2", {"precision": "bf16"}),
    (3, "zero3", {"precision": "bf16"}),
    (2, "zero1", {}),
    (2, "zero2", {"precision": "bf16", "train__optimizer": "sgd"}),
    *((2, strategy, {"precision": "bf16", **PART}) for strategy in ("no_shard", "zero2")),
    *((3, strategy, {"precision": "bf16", **PART}) for strategy in ("full_shard", "zero3")),
    *((2, strategy, {"precision": "bf16", **LORA}) for strategy in ("no_shard", "zero1", "zero3")),
    (3, "full_shard", {"precision": "bf16", **LORA, "adapter__base": "nf4"}),
    (2, "full_shard", {**LORA, "adapter__base": "int8"}),
    (2, "full_shard", SHARED_LAYERS),
    (4, "full_shard", {"precision": "bf16", **SHARED_LAYERS}),
    (2, "full_shard", {**SHARED_LAYERS, **LORA}),
    (2, "full_shard", {"precision": "bf16", **EXPERTS}),
    (4, "full_shard", {**EXPERTS, "train__optimizer": "muon"}),
    (4, "hybrid_shard", {**EXPERTS, "fsdp__shard_group_size": 2}),
    (4, "full_shard", {**EXPERTS, "model__config": {**EXPERTS["model__config"], "num_local_experts": 2}}),
    (4, "full_shard", {"precision": "bf16", **EXPERTS, **EXPERT_ADAPTER}),
    (2, "full_shard", {**EXPERTS, **EXPERT_ADAPTER}),
]


@pytest.mark.parametrize(("world_size", "strategy", "settings"), CASES)
def test_planned_device_memory_is_exact(
    world_size: int, strategy: str, settings: dict[str, Any], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    config = config_for(tmp_path, corpus, strategy, **settings)
    kept = ranks.run(world_size, live, config)
    found = planned(config, world_size)
    assert (found.parameters, found.gradients, found.optimizer) == (
        kept["parameters"],
        kept["gradients"],
        kept["optimizer"],
    )


def test_planned_host_memory_of_fsdp_offloading(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    config = config_for(tmp_path, corpus, "full_shard", memory__offload_params="cpu")
    kept, found = ranks.run(2, live, config), planned(config, 2)
    assert found.parameters == found.gradients == found.optimizer == 0
    assert found.host == kept["parameters"] + kept["gradients"] + kept["optimizer"]

    config = config_for(tmp_path, corpus, "full_shard", memory__offload_optimizer="cpu")
    kept, found = ranks.run(3, live, config), planned(config, 3)
    assert (found.parameters, found.gradients) == (kept["parameters"], kept["gradients"])
    # Copies, their gradients once they are fetched, and the moments. A copy has no padding.
    assert found.optimizer == 0
    assert found.host == pytest.approx(2 * kept["copies"] + kept["optimizer"], rel=0.01)


@pytest.mark.parametrize(
    ("world_size", "strategy", "settings"),
    [
        (3, "zero2", {}),
        (3, "zero3", {"memory__offload_params": "cpu"}),
        (2, "zero3", PART),
    ],
)
def test_planned_host_memory_of_zero_offloading_is_exact(
    world_size: int, strategy: str, settings: dict[str, Any], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    host: dict[str, Any] = {"memory__offload_optimizer": "cpu", "precision": "bf16"}
    config = config_for(tmp_path, corpus, strategy, **host, **settings)
    assert planned(config, world_size).host == ranks.run(world_size, live_host, config)


@pytest.mark.parametrize(
    ("world_size", "strategy", "settings"),
    [
        (2, "no_shard", {}),
        (1, "no_shard", {"train__optimizer": "sgd"}),
        (2, "full_shard", {"train__optimizer": "adafactor"}),
        (3, "zero2", {"precision": "bf16"}),
        *((2, strategy, {"precision": "bf16", **PART}) for strategy in ("full_shard", "zero3")),
        *((2, strategy, {"precision": "bf16", **LORA}) for strategy in ("full_shard", "zero1")),
    ],
)
def test_planned_checkpoint_bytes_match_files(
    world_size: int, strategy: str, settings: dict[str, Any], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    """The files also have names, shapes and pickles, whose size does not grow with the tensors."""
    large = {**MODEL, "vocab_size": 8192}
    config = config_for(tmp_path, corpus, strategy, **settings, model__config=large)
    model = build_training_model(models.load_model_config(config.model), resolve_adapter_config(config))
    tensors = (
        build_inventory(model, config.train).compute_checkpoint_bytes(config.train)
        + planned(config, world_size).also_saved
    )
    beside = ranks.run(world_size, saved, config) - tensors
    assert 0 <= beside <= METADATA * world_size * len(list(model.parameters()))
