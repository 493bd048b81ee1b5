"""The device mesh, and the sharding of parameters, batches and activations over it.

Under SPMD a sharded tensor is one logical tensor: the program is written for one device, and the compiler
inserts the collectives. It needs the sharding of parameters, batches and activations, and propagates the
rest.
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
"""For each dim of a tensor, the mesh axes that it is sharded over, or None."""


@dataclass(frozen=True)
class LocalShard:
    """A shard that this host holds: its offset in each dim, and its values on the CPU."""

    offsets: tuple[int, ...]
    values: Tensor


class MeshLayout:
    """The mesh, and the placement of tensors on it.

    Args:
        config: strategy, ``fsdp.shard_group_size``, ``context_parallel_size``, ``xla.sharding`` and
            ``xla.shard_param_on_dim_0``.
        num_devices: of the whole run.

    Attributes:
        sequence: devices in a row that share each sequence.
        num_batch_shards: groups of them, over which batches are cut.
        shard_axes: the axes over which a dim of a parameter is sharded.

    Raises:
        UserError: if the number of devices is not a multiple of the group size, or that of those that share
            a sequence, or a pattern of ``xla.sharding`` is not a regular expression.
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
            f"context_parallel_size: a copy of the state is sharded over {self.shard_group_size}, which "
            f"cannot be divided into groups of {self.sequence}; use a divisor of {self.shard_group_size}",
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
        """The spec of a parameter: sharded along one dim over the axes :attr:`shard_axes`, or replicated.

        Raises:
            UserError: if ``xla.sharding`` names a dim that is missing or not divisible by the group size.
        """
        dim = self._sharding_rules.choose_shard_dim(name, shape)
        return tuple(self.shard_axes if d == dim else None for d in range(len(shape)))

    def check_sharding_rules(self) -> None:
        """Raise UserError for a pattern of ``xla.sharding`` that has matched no parameter so far."""
        self._sharding_rules.check_unused_patterns()

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter may be sharded."""
        return self._sharding_rules.is_sharding

    @property
    def reduces_gradients_unsharded(self) -> bool:
        """Whether the TPU's compiler adds up gradients as a whole, and cuts them afterwards."""
        return self.shard_group_size > 32

    def get_batch_spec(self, num_dims: int) -> Spec:
        """The spec of batches: sharded along dim 0 over the groups that share sequences, or all devices."""
        return (self._batch_axes, *(None,) * (num_dims - 1))

    def get_activation_spec(self, num_dims: int) -> Spec:
        """The spec of ``[batch, tokens, ...]``, or of ``[tokens of all sequences, ...]`` with two dims."""
        if num_dims == 2:
            return (self._axes, None)
        return (self._batch_axes, self._token_axis, *(None,) * (num_dims - 2))

    def get_heads_spec(self, *, whole_sequences: bool) -> Spec:
        """The spec of ``[batch, heads, tokens, width]``: of whole sequences with a share of the heads, or of
        parts of them with all heads."""
        last = (self._token_axis, None) if whole_sequences else (None, self._token_axis)
        return (self._batch_axes, *last, None)

    def get_replicated_spec(self, num_dims: int) -> Spec:
        """The spec of a replicated tensor."""
        return (None,) * num_dims

    def to_op_sharding(self, spec: Spec) -> Any:
        """The bindings' form of ``spec``."""
        return self.mesh.get_op_sharding(spec)

    def shard_along_tokens(self, tensor: Tensor) -> Tensor:
        """``tensor``, ``[experts, tokens, ...]``, and its gradient sharded along the tokens."""
        if tensor.is_meta:  # a trial pass
            return tensor
        sharding = self.to_op_sharding((None, *self.get_activation_spec(tensor.dim() - 1)))
        return constrain_with_gradient(tensor, sharding, sharding)

    # -- tensors -----------------------------------------------------------------------------------------

    def place_batch_tensor(self, tensor: Tensor) -> Tensor:
        """Send this host's part of a batch to its devices; the result is the global batch.

        Hosts that share sequences all have them.
        """
        parts = tensor.chunk(max(1, self._num_local_devices // self.sequence))
        shards = [
            parts[device * len(parts) // self._num_local_devices] for device in range(self._num_local_devices)
        ]
        shape = (self.num_batch_shards * len(parts[0]), *tensor.shape[1:])
        return self._assemble_from_shards(shards, self.get_batch_spec(tensor.dim()), shape)

    def create_zeros(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """A tensor of zeros. The host allocates one shard, each device its own."""
        shard_shape = [
            size // self.shard_group_size if axis == self.shard_axes else size
            for size, axis in zip(shape, spec, strict=True)
        ]
        return self._assemble_from_shards(
            [torch.zeros(shard_shape, dtype=dtype)] * self._num_local_devices, spec, shape
        )

    def replicate(self, tensor: Tensor) -> Tensor:
        """Replicate a CPU tensor to every device.

        Use it for changing scalars, too: ``tensor.to(device)`` would turn 0 and 1 into constants of the
        graph.
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
        """Fill this host's shards of ``tensor``, placed by ``spec``, from ``source``."""
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
        """CPU copies of the shards of each tensor that this host saves; one device saves each shard."""
        _wait_for_device_ops()
        return [
            self._copy_tensor_shards(tensor) for tensor in tensors
        ]  # one at a time: replicas are copied as well

    def _copy_tensor_shards(self, tensor: Tensor) -> list[LocalShard]:
        (replicas_and_indices,) = xla.shard_places([tensor])
        (copies,) = xla.local_shards([tensor])
        shards = []
        for (replica, index), (values, _) in zip(replicas_and_indices, copies, strict=True):
            if replica == 0:
                slices = _convert_index_to_slices(index, tensor.shape)
                shards.append(LocalShard(tuple(s.start for s in slices), values))
        return shards

    def read_to_cpu(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU copies of whole tensors. Executes what they still need, and waits for it."""
        copies: list[Tensor] = xla.cpu_tensors(list(tensors))
        return copies

    def execute_pending(self, *, wait: bool = False) -> None:
        """Compute what all tensors still need; ``wait`` until it is there, to be copied or filled."""
        torch_xla.sync()
        if wait:
            _wait_for_device_ops()

    def copy_replicated_to_cpu(self, tensor: Tensor) -> Tensor:
        """A CPU copy of a replicated tensor, from one of this host's devices."""
        _wait_for_device_ops()
        values: Tensor = xla.local_shards([tensor])[0][0][0]
        return values


def constrain_with_gradient(
    tensor: Tensor, sharding: Any, gradient_sharding: Any, *, isolate_gradient: bool = False
) -> Tensor:
    """Annotate ``tensor`` with a sharding, and its gradient with another.

    Args:
        isolate_gradient: write the gradient by itself. The compiler might put off what cuts it, and keep it
        whole.
    """
    constrained: Tensor = _ConstrainFunction.apply(tensor, sharding, gradient_sharding, isolate_gradient)  # type: ignore[no-untyped-call, unused-ignore]
    return constrained


class _ConstrainFunction(torch.autograd.Function):
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
    """A copy of ``tensor`` that is annotated with a sharding."""
    # Marking works in place, and a clone would inherit the sharding of a placed tensor.
    copy = copy_unsharded(tensor)
    xla.mark_sharding(copy, sharding)
    return copy


def copy_unsharded(tensor: Tensor) -> Tensor:
    """The same values as a tensor of its own; the compiler removes the operation."""
    return tensor | False if tensor.dtype == torch.bool else tensor * 1


def _wait_for_device_ops() -> None:
    """Wait for started computations; shards can be copied only then."""
    xla.wait([])


def _convert_index_to_slices(index: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    if index is Ellipsis:
        return tuple(slice(0, size) for size in shape)
    return tuple(slice(s.start, s.stop) for s in index)


def _compute_device_order(num_devices: int) -> Any:
    """Device ids ordered by slice, so that neighbors in the mesh share a fast interconnect."""
    slices = _read_slice_indices() or [0] * num_devices
    return np.array(sorted(range(num_devices), key=lambda d: (slices[d], d)))


def _read_slice_indices() -> list[int]:
    """The slice index of each device, by device id."""
    attributes: Sequence[Mapping[str, Any]] = xr.global_runtime_device_attributes()
    by_number = sorted(attributes, key=lambda a: int(str(a.get("name", ":0")).rpartition(":")[2]))
    return [int(a.get("slice_index", 0)) for a in by_number]


def _compute_shard_group_size(config: RunConfig, num_devices: int) -> int:
    if config.strategy not in HYBRID_STRATEGIES:
        return num_devices
    slices = len(set(_read_slice_indices())) or 1
    size = config.fsdp.shard_group_size or num_devices // slices
    if slices == 1 and config.fsdp.shard_group_size is None:
        raise UserError(
            f"strategy: {config.strategy} shards within a slice, and there is only one slice; set "
            "fsdp.shard_group_size, or use full_shard"
        )
    if size > num_devices or num_devices % size:
        raise UserError(
            f"fsdp.shard_group_size: {num_devices} devices are not divisible into groups of {size}; use a "
            f"divisor of {num_devices}"
        )
    return size
