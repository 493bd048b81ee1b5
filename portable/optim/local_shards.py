"""Helper functions for code that works on the local shards of parameters.

A sharded parameter is a ``DTensor`` that FSDP2 has sharded along dimension 0. It may also be replicated over
a second mesh dimension. Parameters that are not DTensors are unsharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from portable.private import torch_internals

if TYPE_CHECKING:
    from torch import Tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or ``tensor`` itself if it is not a DTensor. Both share memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def create_sharded_zeros(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Create zeros that are sharded like a parameter.

    Args:
        parameter: Parameter that determines the sharding and the device.
        shape: Global shape of the result. Its first dimension has the size of the parameter's first
            dimension.
        dtype: Dtype of the result.

    Returns:
        A DTensor if the parameter is one, otherwise a tensor.
    """
    assert shape[0] == parameter.shape[0]
    local_zeros = torch.zeros(
        (to_local(parameter).shape[0], *shape[1:]), dtype=dtype, device=parameter.device
    )
    if not isinstance(parameter, DTensor):
        return local_zeros
    return torch_internals.build_dtensor_like(parameter, local_zeros, shape)


def get_shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the process group over which ``parameter`` is sharded, or None if it is not sharded."""
    if not isinstance(parameter, DTensor):
        return None
    (axis,) = (i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    assert parameter.placements[axis].is_shard(dim=0)
    group: dist.ProcessGroup = parameter.device_mesh.get_group(axis)
    return group
