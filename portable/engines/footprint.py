"""Compute the memory and traffic of torch.distributed engines, for the planner.

This module does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.derived_defaults import ZERO_STRATEGIES
from portable.engines.fsdp import footprint as fsdp
from portable.planner.memory_model import Cluster, Footprint, StrategySetting
from portable.registry import import_engine_module, load_backend_package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from portable.config import RunConfig
    from portable.planner.parameter_inventory import ModelInventory


def resolve_config(config: RunConfig, cluster: Cluster) -> RunConfig:
    """Apply the settings in the run's DeepSpeed JSON to a config, replacing defaults.

    See :class:`portable.planner.memory_model.FootprintModule`. Returns ``config`` itself if it has no
    DeepSpeed JSON, or if its backend does not run DeepSpeed.
    """
    if config.deepspeed.config is None or not load_backend_package(config.backend).runs_zero:
        return config
    adopted: RunConfig = import_engine_module(ZERO_STRATEGIES[0], "engine").apply_deepspeed_json(
        config, "cpu", cluster.devices
    )
    return adopted


def iter_settings(config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
    """Yield the strategies, with and without offloading, that the planner compares on a cluster.

    See :class:`portable.planner.memory_model.FootprintModule`. Hybrid strategies are included only for
    clusters of several full nodes.
    """
    yield StrategySetting("no_shard")
    yield from import_engine_module(ZERO_STRATEGIES[0], "footprint").iter_zero_settings(config)
    yield StrategySetting("shard_grad_op")
    yield StrategySetting("full_shard")
    yield StrategySetting("full_shard", "cpu")
    yield StrategySetting("full_shard", "none", "cpu")
    if cluster.nodes > 1 and cluster.devices % cluster.per_node == 0:
        yield StrategySetting("hybrid_shard_zero2")
        yield StrategySetting("hybrid_shard")


def find_gathered_units(model: nn.Module, config: RunConfig) -> list[nn.Module]:
    """Return the modules whose parameters FSDP2 gathers together.

    See :class:`portable.planner.memory_model.FootprintModule`.
    """
    from portable.engines.fsdp.units import find_fsdp_units  # imports torch

    return find_fsdp_units(model, config)


def compute_footprint(model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Compute the memory and traffic of a run with the formulas for its engine.

    See :class:`portable.planner.memory_model.FootprintModule`. Without ZeRO, the formula for replicated
    models is used for ``no_shard``, and for a single device without parameter offloading.
    """
    if config.strategy in ZERO_STRATEGIES:
        zero: Any = import_engine_module(config.strategy, "footprint")
        zero_footprint: Footprint = zero.compute_zero_footprint(model, config, cluster)
        return zero_footprint
    one_device = cluster.devices == 1 and config.memory.offload_params != "cpu"
    if one_device:
        fsdp.check_expert_groups(config, 1)
    if config.strategy == "no_shard" or one_device:
        return fsdp.compute_replicated_footprint(model, config, cluster)
    return fsdp.compute_sharded_footprint(model, config, cluster)
