"""Memory and traffic of this package's strategies, for the planner. Does not import torch or DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu.fsdp import footprint as fsdp
from gpu.zero import footprint as zero
from portable.config.derived import ZERO
from portable.planner.memory_model import Cluster, Footprint, Setting
from portable.plugins import names_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from portable.config import RunConfig, TrainConfig
    from portable.planner.inventory import Inventory


def _elementwise(train: TrainConfig) -> bool:
    if not names_code(train.optimizer):
        return False
    from portable.optim import own  # only here: it needs torch

    return own.elementwise(train) and not own.constructs_state(train)


def adopt(config: RunConfig, cluster: Cluster) -> RunConfig:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    if config.deepspeed.config is None:
        return config
    from gpu.zero import engine  # only here: it needs torch

    return engine.adopt(config, "cpu", cluster.devices)


def settings(config: RunConfig, cluster: Cluster) -> Iterator[Setting]:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    yield Setting("no_shard")
    train = config.train
    if train.optimizer in zero.OPTIMIZERS or _elementwise(train):
        for strategy in ZERO:
            yield Setting(strategy)
            yield Setting(strategy, "cpu")
        yield Setting("zero3", "none", "cpu")
        yield Setting("zero3", "cpu", "cpu")
        if train.optimizer in ("adamw", "sgd") and train.ema is None:
            yield Setting("zero3", "nvme")
            yield Setting("zero3", "nvme", "nvme")
    yield Setting("shard_grad_op")
    yield Setting("full_shard")
    yield Setting("full_shard", "cpu")
    yield Setting("full_shard", "none", "cpu")
    if cluster.nodes > 1 and cluster.devices % cluster.per_node == 0:
        yield Setting("hybrid_shard_zero2")
        yield Setting("hybrid_shard")


def units(model: nn.Module, config: RunConfig) -> list[nn.Module]:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    from gpu.fsdp.units import units  # only here: it needs torch

    return units(model, config)


def footprint(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    if config.strategy.startswith("zero"):
        return zero.footprint(model, config, cluster)
    one_device = cluster.devices == 1 and config.memory.offload_params != "cpu"
    if config.strategy == "no_shard" or one_device:
        return fsdp.replicated(model, config, cluster)
    return fsdp.fully_sharded(model, config, cluster)
