"""Sharded tensors, for code that works on a rank's own part of them.

A sharded parameter is a ``DTensor`` that is cut along dim 0, as FSDP2 cuts it; over a second mesh axis it may
be replicated. Any other parameter is whole on this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

if TYPE_CHECKING:
    from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, or ``tensor`` itself where it is whole; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_beside(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of the global ``shape``, cut over the ranks as ``parameter`` is.

    Args:
        parameter: tells where.
        shape: with the same first dim as the parameter.
        dtype: of the zeros.
    """
    assert shape[0] == parameter.shape[0]
    part = torch.zeros((local(parameter).shape[0], *shape[1:]), dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    # Not DTensor.from_local, which would move what is in host memory to the devices of the mesh.
    return DTensor(part, spec, requires_grad=False)


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks among which ``parameter`` is cut; None where it is whole on every rank."""
    if not isinstance(parameter, DTensor):
        return None
    (axis,) = (i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    assert parameter.placements[axis].is_shard(dim=0)
    group: dist.ProcessGroup = parameter.device_mesh.get_group(axis)
    return group
