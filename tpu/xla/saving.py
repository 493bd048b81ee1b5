"""Write checkpoints on XLA with torch.distributed.checkpoint (DCP). Each host writes its shards."""

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

    from portable.tpu.xla.custom_optimizer import XlaCustomOptimizer
    from portable.tpu.xla.layout import LocalShard, MeshLayout
    from portable.tpu.xla.optim import XlaOptimizer
    from portable.tpu.xla.parameters import DeviceParameters


@dataclass(frozen=True)
class StagedTensor:
    """Sharded tensor that is ready to be saved, with CPU copies of the shards that this host saves.

    ``shape`` is the shape of the complete tensor. The list of shards is empty if other hosts save
    all shards.
    """

    shape: torch.Size
    dtype: torch.dtype
    local_shards: list[LocalShard]


def stage_checkpoint_state(
    layout: MeshLayout,
    device_parameters: DeviceParameters,
    optimizer: XlaOptimizer | XlaCustomOptimizer,
    learning_rate: float,
) -> dict[str, Any]:
    """Build a state dict with CPU copies of the weights and optimizer state to save.

    The copies contain only the shards that this host saves. The function waits until pending
    computations on the devices are complete.

    Args:
        layout: Placement of tensors on the devices.
        device_parameters: Parameters of the model.
        optimizer: Optimizer of the run.
        learning_rate: Learning rate of the last step.

    Returns:
        State dict with the original parameter names. ``model`` contains the weights, and ``optim``
        contains the optimizer's ``state`` and ``param_groups``. Weights and state tensors, except
        scalars such as step counts, are :class:`StagedTensor` objects. If several layers store a
        parameter in one tensor, called a stack, the copy of the stack is split into one tensor per
        layer.
    """
    scalars = optimizer.read_state_scalars()
    moments: dict[str, dict[str, Any]] = {}
    for name, tensors in optimizer.get_state_tensors().items():
        for parameter_name in device_parameters.get_parameter_names(name):
            moments[parameter_name] = dict(scalars.get(parameter_name, {}))
        for key, staged in copy_local_shards_to_host(layout, tensors).items():
            for parameter_name, part in _split_staged_stack(device_parameters, name, staged).items():
                moments[parameter_name][key] = part
    model = copy_local_shards_to_host(layout, device_parameters.get_stored_tensors())
    return {
        "model": {
            parameter_name: part
            for name, s in model.items()
            for parameter_name, part in _split_staged_stack(device_parameters, name, s).items()
        },
        "optim": {"state": moments, "param_groups": optimizer.build_param_groups(learning_rate)},
    }


def copy_local_shards_to_host(layout: MeshLayout, tensors: Mapping[str, Tensor]) -> dict[str, StagedTensor]:
    """Return CPU copies of the shards that this host saves.

    If several devices have copies of a shard, only the first device saves it. The function waits
    until pending computations on the devices are complete.

    Args:
        layout: Placement of tensors on the devices.
        tensors: Device tensors, keyed by name.

    Returns:
        Staged tensors, keyed by name.
    """
    if not tensors:
        return {}
    shards = layout.copy_local_shards(list(tensors.values()))
    return {
        name: StagedTensor(tensor.shape, tensor.dtype, parts)
        for (name, tensor), parts in zip(tensors.items(), shards, strict=True)
    }


def _split_staged_stack(
    device_parameters: DeviceParameters, name: str, staged: StagedTensor
) -> dict[str, StagedTensor]:
    """Split the staged copy of a stack into its parameters, keyed by parameter name.

    A stack is one tensor that holds the same parameter of several layers. Its staged copy is on the
    CPU, and contains only the shards that this host saves. If the tensor is not a stack, the result
    contains only the tensor itself, keyed by its name.
    """
    shape = staged.shape[1:] if name in device_parameters.stacks else staged.shape
    return {
        parameter_name: StagedTensor(shape, staged.dtype, shards)
        for parameter_name, shards in device_parameters.split_stack_shards(name, staged.local_shards).items()
    }


class StagedPlanner(DefaultSavePlanner):
    """DCP save planner that also supports :class:`StagedTensor`.

    Staging has already dropped replicas, so each staged shard is in the plan of only one host. All
    other values, such as step counts, are in the plan of every host, and DCP removes the
    duplicates.
    """

    def create_local_plan(self) -> SavePlan:
        """Create this host's plan, with one item per staged shard."""
        staged = {name: value for name, value in self.state_dict.items() if isinstance(value, StagedTensor)}
        everything = self.state_dict
        self.state_dict = {name: value for name, value in everything.items() if name not in staged}
        plan: SavePlan = super().create_local_plan()
        self.state_dict = everything
        items = [item for name, value in staged.items() for item in _build_write_items(name, value)]
        self.plan = SavePlan([*plan.items, *items], planner_data=plan.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value to write for an item in this host's save plan.

        For a staged tensor, the value is the shard on the CPU.

        Args:
            index: Index of the item: the name of the value in the state dict and, for a staged
                tensor, the offset of the shard.
        """
        value = self.state_dict[index.fqn]
        if not isinstance(value, StagedTensor):
            return super().lookup_object(index)
        return next(shard.values for shard in value.local_shards if torch.Size(shard.offsets) == index.offset)


def _build_write_items(name: str, staged: StagedTensor) -> list[WriteItem]:
    """Build the DCP plan items for the staged shards of a tensor."""
    properties = TensorProperties(dtype=staged.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(shard.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(shard.offsets), shard.values.shape),
                properties=properties,
                size=staged.shape,
            ),
        )
        for shard in staged.local_shards
    ]
