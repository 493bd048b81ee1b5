"""Compute the memory use and communication volume of torch.distributed engines, for the planner.

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
    """Replace default values in a config with the values in the run's DeepSpeed JSON.

    Implements :meth:`portable.planner.memory_model.FootprintModule.resolve_config`. Returns
    ``config`` itself if it has no DeepSpeed JSON, or if its backend does not run DeepSpeed.
    """
    if config.deepspeed.config is None or not load_backend_package(config.backend).runs_zero:
        return config
    adopted: RunConfig = import_engine_module(ZERO_STRATEGIES[0], "engine").apply_deepspeed_json(
        config, "cpu", cluster.devices
    )
    return adopted


def iter_settings(config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
    """Yield the combinations of strategy and offloading that the planner compares for a cluster.

    Implements :meth:`portable.planner.memory_model.FootprintModule.iter_settings`. Hybrid
    strategies are included only if the cluster consists of several full nodes.
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
    """Return the modules that FSDP2 treats as units. The parameters of a unit are gathered together.

    See :class:`portable.planner.memory_model.FootprintModule`.
    """
    from portable.engines.fsdp.units import find_fsdp_units  # imports torch

    return find_fsdp_units(model, config)


def compute_footprint(model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Compute the memory use and the communication volume of a run.

    The formulas depend on the engine that the run uses:

    - A ZeRO strategy uses the formulas for ZeRO.
    - Strategy ``no_shard`` uses the formulas for replicated models. So does a run on a single
      device, unless it offloads parameters.
    - All other runs use the formulas for sharded models.

    See :class:`portable.planner.memory_model.FootprintModule`.

    Raises:
        UserError: If the ranks cannot be divided into expert-parallel groups, if the FSDP units of
            the model could not be determined, or if ``train.fused_backward`` is set and several
            devices use strategy ``no_shard``.
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
