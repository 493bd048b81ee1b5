"""Helpers for code that works on the local shards of parameters.

A sharded parameter is a ``DTensor`` sharded along dim 0, as by FSDP2. It may be replicated over a second mesh
axis. Any other parameter is unsharded.
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
    """This rank's shard of ``tensor``, or ``tensor`` itself if it is unsharded. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def create_sharded_zeros(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Zeros of the global ``shape``, sharded like ``parameter``.

    Args:
        parameter: determines sharding and device.
        shape: must have the parameter's first dim.
        dtype: of the zeros.
    """
    assert shape[0] == parameter.shape[0]
    local_zeros = torch.zeros(
        (to_local(parameter).shape[0], *shape[1:]), dtype=dtype, device=parameter.device
    )
    if not isinstance(parameter, DTensor):
        return local_zeros
    return torch_internals.build_dtensor_like(parameter, local_zeros, shape)


def get_shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The process group that shards ``parameter``, or None if it is unsharded."""
    if not isinstance(parameter, DTensor):
        return None
    (axis,) = (i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    assert parameter.placements[axis].is_shard(dim=0)
    group: dist.ProcessGroup = parameter.device_mesh.get_group(axis)
    return group
