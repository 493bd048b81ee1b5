"""Device mesh, and the sharding of parameters, batches and activations over it.

Under SPMD, a sharded tensor is one logical tensor. The program is written as if for one device, and
the compiler inserts the collectives. This module specifies the sharding of parameters, batches and
activations. The compiler derives the sharding of all other tensors from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portable.errors import UserError, require
from portable.model.weight_sources import to_torch
from portable.tpu.xla.runtime import torch_xla, xr, xs
from portable.tpu.xla.sharding import HYBRID_STRATEGIES, ShardingRules
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from portable.config import RunConfig
    from portable.model.weight_sources import ReadableTensor

REPLICA, FSDP, SEQUENCE = "replica", "fsdp", "sequence"

Spec = tuple[str | tuple[str, ...] | None, ...]
"""For each dim of a tensor, the mesh axes that it is sharded over, or None if it is not sharded."""


@dataclass(frozen=True)
class LocalShard:
    """Shard of a tensor from one of this host's devices, copied to the CPU.

    Attributes:
        offsets: Offset of the shard along each dim.
        values: Values of the shard on the CPU.
    """

    offsets: tuple[int, ...]
    values: Tensor


class MeshLayout:
    """Device mesh, and the placement of tensors on it.

    The mesh has the axes ``replica``, ``fsdp`` and ``sequence``, in this order. Parameters are
    sharded over ``fsdp`` and ``sequence``, batches over ``replica`` and ``fsdp``, and the tokens of
    a sequence over ``sequence``. The axes ``replica`` and ``sequence`` are omitted if they have
    size 1.

    Args:
        config: Config of the run. The layout depends on ``strategy``, ``fsdp.shard_group_size``,
            ``context_parallel_size``, ``xla.sharding`` and ``xla.shard_param_on_dim_0``.
        num_devices: Number of devices in the run.

    Attributes:
        device: XLA device of all tensors. In SPMD mode, it represents all devices.
        num_devices: Number of devices in the run.
        mesh: Mesh object of torch_xla.
        sequence: Number of consecutive devices that share each sequence.
        num_batch_shards: Number of shards of a batch. Each shard belongs to a group of devices that
            share sequences.
        shard_axes: Mesh axes over which parameters are sharded.
        shard_group_size: Number of devices over which one copy of the parameters is sharded.

    Raises:
        UserError: If the number of devices is not a multiple of the shard group size, if the shard
            group size is not a multiple of ``context_parallel_size``, or if a pattern in
            ``xla.sharding`` is not a valid regular expression. Also raised if a hybrid strategy
            needs ``fsdp.shard_group_size``, because all devices are in one slice.
    """

    def __init__(self, config: RunConfig, num_devices: int) -> None:
        order = _compute_device_order(num_devices)
        self.device = torch.device("xla:0")
        self.num_devices = num_devices
        self.shard_group_size = _compute_shard_group_size(config, num_devices)
        self._sharding_rules = ShardingRules(config, self.shard_group_size)
        self.sequence = config.context_parallel_size
        require(
            self.shard_group_size % self.sequence == 0,
            f"context_parallel_size: the shard group size ({self.shard_group_size}) is not divisible by "
            f"{self.sequence}; use a divisor of {self.shard_group_size}",
        )
        self.num_batch_shards = num_devices // self.sequence
        sizes = {
            REPLICA: num_devices // self.shard_group_size,
            FSDP: self.shard_group_size // self.sequence,
            SEQUENCE: self.sequence,
        }
        axes = self._axes = tuple(axis for axis, size in sizes.items() if axis == FSDP or size > 1)
        self.mesh = xs.Mesh(order, tuple(sizes[axis] for axis in axes), axes)
        self._batch_axes = tuple(axis for axis in axes if axis != SEQUENCE)
        self._token_axis = SEQUENCE if SEQUENCE in axes else None
        self.shard_axes = tuple(axis for axis in axes if axis != REPLICA)

    # -- specs -------------------------------------------------------------------------------------------

    def get_parameter_spec(self, name: str, shape: Sequence[int]) -> Spec:
        """Return the spec of a parameter, which is either sharded along one dim or replicated.

        A sharded parameter is sharded over the mesh axes in :attr:`shard_axes`.

        Args:
            name: Name of the parameter.
            shape: Shape of the parameter.

        Raises:
            UserError: If ``xla.sharding`` specifies a dim that does not exist or is not divisible by the
                shard group size.
        """
        dim = self._sharding_rules.choose_shard_dim(name, shape)
        return tuple(self.shard_axes if d == dim else None for d in range(len(shape)))

    def check_sharding_rules(self) -> None:
        """Raise UserError if a pattern in ``xla.sharding`` has matched no parameter so far.

        :meth:`get_parameter_spec` matches the patterns, so call it for all parameters first. For
        each parameter, only the first matching pattern counts.
        """
        self._sharding_rules.check_unused_patterns()

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter may be sharded.

        This is True for every strategy except ``no_shard``, even if there is only one device.
        """
        return self._sharding_rules.is_sharding

    @property
    def reduces_gradients_unsharded(self) -> bool:
        """Whether the TPU compiler sums complete gradients over the devices, and shards only the sum.

        Each device then has to store a complete gradient until it is sharded. This applies to shard
        groups of more than 32 devices.
        """
        return self.shard_group_size > 32

    def get_batch_spec(self, num_dims: int) -> Spec:
        """Return the spec of a batch tensor, whose dim 0 is sharded over the data-parallel groups.

        With context parallelism, the devices in a group process parts of the same sequences.
        Without context parallelism, a group is a single device.

        Args:
            num_dims: Number of dims in the batch tensor.
        """
        return (self._batch_axes, *(None,) * (num_dims - 1))

    def get_activation_spec(self, num_dims: int) -> Spec:
        """Return the spec of activations ``[batch, tokens, ...]``.

        The batch dim is sharded over the data-parallel groups. With context parallelism, the token
        dim is sharded over the devices that share a sequence. 2-D activations have the shape
        ``[tokens of all sequences, ...]``. Their first dim is sharded over all devices.

        Args:
            num_dims: Number of dims in the tensor, at least 2.
        """
        if num_dims == 2:
            return (self._axes, None)
        return (self._batch_axes, self._token_axis, *(None,) * (num_dims - 2))

    def get_heads_spec(self, *, whole_sequences: bool) -> Spec:
        """Return the spec of attention queries, keys and values, ``[batch, heads, tokens, width]``.

        Args:
            whole_sequences: Whether each device has complete sequences and a share of the heads. Otherwise,
                each device has a part of each sequence and all heads.
        """
        last = (self._token_axis, None) if whole_sequences else (None, self._token_axis)
        return (self._batch_axes, *last, None)

    def get_replicated_spec(self, num_dims: int) -> Spec:
        """Return the spec of a replicated tensor."""
        return (None,) * num_dims

    def to_op_sharding(self, spec: Spec) -> Any:
        """Convert a spec to the sharding object that torch_xla's bindings expect."""
        return self.mesh.get_op_sharding(spec)

    def shard_along_tokens(self, tensor: Tensor) -> Tensor:
        """Shard a tensor ``[experts, tokens, width]`` and its gradient along the token dim.

        The tokens are sharded over all devices. A tensor on the meta device is returned unchanged.
        """
        if tensor.is_meta:  # in a trial pass, there are no devices
            return tensor
        sharding = self.to_op_sharding((None, *self.get_activation_spec(tensor.dim() - 1)))
        return constrain_with_gradient(tensor, sharding, sharding)

    # -- tensors -----------------------------------------------------------------------------------------

    def place_batch_tensor(self, tensor: Tensor) -> Tensor:
        """Copy this host's part of a batch tensor to its devices, and return the global tensor.

        If sequences are split over several hosts, each of these hosts must pass the same complete
        sequences.

        Args:
            tensor: This host's part, on the CPU. The first dim must have the same size on all
                hosts, and be divisible by the number of batch shards on this host.

        Returns:
            The global batch tensor.
        """
        parts = tensor.chunk(max(1, self._num_local_devices // self.sequence))
        shards = [
            parts[device * len(parts) // self._num_local_devices] for device in range(self._num_local_devices)
        ]
        shape = (self.num_batch_shards * len(parts[0]), *tensor.shape[1:])
        return self._assemble_from_shards(shards, self.get_batch_spec(tensor.dim()), shape)

    def create_zeros(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """Create a tensor of zeros that is sharded like a parameter.

        The host allocates only one shard, which is copied to each of its devices. In ``spec``, each
        dim must be either unsharded or sharded over :attr:`shard_axes`.
        """
        shard_shape = [
            size // self.shard_group_size if axis == self.shard_axes else size
            for size, axis in zip(shape, spec, strict=True)
        ]
        return self._assemble_from_shards(
            [torch.zeros(shard_shape, dtype=dtype)] * self._num_local_devices, spec, shape
        )

    def replicate(self, tensor: Tensor) -> Tensor:
        """Replicate a CPU tensor to every device.

        Also use this method for scalars that change, because ``tensor.to(device)`` would convert 0 and 1 to
        constants in the graph.
        """
        return self._assemble_from_shards(
            [tensor] * self._num_local_devices, self.get_replicated_spec(tensor.dim()), tensor.shape
        )

    def _assemble_from_shards(self, shards: list[Tensor], spec: Spec, shape: Sequence[int]) -> Tensor:
        tensor: Tensor = xla.from_cpu_shards(shards, self.to_op_sharding(spec), torch.Size(shape))
        return tensor

    @cached_property
    def _num_local_devices(self) -> int:
        return int(xr.addressable_runtime_device_count())

    def fill_local_shards(self, tensor: Tensor, spec: Spec, source: ReadableTensor) -> None:
        """Fill this host's shards of a tensor.

        Args:
            tensor: Device tensor. Its data is replaced.
            spec: Spec of the tensor.
            source: Full tensor. Only this host's shards are read.
        """
        read: dict[tuple[tuple[int, int], ...], Tensor] = {}
        shards = []
        for _, index in xla.shard_places([tensor])[0]:
            slices = _convert_index_to_slices(index, tensor.shape)
            key = tuple((s.start, s.stop) for s in slices)
            if key not in read:
                read[key] = to_torch(source.read(slices)).to(tensor.dtype)
            shards.append(read[key])
        tensor.data = self._assemble_from_shards(shards, spec, tensor.shape)

    def copy_local_shards(self, tensors: Sequence[Tensor]) -> list[list[LocalShard]]:
        """Return CPU copies of the shards that this host saves, as one list per tensor.

        If several devices have copies of a shard, only the first device saves it.
        """
        _wait_for_device_ops()
        # Copy one tensor at a time to limit memory, because replicas are copied as well.
        return [self._copy_tensor_shards(tensor) for tensor in tensors]

    def _copy_tensor_shards(self, tensor: Tensor) -> list[LocalShard]:
        """Return CPU copies of a tensor's shards that this host saves. See :meth:`copy_local_shards`."""
        (replicas_and_indices,) = xla.shard_places([tensor])
        (copies,) = xla.local_shards([tensor])
        shards = []
        for (replica, index), (values, _) in zip(replicas_and_indices, copies, strict=True):
            if replica == 0:
                slices = _convert_index_to_slices(index, tensor.shape)
                shards.append(LocalShard(tuple(s.start for s in slices), values))
        return shards

    def read_to_cpu(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Execute pending operations, and copy complete tensors to the CPU."""
        copies: list[Tensor] = xla.cpu_tensors(list(tensors))
        return copies

    def cut_graph(self, *, wait: bool = False) -> None:
        """Execute the pending operations on all tensors.

        Args:
            wait: Whether to block until the operations are complete. The tensors can then be
                copied or filled. If False, the operations continue to run after this call.
        """
        torch_xla.sync()
        if wait:
            _wait_for_device_ops()

    def copy_replicated_to_cpu(self, tensor: Tensor) -> Tensor:
        """Copy a replicated tensor to the CPU, from one of this host's devices."""
        _wait_for_device_ops()
        values: Tensor = xla.local_shards([tensor])[0][0][0]
        return values


def constrain_with_gradient(
    tensor: Tensor, sharding: Any, gradient_sharding: Any, *, isolate_gradient: bool = False
) -> Tensor:
    """Copy a tensor, and annotate the copy and its gradient with shardings.

    Args:
        tensor: Tensor to annotate.
        sharding: Sharding of the result.
        gradient_sharding: Sharding of the gradient.
        isolate_gradient: Whether to add an optimization barrier after sharding the gradient. Without
            it, the compiler might shard the gradient later, and keep the unsharded gradient in memory
            until then.

    Returns:
        The annotated copy.
    """
    constrained: Tensor = _ConstrainFunction.apply(tensor, sharding, gradient_sharding, isolate_gradient)  # type: ignore[no-untyped-call, unused-ignore]
    return constrained


class _ConstrainFunction(torch.autograd.Function):
    """Autograd function that annotates a tensor and its gradient with shardings."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sharding: Any, gradient_sharding: Any, isolate_gradient: bool
    ) -> Tensor:
        ctx.gradient, ctx.alone = gradient_sharding, isolate_gradient
        return copy_with_sharding(tensor, sharding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = copy_with_sharding(gradients[0], ctx.gradient)
        if ctx.alone:
            xla.barrier_([gradient])
        return gradient, None, None, None


def copy_with_sharding(tensor: Tensor, sharding: Any) -> Tensor:
    """Return a copy of a tensor, annotated with a sharding."""
    # Copy the tensor, because marking works in place, and a clone would inherit the sharding of a placed
    # tensor.
    copy = copy_without_sharding(tensor)
    xla.mark_sharding(copy, sharding)
    return copy


def copy_without_sharding(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor without its sharding annotation. The compiler optimizes the copy away."""
    return tensor | False if tensor.dtype == torch.bool else tensor * 1


def _wait_for_device_ops() -> None:
    """Wait until pending computations on the devices are complete, so that shards can be copied."""
    xla.wait([])


def _convert_index_to_slices(index: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    if index is Ellipsis:
        return tuple(slice(0, size) for size in shape)
    return tuple(slice(s.start, s.stop) for s in index)


def _compute_device_order(num_devices: int) -> Any:
    """Return an array of device IDs, ordered so that mesh neighbors share a fast interconnect.

    The devices are grouped by slice.
    """
    slices = _read_slice_indices() or [0] * num_devices
    return np.array(sorted(range(num_devices), key=lambda d: (slices[d], d)))


def _read_slice_indices() -> list[int]:
    """Return the slice index of each device, ordered by device ID."""
    attributes: Sequence[Mapping[str, Any]] = xr.global_runtime_device_attributes()
    by_number = sorted(attributes, key=lambda a: int(str(a.get("name", ":0")).rpartition(":")[2]))
    return [int(a.get("slice_index", 0)) for a in by_number]


def _compute_shard_group_size(config: RunConfig, num_devices: int) -> int:
    """Compute the number of devices over which one copy of the parameters is sharded.

    A hybrid strategy shards over ``fsdp.shard_group_size`` devices, by default over the devices in
    a slice. Any other strategy shards over all devices.

    Raises:
        UserError: If a hybrid strategy requires ``fsdp.shard_group_size`` because there is only one
            slice, and the setting is missing. Also raised if the devices cannot be divided into
            groups of this size.
    """
    if config.strategy not in HYBRID_STRATEGIES:
        return num_devices
    slices = len(set(_read_slice_indices())) or 1
    size = config.fsdp.shard_group_size or num_devices // slices
    if slices == 1 and config.fsdp.shard_group_size is None:
        raise UserError(
            f"strategy: {config.strategy} shards within a slice, but there is only one slice; set "
            "fsdp.shard_group_size to the number of devices that share one copy of the parameters, or set "
            "strategy to full_shard"
        )
    if size > num_devices or num_devices % size:
        raise UserError(
            f"fsdp.shard_group_size: {num_devices} devices cannot be divided evenly into groups of {size}; "
            f"use a divisor of {num_devices}"
        )
    return size
