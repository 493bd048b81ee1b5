"""Helper functions for code that works on the local shards of parameters.

A sharded parameter is a ``DTensor``. Usually, FSDP2 shards it along dimension 0. It may also be
replicated over a second mesh dimension. With expert or tensor parallelism, a parameter may be
sharded over two mesh dimensions: first by expert or tensor parallelism, and then by FSDP2.
Expert parallelism shards stacks of experts and their LoRA factors. A parameter that is not a
``DTensor`` is unsharded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, without copying. Other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their device mesh, because DTensor has no operations across meshes.

    Returns:
        The groups, ordered by their first tensors. All tensors that are not DTensors form one
        group.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def compute_total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Compute the 2-norm of all elements of several tensors, which may be on different meshes.

    If there are DTensors, all ranks have to call this function. All shards of DTensors are
    included. Other tensors are not reduced over ranks.

    Returns:
        An fp32 scalar, which is not a DTensor. 0 if there are no tensors.
    """
    norms = [_compute_norm_on_mesh(group) for group in group_by_mesh(tensors)]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def combine_local_norms(norms: Sequence[Tensor], parameter: Tensor) -> Tensor:
    """Compute the 2-norm of all elements of several tensors from the norms of their local shards.

    If ``parameter`` is a DTensor, all ranks have to call this function.

    Args:
        norms: Norm of each local shard, scalars.
        parameter: Any parameter, which determines the mesh. All tensors are sharded like this
            parameter.

    Returns:
        A scalar, which is 0 if ``norms`` is empty.
    """
    if not norms:
        return torch.zeros((), device=parameter.device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    if not isinstance(parameter, DTensor):
        return norm
    return _sum_over_axes(norm.square(), parameter.device_mesh, _list_sharded_axes(parameter)).sqrt()


def _sum_over_axes(square: Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> Tensor:
    """Sum a scalar in place over the ranks along some axes of a mesh, and return the sum.

    Args:
        square: This rank's part of a sum of squares, as a scalar tensor. Modified in place.
        mesh: Device mesh.
        axes: Indices of the mesh axes.
    """
    for axis in axes:
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square


def _compute_norm_on_mesh(tensors: Sequence[Tensor]) -> Tensor:
    """Compute one 2-norm over the elements of all tensors, which must be on the same mesh.

    If the tensors are DTensors, all ranks of the mesh have to call this function.
    """
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return _compute_fp32_norm_on_mesh(tensors)
    first = tensors[0] if tensors else None
    axes = _list_sharded_axes(first) if isinstance(first, DTensor) else []
    if isinstance(first, DTensor) and len(axes) > 1 and all(_list_sharded_axes(t) == axes for t in tensors):
        # Reduce without DTensor, because it would print a warning about reducing over several axes.
        square = torch.nn.utils.get_total_norm([to_local(tensor) for tensor in tensors]).square()
        return _sum_over_axes(square, first.device_mesh, axes).sqrt()
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _compute_fp32_norm_on_mesh(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the joint 2-norm of tensors on the same mesh, in fp32.

    This function is used for 16-bit tensors, because ``torch.nn.utils.get_total_norm`` would round
    the norm of each of them to 16 bits. The operations are the same as in :func:`combine_local_norms`,
    so that a fused backward pass logs the same norm.
    """
    tensors_by_axes: dict[tuple[int, ...], list[Any]] = {}
    for tensor in tensors:
        axes = tuple(_list_sharded_axes(tensor)) if isinstance(tensor, DTensor) else ()
        tensors_by_axes.setdefault(axes, []).append(tensor)
    squares = []
    for axes, members in tensors_by_axes.items():
        norms = [torch.linalg.vector_norm(to_local(member), dtype=torch.float32) for member in members]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        if not axes and len(tensors_by_axes) == 1:
            return norm
        square = norm.square()
        squares.append(_sum_over_axes(square, members[0].device_mesh, axes) if axes else square)
    return torch.stack(squares).sum().sqrt()


def create_sharded_zeros(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Create zeros that are sharded like a parameter.

    Args:
        parameter: Parameter that determines the sharding and the device. It must not be
            sharded along any dimension except dimension 0.
        shape: Global shape of the result. Its first dimension has the size of the parameter's first
            dimension.
        dtype: Dtype of the result.

    Returns:
        A DTensor if the parameter is a DTensor, otherwise a plain tensor.
    """
    assert shape[0] == parameter.shape[0]
    local_zeros = torch.zeros(
        (to_local(parameter).shape[0], *shape[1:]), dtype=dtype, device=parameter.device
    )
    if not isinstance(parameter, DTensor):
        return local_zeros
    return torch_internals.build_dtensor_like(parameter, local_zeros, shape)


def get_shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the process group over which FSDP2 shards a parameter.

    Returns:
        The group. None if ``parameter`` is not a DTensor. A DTensor must be sharded over at least
        one mesh axis.
    """
    if not isinstance(parameter, DTensor):
        return None
    axis, *_ = _list_sharded_axes(parameter)
    group: dist.ProcessGroup = parameter.device_mesh.get_group(axis)
    return group


class FsdpSharding(NamedTuple):
    """Shape of a tensor that FSDP2 shards, and the dimension along which it is divided.

    The tensor is usually a complete parameter. With expert parallelism, a stack of experts is first
    divided along dimension 0, and FSDP2 then shards the part of each expert-parallel rank.

    Attributes:
        shape: Shape of the tensor before FSDP2 shards it.
        dim: Dimension that FSDP2 shards. This is usually 0. It can be 1 for a stack that has fewer
            experts than ranks.
    """

    shape: tuple[int, ...]
    dim: int


def get_fsdp_sharding(parameter: Tensor) -> FsdpSharding:
    """Return the shape and the sharded dimension of the tensor that FSDP2 shards.

    The tensor is ``parameter`` itself or, with expert parallelism, this rank's part of
    ``parameter``. Expert parallelism must shard dimension 0, as it does for stacks of experts. The
    dimension is 0 for a parameter that is not a DTensor.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return FsdpSharding(shape, 0)
    first, *others = _list_sharded_axes(parameter)
    rows = shape[0] // math.prod(parameter.device_mesh.size(axis) for axis in others)
    placement: Any = parameter.placements[first]
    return FsdpSharding((rows, *shape[1:]), placement.dim)


def list_shard_blocks(tensor: DTensor) -> list[tuple[slice, ...]]:
    """List the parts of the global tensor that make up this rank's shard.

    Usually, a shard is a single part. The second LoRA factor of a stack of experts is different:
    its columns form ``r`` blocks, where ``r`` is the rank of the adapter. Each device has a slice
    of every block, so its shard consists of ``r`` parts.

    Returns:
        For each part, its slices of the global tensor, one for each dimension.
    """
    first = torch_internals.compute_shard_slices(tensor)
    num_blocks = torch_internals.count_interleaved_blocks(tensor)
    if num_blocks == 1:
        return [first]
    rows, columns = first
    width, period = (columns.stop - columns.start) // num_blocks, tensor.shape[1] // num_blocks
    starts = [columns.start + period * block for block in range(num_blocks)]
    return [(rows, slice(start, start + width)) for start in starts]


def _list_sharded_axes(parameter: Any) -> list[int]:
    """List the indices of the mesh axes over which a parameter is sharded.

    If FSDP2 shards the parameter, the first index in the list is the axis of FSDP2.
    """
    return [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
