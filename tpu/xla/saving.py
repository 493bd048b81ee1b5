"""What torch.distributed.checkpoint writes of tensors on XLA: each host its own shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from portable.tpu.xla.custom_optimizer import XlaUserOptimizer
    from portable.tpu.xla.layout import LocalShard, MeshLayout
    from portable.tpu.xla.optim import XlaOptimizer
    from portable.tpu.xla.parameters import Parameters


@dataclass(frozen=True)
class Staged:
    """A logical tensor with CPU copies of the shards that this host saves, possibly none."""

    shape: torch.Size
    dtype: torch.dtype
    shards: list[LocalShard]


def stage_state(
    layout: MeshLayout,
    device_parameters: Parameters,
    optimizer: XlaOptimizer | XlaUserOptimizer,
    rate: float,
) -> dict[str, Any]:
    """What this host saves of weights and optimizer, under the names of a live model.

    Args:
        optimizer: with the methods of :class:`portable.tpu.xla.optim.XlaOptimizer`.
        rate: the learning rate of the last step.
    """
    scalars = optimizer.scalars()
    moments: dict[str, dict[str, Any]] = {}
    for name, tensors in optimizer.tensors().items():
        for parameter_name in device_parameters.get_names(name):
            moments[parameter_name] = dict(scalars.get(parameter_name, {}))
        for key, staged in stage_shards(layout, tensors).items():
            for parameter_name, part in _split_stack(device_parameters, name, staged).items():
                moments[parameter_name][key] = part
    model = stage_shards(layout, device_parameters.get_stored_tensors())
    return {
        "model": {
            parameter_name: part
            for name, s in model.items()
            for parameter_name, part in _split_stack(device_parameters, name, s).items()
        },
        "optim": {"state": moments, "param_groups": optimizer.groups(rate)},
    }


def stage_shards(layout: MeshLayout, tensors: Mapping[str, Tensor]) -> dict[str, Staged]:
    """Copies of what this host saves of each tensor."""
    if not tensors:
        return {}
    shards = layout.copy_local_shards(list(tensors.values()))
    return {
        name: Staged(tensor.shape, tensor.dtype, parts)
        for (name, tensor), parts in zip(tensors.items(), shards, strict=True)
    }


def _split_stack(device_parameters: Parameters, name: str, staged: Staged) -> dict[str, Staged]:
    """A stack as the parameters that it holds; another tensor as it is."""
    shape = staged.shape[1:] if name in device_parameters.stacks else staged.shape
    return {
        parameter_name: Staged(shape, staged.dtype, shards)
        for parameter_name, shards in device_parameters.split_shards(name, staged.shards).items()
    }


class StagedPlanner(DefaultSavePlanner):
    """Plans :class:`Staged` tensors in addition to DCP's own types.

    Replicas were filtered out, so each chunk is written once and DCP has nothing to deduplicate.
    """

    def create_local_plan(self) -> SavePlan:
        staged = {name: value for name, value in self.state_dict.items() if isinstance(value, Staged)}
        everything = self.state_dict
        self.state_dict = {name: value for name, value in everything.items() if name not in staged}
        plan: SavePlan = super().create_local_plan()
        self.state_dict = everything
        items = [item for name, value in staged.items() for item in _build_write_items(name, value)]
        self.plan = SavePlan([*plan.items, *items], planner_data=plan.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, Staged):
            return super().lookup_object(index)
        return next(shard.data for shard in value.shards if torch.Size(shard.offset) == index.offset)


def _build_write_items(name: str, value: Staged) -> list[WriteItem]:
    properties = TensorProperties(dtype=value.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(shard.offset)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(shard.offset), shard.data.shape),
                properties=properties,
                size=value.shape,
            ),
        )
        for shard in value.shards
    ]
