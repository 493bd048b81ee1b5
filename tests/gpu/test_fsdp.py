"""FSDP2's settings on up to four ranks: what is trained stays the same. Strategies: ``test_engines``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from portable.config import RunConfig
from portable.errors import UserError
from portable.run.rank import run_rank
from tests.gpu.test_parity import our_losses
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import configured

FOUR: dict[str, Any] = {"train__global_batch_size": 8, "train__micro_batch_size": 1}


def shares(world_size: int) -> dict[str, Any]:
    """The same batches, in two micro-batches on each of one, two or four ranks."""
    return {**FOUR, "train__micro_batch_size": 4 // world_size}


HYBRID: dict[str, Any] = {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}


def units_of(config: RunConfig) -> tuple[list[str], list[str], int]:
    """Names of the units, how parameters lie, and the elements that this rank holds."""
    with opened(config) as trial:
        model = trial.engine.model
        names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        parameters: list[Any] = list(model.parameters())
        placements = sorted({str(p.placements) for p in parameters})
        return names, placements, sum(p.to_local().numel() for p in parameters)


LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["", *LAYERS]),
        ({"fsdp__auto_wrap_policy": "transformer_based_wrap"}, ["", *LAYERS]),
        ({"fsdp__auto_wrap_policy": "no_wrap"}, [""]),
        (
            {"fsdp__transformer_layer_cls_to_wrap": "LlamaMLP"},
            ["", "model.layers.0.mlp", "model.layers.1.mlp"],
        ),
        # The tied embedding and what is around it belong to the root.
        (
            {"fsdp__auto_wrap_policy": "size_based_wrap", "fsdp__min_num_params": 6000},
            ["", *(f"{layer}.{part}" for layer in LAYERS for part in ("self_attn", "mlp"))],
        ),
    ],
)
def test_units(
    settings: dict[str, Any], expected: list[str], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    names, placements, _ = ranks.run(2, units_of, configured(tmp_path, corpus, **settings))
    assert names == expected
    assert placements == ["(Shard(dim=0),)"]


def test_hybrid_shards_in_a_group_and_replicates_across(
    tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings = {**HYBRID, **FOUR}
    _, placements, held = ranks.run(4, units_of, configured(tmp_path, corpus, **settings))
    assert placements == ["(Replicate(), Shard(dim=0))"]
    _, _, whole = ranks.run(1, units_of, configured(tmp_path, corpus, memory__offload_params="cpu", **FOUR))
    assert held == pytest.approx(whole / 2, rel=0.05)


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    common = {**shares(int(os.environ["WORLD_SIZE"])), "data__eval_fraction": 0, "log__sample_tokens": 0}
    return run_rank("cpu", configured(folder, corpus, **{**common, **settings}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fsdp__transformer_layer_cls_to_wrap": "BertLayer", "memory__offload_params": "cpu"},
            "fsdp.transformer_layer_cls_to_wrap: LlamaForCausalLM has no BertLayer; its layers are "
            "LlamaDecoderLayer",
        ),
        ({"strategy": "no_shard", "fsdp__forward_prefetch": True}, "fsdp.forward_prefetch: nothing is"),
        (
            {"strategy": "no_shard", "memory__offload_params": "cpu"},
            "memory.offload_params: strategy no_shard",
        ),
        (
            {"memory__offload_params": "nvme", "memory__nvme_path": "/nvme"},
            "memory.offload_params: nvme needs DeepSpeed",
        ),
    ],
)
def test_refused(settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(UserError) as refused:
        our_losses(configured(tmp_path, corpus, **settings))
    assert message in str(refused.value)


def _threads(config: RunConfig) -> tuple[int, int]:
    """How many this process has in a run, and when the group is gone and the engine is not."""
    with opened(config) as trial:
        trial.step()
        during = len(list(Path("/proc/self/task").iterdir()))
    assert trial.engine.model is not None
    return during, len(list(Path("/proc/self/task").iterdir()))


def test_ddp_does_not_outlive_its_process_group(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """Whoever drops the group last waits for gloo's threads, which are several; DDP at times for ever."""
    during, after = ranks.run(2, _threads, configured(tmp_path, corpus, strategy="no_shard"))
    assert after <= during - 3
