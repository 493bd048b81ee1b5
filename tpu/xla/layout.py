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
from portable.tpu.xla.sharding import HYBRID, ShardingRules
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

    offset: tuple[int, ...]
    data: Tensor


class MeshLayout:
    """The mesh, and the placement of tensors on it.

    Args:
        config: strategy, ``fsdp.shard_group_size``, ``context_parallel_size``, ``xla.sharding`` and
            ``xla.shard_param_on_dim_0``.
        devices: of the whole run.

    Attributes:
        sequence: devices in a row that share each sequence.
        rows: groups of them, over which batches are cut.
        shard: the axes over which a dim of a parameter is sharded.

    Raises:
        UserError: if the number of devices is not a multiple of the group size, or that of those that share
            a sequence, or a pattern of ``xla.sharding`` is not a regular expression.
    """

    def __init__(self, config: RunConfig, devices: int) -> None:
        order = _compute_device_order(devices)
        self.device = torch.device("xla:0")
        self.devices = devices
        self.group = _group_size(config, devices)
        self._rules = ShardingRules(config, self.group)
        self.sequence = config.context_parallel_size
        require(
            self.group % self.sequence == 0,
            f"context_parallel_size: a copy of the state is sharded over {self.group}, which cannot be "
            f"divided into groups of {self.sequence}; use a divisor of {self.group}",
        )
        self.rows = devices // self.sequence
        sizes = {REPLICA: devices // self.group, FSDP: self.group // self.sequence, SEQUENCE: self.sequence}
        axes = self._axes = tuple(axis for axis, size in sizes.items() if axis == FSDP or size > 1)
        self.mesh = xs.Mesh(order, tuple(sizes[axis] for axis in axes), axes)
        self._batch_axes = tuple(axis for axis in axes if axis != SEQUENCE)
        self._token_axis = SEQUENCE if SEQUENCE in axes else None
        self.shard = tuple(axis for axis in axes if axis != REPLICA)

    # -- specs -------------------------------------------------------------------------------------------

    def get_parameter_spec(self, name: str, shape: Sequence[int]) -> Spec:
        """The spec of a parameter: sharded along one dim over the axes :attr:`shard`, or replicated.

        Raises:
            UserError: if ``xla.sharding`` names a dim that is missing or not divisible by the group size.
        """
        dim = self._rules.choose_dim(name, shape)
        return tuple(self.shard if d == dim else None for d in range(len(shape)))

    def check_rules(self) -> None:
        """Raise UserError for a pattern of ``xla.sharding`` that has matched no parameter so far."""
        self._rules.check_rules()

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter may be sharded."""
        return self._rules.sharded

    @property
    def reduces_unsharded(self) -> bool:
        """Whether the TPU's compiler adds up gradients as a whole, and cuts them afterwards."""
        return self.group > 32

    def get_batch_spec(self, dims: int) -> Spec:
        """The spec of batches: sharded along dim 0 over the groups that share sequences, or all devices."""
        return (self._batch_axes, *(None,) * (dims - 1))

    def get_activation_spec(self, dims: int) -> Spec:
        """The spec of ``[batch, tokens, ...]``, or of ``[tokens of all sequences, ...]`` with two dims."""
        if dims == 2:
            return (self._axes, None)
        return (self._batch_axes, self._token_axis, *(None,) * (dims - 2))

    def get_heads_spec(self, *, whole_sequences: bool) -> Spec:
        """The spec of ``[batch, heads, tokens, width]``: of whole sequences with a share of the heads, or of
        parts of them with all heads."""
        last = (self._token_axis, None) if whole_sequences else (None, self._token_axis)
        return (self._batch_axes, *last, None)

    def get_replicated_spec(self, dims: int) -> Spec:
        """The spec of a replicated tensor."""
        return (None,) * dims

    def to_op_sharding(self, spec: Spec) -> Any:
        """The bindings' form of ``spec``."""
        return self.mesh.get_op_sharding(spec)

    def shard_along_tokens(self, tensor: Tensor) -> Tensor:
        """``tensor``, ``[experts, tokens, ...]``, and its gradient sharded along the tokens."""
        if tensor.is_meta:  # a trial pass
            return tensor
        sharding = self.to_op_sharding((None, *self.get_activation_spec(tensor.dim() - 1)))
        return constrain(tensor, sharding, sharding)

    # -- tensors -----------------------------------------------------------------------------------------

    def place_batch(self, tensor: Tensor) -> Tensor:
        """Send this host's part of a batch to its devices; the result is the global batch.

        Hosts that share sequences all have them.
        """
        parts = tensor.chunk(max(1, self._local_devices // self.sequence))
        shards = [parts[device * len(parts) // self._local_devices] for device in range(self._local_devices)]
        shape = (self.rows * len(parts[0]), *tensor.shape[1:])
        return self._assemble(shards, self.get_batch_spec(tensor.dim()), shape)

    def create_zeros(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """A tensor of zeros. The host allocates one shard, each device its own."""
        cut = [
            size // self.group if axis == self.shard else size for size, axis in zip(shape, spec, strict=True)
        ]
        return self._assemble([torch.zeros(cut, dtype=dtype)] * self._local_devices, spec, shape)

    def replicate(self, tensor: Tensor) -> Tensor:
        """Replicate a CPU tensor to every device.

        Use it for changing scalars, too: ``tensor.to(device)`` would turn 0 and 1 into constants of the
        graph.
        """
        return self._assemble(
            [tensor] * self._local_devices, self.get_replicated_spec(tensor.dim()), tensor.shape
        )

    def _assemble(self, shards: list[Tensor], spec: Spec, shape: Sequence[int]) -> Tensor:
        tensor: Tensor = xla.from_cpu_shards(shards, self.to_op_sharding(spec), torch.Size(shape))
        return tensor

    @cached_property
    def _local_devices(self) -> int:
        return int(xr.addressable_runtime_device_count())

    def fill(self, tensor: Tensor, spec: Spec, source: ReadableTensor) -> None:
        """Fill this host's shards of ``tensor``, placed by ``spec``, from ``source``."""
        read: dict[tuple[tuple[int, int], ...], Tensor] = {}
        shards = []
        for _, index in xla.shard_places([tensor])[0]:
            slices = _to_slices(index, tensor.shape)
            key = tuple((s.start, s.stop) for s in slices)
            if key not in read:
                read[key] = to_torch(source.read(slices)).to(tensor.dtype)
            shards.append(read[key])
        tensor.data = self._assemble(shards, spec, tensor.shape)

    def copy_local_shards(self, tensors: Sequence[Tensor]) -> list[list[LocalShard]]:
        """CPU copies of the shards of each tensor that this host saves; one device saves each shard."""
        _wait()
        return [self._copy_shards(tensor) for tensor in tensors]  # one at a time: replicas are copied as well

    def _copy_shards(self, tensor: Tensor) -> list[LocalShard]:
        (places,) = xla.shard_places([tensor])
        (copies,) = xla.local_shards([tensor])
        shards = []
        for (replica, index), (values, _) in zip(places, copies, strict=True):
            if replica == 0:
                slices = _to_slices(index, tensor.shape)
                shards.append(LocalShard(tuple(s.start for s in slices), values))
        return shards

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU copies of whole tensors. Executes what they still need, and waits for it."""
        copies: list[Tensor] = xla.cpu_tensors(list(tensors))
        return copies

    def execute(self, *, wait: bool = False) -> None:
        """Compute what all tensors still need; ``wait`` until it is there, to be copied or filled."""
        torch_xla.sync()
        if wait:
            _wait()

    def copy_replicated(self, tensor: Tensor) -> Tensor:
        """A CPU copy of a replicated tensor, from one of this host's devices."""
        _wait()
        values: Tensor = xla.local_shards([tensor])[0][0][0]
        return values


def constrain(tensor: Tensor, sharding: Any, gradient: Any, *, alone: bool = False) -> Tensor:
    """Annotate ``tensor`` with a sharding, and its gradient with another.

    Args:
        alone: write the gradient by itself. The compiler might put off what cuts it, and keep it whole.
    """
    constrained: Tensor = _Constrain.apply(tensor, sharding, gradient, alone)  # type: ignore[no-untyped-call, unused-ignore]
    return constrained


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sharding: Any, gradient: Any, alone: bool) -> Tensor:
        ctx.gradient, ctx.alone = gradient, alone
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
    copy = copy_tensor(tensor)
    xla.mark_sharding(copy, sharding)
    return copy


def copy_tensor(tensor: Tensor) -> Tensor:
    """The same values as a tensor of its own; the compiler removes the operation."""
    return tensor | False if tensor.dtype == torch.bool else tensor * 1


def _wait() -> None:
    """Wait for started computations; shards can be copied only then."""
    xla.wait([])


def _to_slices(index: Any, shape: Sequence[int]) -> tuple[slice, ...]:
    if index is Ellipsis:
        return tuple(slice(0, size) for size in shape)
    return tuple(slice(s.start, s.stop) for s in index)


def _compute_device_order(devices: int) -> Any:
    """Device ids ordered by slice, so that neighbors in the mesh share a fast interconnect."""
    slices = _read_slice_indices() or [0] * devices
    return np.array(sorted(range(devices), key=lambda d: (slices[d], d)))


def _read_slice_indices() -> list[int]:
    """The slice index of each device, by device id."""
    attributes: Sequence[Mapping[str, Any]] = xr.global_runtime_device_attributes()
    by_number = sorted(attributes, key=lambda a: int(str(a.get("name", ":0")).rpartition(":")[2]))
    return [int(a.get("slice_index", 0)) for a in by_number]


def _group_size(config: RunConfig, devices: int) -> int:
    if config.strategy not in HYBRID:
        return devices
    slices = len(set(_read_slice_indices())) or 1
    size = config.fsdp.shard_group_size or devices // slices
    if slices == 1 and config.fsdp.shard_group_size is None:
        raise UserError(
            f"strategy: {config.strategy} shards within a slice, and there is only one slice; set "
            "fsdp.shard_group_size, or use full_shard"
        )
    if size > devices or devices % size:
        raise UserError(
            f"fsdp.shard_group_size: {devices} devices are not divisible into groups of {size}; use a "
            f"divisor of {devices}"
        )
    return size
