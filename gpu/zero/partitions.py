"""Load checkpoints into DeepSpeed's flat partitions of master weights and optimizer state.

ZeRO-1 and 2 concatenate all parameters in a group, and every rank stores an equal slice of the
result. Each rank also has copies of all parameters in the compute dtype, here called compute
copies. ZeRO-3 splits every parameter into equal shards, one per rank, and concatenates a rank's
shards by sub-group. In both cases, a rank only needs a contiguous range of each parameter's
elements in row-major order, and only reads this range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.converters import CheckpointError
from portable.converters import Tensor as StoredTensor
from portable.gpu.zero import private_api
from portable.model.weight_sources import copy_into_tensor
from portable.optim.muon import ShardedMatrix, list_sharded_matrices
from portable.optim.stored_state import cast_number
from portable.optim.weight_average import swap_weights_and_averages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from portable.model.weight_sources import ReadableTensor


@dataclass(frozen=True)
class ParameterFragment:
    """Range of a parameter's elements that is stored in a flat partition of this rank.

    Attributes:
        parameter_name: Name of the parameter.
        start: Index of the first element in the parameter, in row-major order.
        stop: Index after the last element in the parameter.
        partition_offset: Index of the first element in the flat partition.
    """

    parameter_name: str
    start: int
    stop: int
    partition_offset: int

    def slice_partition(self, flat: Tensor) -> Tensor:
        """Return a view of this fragment's elements in a flat partition.

        Args:
            flat: Flat partition of the master weights, or of an optimizer moment, which has the
                same shape.
        """
        return flat[self.partition_offset : self.partition_offset + self.stop - self.start]


@torch.no_grad()
def fill_slice(target: Tensor, source: ReadableTensor, start: int, stop: int) -> None:
    """Read the elements [start, stop) of a tensor, in row-major order, into a flat tensor.

    Does not read any other elements.

    Args:
        target: Flat tensor with ``stop - start`` elements, which is overwritten.
        source: Tensor to read.
        start: Row-major index of the first element.
        stop: Row-major index after the last element.
    """
    offset = 0
    for index in _iter_boxes(source.shape, start, stop):
        sizes = [part.stop - part.start for part in index]
        numel = math.prod(sizes)
        copy_into_tensor(target[offset : offset + numel].view(sizes), source, index)
        offset += numel


def _iter_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Split a range of elements in row-major order into rectangular slices of the tensor.

    The slices are a block of complete rows, and the parts of incomplete rows before and after it.
    Incomplete rows with more than one dim are split again. For example, the range [3, 17) of a
    tensor with shape (4, 5) consists of ``[0:1, 3:5]``, ``[1:3, 0:5]`` and ``[3:4, 0:2]``.

    Args:
        shape: Shape of the tensor.
        start: Index of the first element.
        stop: Index of the last element, exclusive.

    Yields:
        Index of each rectangle, as a tuple with one slice per dim. The rectangles are in row-major
        order.
    """
    if not shape or start >= stop:
        if start < stop:
            yield ()
        return
    row_elements = math.prod(shape[1:])
    first, last = -(-start // row_elements), stop // row_elements
    if first > last:  # all elements are within one row
        parts = [(last, start, stop)]
        full_rows = None
    else:
        parts = [(first - 1, start, first * row_elements)] if start < first * row_elements else []
        full_rows = (slice(first, last), *(slice(0, size) for size in shape[1:])) if first < last else None
    for number, low, high in parts:
        for index in _iter_boxes(shape[1:], low - number * row_elements, high - number * row_elements):
            yield slice(number, number + 1), *index
    if full_rows is not None:
        yield full_rows
    if first <= last and last * row_elements < stop:
        for index in _iter_boxes(shape[1:], 0, stop - last * row_elements):
            yield slice(last, last + 1), *index


class FlatPartitions:
    """Partitions of ZeRO-1 and 2: one flat partition per parameter group.

    This class reads and writes the fp32 master weights and optimizer state of this rank under the
    names of the parameters. Methods that change the master weights leave the parameters in the
    compute dtype outdated until :meth:`refresh_compute_copies` is called.

    Args:
        zero_optimizer: DeepSpeed's ZeRO optimizer, which wraps the optimizer of the run.
        names: Name of each parameter.
        rank: This rank.
    """

    def __init__(self, zero_optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> None:
        self._zero_optimizer = zero_optimizer
        self._base_optimizer = zero_optimizer.optimizer
        self._rank = rank
        self._flat_partitions: list[Tensor] = [
            group["params"][0] for group in self._base_optimizer.param_groups
        ]
        self._fragments = [
            list(_build_group_fragments(group, group_tensor, rank * flat.numel(), flat.numel(), names))
            for (group, group_tensor), flat in zip(
                private_api.list_flat_groups(zero_optimizer), self._flat_partitions, strict=True
            )
        ]
        self._has_stale_copies = False

    def list_matrices(self, ranks: int) -> dict[Tensor, list[ShardedMatrix]]:
        """List the matrices in each flat partition with their layouts, for :class:`portable.optim.muon.Muon`.

        1-D parameters are omitted.

        Args:
            ranks: Number of ranks.

        Returns:
            Layouts of the matrices in each flat partition of this rank, keyed by the partition.
        """
        matrices = {}
        for (group, group_tensor), flat in zip(
            private_api.list_flat_groups(self._zero_optimizer), self._flat_partitions, strict=True
        ):
            matrices[flat] = [
                matrix
                for parameter in group
                if parameter.dim() > 1
                for matrix in list_sharded_matrices(
                    parameter.shape,
                    first_element=-_compute_view_offset(parameter, group_tensor),
                    elements_per_part=flat.numel(),
                    num_ranks=ranks,
                    rank=self._rank,
                )
            ]
        return matrices

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Load this rank's part of ``weights`` into the master weights.

        Parameters that are not in ``weights`` keep their values. The copies of the parameters in
        the compute dtype are outdated until :meth:`refresh_compute_copies` is called.
        """
        for flat, fragments in zip(self._flat_partitions, self._fragments, strict=True):
            _fill_weights(flat, fragments, weights)
        self._has_stale_copies = True

    def iter_local_values(self, *, weights_only: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights and optimizer state that this rank stores, with parameter names.

        Args:
            weights_only: Whether to omit the optimizer state.

        Yields:
            Name of a parameter, and a flat view of this rank's elements of the weight or of a moment.
        """
        for flat, fragments in zip(self._flat_partitions, self._fragments, strict=True):
            state = {} if weights_only else self._base_optimizer.state.get(flat, {})
            yield from _iter_fragment_values(flat, fragments, state)

    def load_optimizer_state(self, state: Mapping[str, Any], state_samples: Mapping[str, Any]) -> None:
        """Load this rank's part of an optimizer state that is stored in a checkpoint.

        The current state is replaced. Elements of parameters without stored state become 0.

        Args:
            state: Stored state, keyed by parameter name and then by entry name.
            state_samples: Example value of each state entry, keyed by entry name. If a state tensor
                has to be created, it gets the dtype of its example. A number, such as the step
                count, gets the type and device of its example. See
                :func:`_assemble_partition_state`.

        Raises:
            CheckpointError: If a number such as the step count differs between parameters.
        """
        for flat, fragments in zip(self._flat_partitions, self._fragments, strict=True):
            self._base_optimizer.state[flat] = _assemble_partition_state(
                flat, fragments, state, self._base_optimizer.state[flat], state_samples
            )

    def swap_ema_weights(self) -> None:
        """Swap the master weights with their moving averages.

        The compute copies are outdated until :meth:`refresh_compute_copies` is called.
        """
        swap_weights_and_averages(self._base_optimizer.state.items())
        self._has_stale_copies = True

    def refresh_compute_copies(self) -> None:
        """Update the compute copies on all ranks from the master weights, if they are outdated.

        All ranks must call this method, because it gathers the master weights. Does nothing if the copies
        are up to date.
        """
        if self._has_stale_copies:
            private_api.gather_compute_copies(self._zero_optimizer)
            self._has_stale_copies = False


class _ElementRange(NamedTuple):
    """Range [start, stop) of a parameter's elements, in row-major order."""

    start: int
    stop: int


class ShardedPartitions:
    """Partitions of ZeRO-3: one flat partition per sub-group, in memory or on NVMe.

    A sub-group is a set of parameters that DeepSpeed updates and swaps as a unit. This class has
    the methods of :class:`FlatPartitions`, and also loads frozen parameters, which ZeRO-3 shards as
    well. Methods that change the master weights also update the parameters in the compute dtype.

    Args:
        zero_optimizer: DeepSpeed's ZeRO optimizer, which wraps the optimizer of the run.
        names: Name of each parameter.
        rank: This rank.
    """

    def __init__(self, zero_optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> None:
        self._zero_optimizer = zero_optimizer
        self._rank = rank
        self._fragments: list[list[ParameterFragment]] = []
        for group in private_api.get_sub_groups(zero_optimizer):
            fragments, offset = [], 0
            for parameter in group:
                size = private_api.get_shard_num_elements(parameter)
                start, stop = self._get_local_range(parameter)
                fragments.append(ParameterFragment(names[parameter], start, stop, offset))
                offset += size
            self._fragments.append(fragments)

    def list_matrices(self, ranks: int) -> dict[Tensor, list[ShardedMatrix]]:
        """List the matrices in each flat partition with their layouts.

        Each :class:`portable.optim.muon.ShardedMatrix` describes how a matrix is split over the
        ranks, and the index in the partition at which this rank's elements begin. 1-D parameters
        are omitted.

        Args:
            ranks: Number of ranks.

        Returns:
            Layouts of the matrices in each flat partition of this rank, keyed by the fp32
            partition.
        """
        matrices = {}
        for index, (group, fragments) in enumerate(
            zip(private_api.get_sub_groups(self._zero_optimizer), self._fragments, strict=True)
        ):
            matrices[private_api.get_master_weights(self._zero_optimizer, index)] = [
                matrix
                for parameter, fragment in zip(group, fragments, strict=True)
                if len(shape := private_api.get_full_shape(parameter)) > 1
                for matrix in list_sharded_matrices(
                    shape,
                    first_element=0,
                    elements_per_part=private_api.get_shard_num_elements(parameter),
                    num_ranks=ranks,
                    rank=self._rank,
                    local_offset=fragment.partition_offset,
                )
            ]
        return matrices

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Load this rank's part of ``weights`` into the master weights and the compute copies.

        The compute copies are the parameters in the compute dtype. Parameters that are not in
        ``weights`` keep their values.

        Call this method before the first forward pass. After this pass, small parameters stay
        gathered on each rank, and this method does not gather them again.
        """
        for index, fragments in enumerate(self._fragments):
            if any(fragment.parameter_name in weights for fragment in fragments):
                with _SwappedInSubGroup(self._zero_optimizer, index) as flat:
                    _fill_weights(flat, fragments, weights)
                    private_api.update_compute_copies(self._zero_optimizer, index)
        private_api.drop_secondary_shards(self._zero_optimizer)

    def iter_local_values(self, *, weights_only: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights and optimizer state that this rank stores, with parameter names.

        Sub-groups on NVMe are read into memory one after the other, so a yielded tensor is only valid until
        the next sub-group. See :meth:`FlatPartitions.iter_local_values`.
        """
        for index, fragments in enumerate(self._fragments):
            with _SwappedInSubGroup(self._zero_optimizer, index) as flat:
                state = {} if weights_only else self._zero_optimizer.optimizer.state.get(flat, {})
                yield from _iter_fragment_values(flat, fragments, state)

    def load_optimizer_state(self, state: Mapping[str, Any], state_samples: Mapping[str, Any]) -> None:
        """Read this rank's optimizer state from a checkpoint.

        See :meth:`FlatPartitions.load_optimizer_state`.
        """
        for index, fragments in enumerate(self._fragments):
            with _SwappedInSubGroup(self._zero_optimizer, index) as flat:
                states = self._zero_optimizer.optimizer.state
                # After a sub-group is swapped in, its state is in the swapper's buffers, so that memory must
                # not be reused.
                current_state = (
                    {} if private_api.is_sub_group_swapped(self._zero_optimizer, index) else states[flat]
                )
                states[flat] = _assemble_partition_state(flat, fragments, state, current_state, state_samples)

    def swap_ema_weights(self) -> None:
        """Swap the master weights with their moving averages, and update the compute copies.

        The compute copies are the parameters in the dtype of the forward pass. Each rank has
        complete compute copies of the small parameters. They are gathered from the shards of all
        ranks, so all ranks must call this method.

        The master weights and averages must be in memory. A run that offloads to NVMe cannot use
        ``train.ema``.
        """
        swap_weights_and_averages(self._zero_optimizer.optimizer.state.items())
        for index in range(len(self._fragments)):
            private_api.update_compute_copies(self._zero_optimizer, index)
        private_api.drop_secondary_shards(self._zero_optimizer)
        private_api.gather_persistent_parameters(self._zero_optimizer)

    def refresh_compute_copies(self) -> None:
        """Do nothing, because every rank has already updated its compute copies."""

    @torch.no_grad()
    def load_frozen_parameter(
        self, parameter: Any, source: ReadableTensor, *, return_exact: bool
    ) -> Tensor | None:
        """Load this rank's shard of a frozen parameter into the parameter.

        A frozen parameter has no master weights. Its shard is rounded to the compute dtype.

        Args:
            parameter: Partitioned parameter. Its shard has the compute dtype, and is overwritten.
            source: Complete tensor to read the shard from.
            return_exact: Whether to also return the shard in fp32, without rounding to the compute
                dtype.

        Returns:
            The shard in fp32 on the host, including padding. None if ``return_exact`` is False.
        """
        start, stop = self._get_local_range(parameter)
        exact_shard = torch.zeros(private_api.get_shard_num_elements(parameter)) if return_exact else None
        if stop > start:
            with private_api.open_parameter_shard(parameter) as shard:
                fill_slice(shard[: stop - start], source, start, stop)
            if exact_shard is not None:
                fill_slice(exact_shard[: stop - start], source, start, stop)
        private_api.drop_secondary_shard(parameter)
        return exact_shard

    def _get_local_range(self, parameter: Any) -> _ElementRange:
        """Return the range of a parameter's elements that this rank stores, without padding."""
        size, full = (
            private_api.get_shard_num_elements(parameter),
            private_api.get_full_num_elements(parameter),
        )
        start = min(self._rank * size, full)
        return _ElementRange(start, min(start + size, full))


class _SwappedInSubGroup:
    """Context manager that loads the flat master weights and the optimizer state of a sub-group into memory.

    If they are on NVMe, they are read on entry and written back on exit. Entering the context returns
    the master weights.

    Args:
        zero_optimizer: DeepSpeed's ZeRO optimizer.
        index: Index of the sub-group.
    """

    def __init__(self, zero_optimizer: Any, index: int) -> None:
        self._zero_optimizer, self._index = zero_optimizer, index
        self._is_swapped = private_api.is_sub_group_swapped(zero_optimizer, index)

    def __enter__(self) -> Tensor:
        if self._is_swapped:
            private_api.swap_in_sub_group(self._zero_optimizer, self._index)
        return private_api.get_master_weights(self._zero_optimizer, self._index)

    def __exit__(self, *_: object) -> None:
        if self._is_swapped:
            private_api.swap_out_sub_group(self._zero_optimizer, self._index)


def _iter_fragment_values(
    flat: Tensor, fragments: list[ParameterFragment], state: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield flat views of each parameter's weight and optimizer states in a partition.

    For each parameter, the view of its master weights comes first, and the views of its optimizer
    states follow. Padding is omitted.

    Args:
        flat: Flat partition of master weights.
        fragments: Parameter fragments in the partition.
        state: Optimizer state of the partition. Entries whose shape differs from ``flat`` are
            ignored.

    Yields:
        Name of a parameter, and a flat view of its elements in ``flat`` or in an entry of
        ``state``.
    """
    tensors = [flat, *(value for value in state.values() if getattr(value, "shape", None) == flat.shape)]
    for fragment in fragments:
        for tensor in tensors:
            yield fragment.parameter_name, fragment.slice_partition(tensor)


def _build_group_fragments(
    group: list[Any],
    group_tensor: Tensor,
    partition_start: int,
    partition_size: int,
    names: Mapping[nn.Parameter, str],
) -> Iterator[ParameterFragment]:
    """Yield the parameter fragments in one partition of a group's flat tensor.

    The positions of parameters in the flat tensor are derived from memory addresses. DeepSpeed's map
    (``_hp_mapping``) cannot be used, because it is wrong if the flat tensor is not in the order of the
    model, as with ``round_robin_gradients``.

    Args:
        group: Parameters in the group, which are views of the flat tensor.
        group_tensor: Flat tensor of the group.
        partition_start: Index of the partition's first element in the flat tensor.
        partition_size: Number of elements in the partition.
        names: Name of each parameter.
    """
    for parameter in group:
        parameter_start = _compute_view_offset(parameter, group_tensor)
        start = max(partition_start - parameter_start, 0)
        stop = min(partition_start + partition_size - parameter_start, parameter.numel())
        if stop > start:
            yield ParameterFragment(names[parameter], start, stop, parameter_start + start - partition_start)


def _compute_view_offset(parameter: Tensor, group_tensor: Tensor) -> int:
    """Return the offset of a parameter in the flat tensor that contains it, as a number of elements."""
    return (parameter.data_ptr() - group_tensor.data_ptr()) // group_tensor.element_size()


@torch.no_grad()
def _fill_weights(
    flat: Tensor, fragments: list[ParameterFragment], weights: Mapping[str, ReadableTensor]
) -> None:
    """Fill a flat partition from lazily read weights.

    Args:
        flat: Flat partition of master weights. Modified in place.
        fragments: Parameter fragments in the partition.
        weights: Complete weights, keyed by parameter name. Elements of other parameters keep their
            values.
    """
    for fragment in fragments:
        if fragment.parameter_name in weights and fragment.stop > fragment.start:
            fill_slice(
                fragment.slice_partition(flat),
                weights[fragment.parameter_name],
                fragment.start,
                fragment.stop,
            )


@torch.no_grad()
def _assemble_partition_state(
    flat: Tensor,
    fragments: list[ParameterFragment],
    state: Mapping[str, Any],
    current_state: Mapping[str, Any],
    state_samples: Mapping[str, Any],
) -> dict[str, Any]:
    """Assemble the optimizer state of a flat partition from the state of its parameters.

    Elements of padding and of parameters without stored state are 0. Entries of ``current_state``
    that are not stored for any parameter in the partition are omitted.

    Args:
        flat: Flat partition of master weights.
        fragments: Parameter fragments in the partition.
        state: Stored state, keyed by parameter name and then by entry name.
        current_state: Current state of the partition. Its tensors are overwritten and reused.
        state_samples: Example value of each state entry, keyed by entry name. A new tensor has the
            dtype of its example, and a restored number has the type and device of its example.
            Without an example, a new tensor has the dtype of ``flat``, and a number becomes an fp32
            scalar on the device of the partition.

    Returns:
        State, keyed by entry name: flat tensors with the shape of ``flat``, and numbers such as the
        step count.

    Raises:
        CheckpointError: If a number such as the step count differs between parameters.
    """
    assembled: dict[str, Any] = {}
    numbers: defaultdict[str, set[float]] = defaultdict(set)
    for fragment in fragments:
        for key, value in state.get(fragment.parameter_name, {}).items():
            if not isinstance(value, StoredTensor) or not value.shape:
                numbers[key].add(float(value.read() if isinstance(value, StoredTensor) else value))
                continue
            if key not in assembled:
                memory = current_state.get(key)
                if not isinstance(memory, torch.Tensor) or memory.shape != flat.shape:
                    memory = torch.empty_like(
                        flat, dtype=getattr(state_samples.get(key), "dtype", flat.dtype)
                    )
                assembled[key] = memory.zero_()
            if fragment.stop > fragment.start:
                fill_slice(fragment.slice_partition(assembled[key]), value, fragment.start, fragment.stop)
    for key, values in numbers.items():
        if len(values) > 1:
            raise CheckpointError(
                f"optimizer state {key!r} differs between parameters, but ZeRO stores one value for all "
                "parameters; resume with strategy full_shard or no_shard"
            )
        sample = state_samples.get(key, torch.zeros((), dtype=torch.float32, device=flat.device))
        assembled[key] = cast_number(sample, values.pop())
    return assembled
