"""Filling what DeepSpeed keeps of a model on this rank: flat runs of master weights and optimizer state.

ZeRO-1 and 2 lay all parameters of a group end to end and give every rank an equal run of that row, with each
rank holding the compute copy of all of it. ZeRO-3 cuts every parameter into equal runs of its own, one a
rank, and lays a rank's runs end to end in sub-groups. Either way a rank needs, of each parameter, elements
``start`` to ``stop`` in row-major order, and reads only those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from converters import CheckpointError
from converters import Tensor as StoredTensor
from portable.model.tensors import fill, to_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from portable.model.tensors import ReadableTensor


@dataclass(frozen=True)
class Fragment:
    """Where a run of one parameter lies in a flat partition of this rank.

    Attributes:
        name: of the parameter.
        start, stop: the elements that this rank keeps, in row-major order.
        offset: where they begin in the flat partition.
    """

    name: str
    start: int
    stop: int
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The fragment inside ``flat``, the partition or something of its shape."""
        return flat[self.offset : self.offset + self.stop - self.start]


@torch.no_grad()
def fill_run(target: Tensor, source: ReadableTensor, start: int, stop: int) -> None:
    """Copy elements ``start`` to ``stop`` of ``source`` in row-major order; reads the rows that they lie in.

    Args:
        target: flat, of ``stop - start`` elements.
    """
    shape, chosen = source.shape, list[slice]()
    if not shape:
        target.copy_(to_torch(source.read().reshape(1)[start:stop]))
        return
    for dim in range(len(shape)):
        row = math.prod(shape[dim + 1 :])
        first, last = start // row, (stop - 1) // row
        chosen.append(slice(first, last + 1))
        start, stop = start - first * row, stop - first * row
        if first != last:
            break
    index = (*chosen, *(slice(0, size) for size in shape[len(chosen) :]))
    sizes = [part.stop - part.start for part in index]
    if math.prod(sizes) == target.numel():
        fill(target.view(sizes), source, index)
    else:
        target.copy_(to_torch(source.read(index).reshape(-1)[start:stop]))


class FlatPartitions:
    """ZeRO-1 and 2: one flat partition for each parameter group."""

    def __init__(self, zero_optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> None:
        self._zero = zero_optimizer
        self._base = zero_optimizer.optimizer
        self._flats: list[Tensor] = [group["params"][0] for group in self._base.param_groups]
        self._fragments = [
            list(_fragments_of(group, row, rank * flat.numel(), flat.numel(), names))
            for group, row, flat in zip(
                zero_optimizer.bit16_groups, zero_optimizer.bit16_groups_flat, self._flats, strict=True
            )
        ]
        self._stale = False

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Fill the master weights; the compute copies follow with :meth:`refresh`."""
        for flat, fragments in zip(self._flats, self._fragments, strict=True):
            _fill_weights(flat, fragments, weights)
        self._stale = True

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Fill the optimizer state, by parameter name."""
        for flat, fragments in zip(self._flats, self._fragments, strict=True):
            self._base.state[flat] = _optimizer_state(flat, fragments, state, self._base.state[flat])

    def refresh(self) -> None:
        """Give all ranks the compute copies of the master weights; a collective, once after loading."""
        if self._stale:
            self._zero.update_lp_params()
            self._stale = False


class ShardedPartitions:
    """ZeRO-3: one flat partition for each sub-group, in memory or swapped out to NVMe."""

    def __init__(self, zero_optimizer: Any, names: Mapping[nn.Parameter, str], rank: int) -> None:
        self._zero = zero_optimizer
        self._rank = rank
        self._fragments: list[list[Fragment]] = []
        for group in zero_optimizer.fp16_groups:
            fragments, offset = [], 0
            for parameter in group:
                size = parameter.ds_tensor.ds_numel  # the same on all ranks: the last ones are padded
                start = min(rank * size, parameter.ds_numel)
                stop = min(start + size, parameter.ds_numel)
                fragments.append(Fragment(names[parameter], start, stop, offset))
                offset += size
            self._fragments.append(fragments)

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Fill the master weights and the compute copies."""
        for index, fragments in enumerate(self._fragments):
            if any(fragment.name in weights for fragment in fragments):
                with _SwappedIn(self._zero, index) as flat:
                    _fill_weights(flat, fragments, weights)
                    self._zero._reassign_or_swap_out_partitioned_parameters(index)
        self._zero.invalidate_secondary_tensor()  # hpZ's copies, from which a forward pass would gather

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Fill the optimizer state, by parameter name."""
        for index, fragments in enumerate(self._fragments):
            with _SwappedIn(self._zero, index) as flat:
                kept = self._zero.optimizer.state
                # What was swapped in lies in buffers that belong to the swapping.
                before = {} if self._zero._swappable_optimizer_subgroup(index) else kept[flat]
                kept[flat] = _optimizer_state(flat, fragments, state, before)

    def refresh(self) -> None:
        """Nothing: every rank's compute copy is its own."""

    @torch.no_grad()
    def load_frozen(self, parameter: Any, source: ReadableTensor) -> None:
        """Fill this rank's share of a parameter that is not trained, and so has no master copy."""
        share = parameter.ds_tensor
        start = min(self._rank * share.ds_numel, parameter.ds_numel)
        stop = min(start + share.ds_numel, parameter.ds_numel)
        if stop > start:
            fill_run(share.data[: stop - start], source, start, stop)
        parameter.ds_secondary_tensor = None  # no step will ever do so


class _SwappedIn:
    """Has the flat partition of a sub-group in memory, and writes it back to NVMe if it lives there."""

    def __init__(self, zero_optimizer: Any, index: int) -> None:
        self._zero, self._index = zero_optimizer, index
        self._swapped = zero_optimizer._swappable_optimizer_subgroup(index)

    def __enter__(self) -> Tensor:
        if self._swapped:
            self._zero._optimizer_states_and_gradient_swap_in(self._index)
        flat: Tensor = self._zero.fp32_partitioned_groups_flat[self._index]
        return flat

    def __exit__(self, *_: object) -> None:
        if self._swapped:
            self._zero._optimizer_states_and_gradient_swap_out(self._index)


def _fragments_of(
    group: list[Any], row: Tensor, first: int, size: int, names: Mapping[nn.Parameter, str]
) -> Iterator[Fragment]:
    """What the ``size`` elements from ``first`` on of a group's ``row`` hold of its parameters.

    Told by where the parameters lie in memory: DeepSpeed's own account of it (``_hp_mapping``) is wrong where
    the row is not in the model's order, as with ``round_robin_gradients``.
    """
    for parameter in group:
        begin = (parameter.data_ptr() - row.data_ptr()) // row.element_size()
        start = max(first - begin, 0)
        stop = min(first + size - begin, parameter.numel())
        if stop > start:
            yield Fragment(names[parameter], start, stop, begin + start - first)


@torch.no_grad()
def _fill_weights(flat: Tensor, fragments: list[Fragment], weights: Mapping[str, ReadableTensor]) -> None:
    for fragment in fragments:
        if fragment.name in weights and fragment.stop > fragment.start:
            fill_run(fragment.of(flat), weights[fragment.name], fragment.start, fragment.stop)


@torch.no_grad()
def _optimizer_state(
    flat: Tensor, fragments: list[Fragment], state: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of one flat partition, put together from that of its parameters.

    Args:
        before: its state so far, of which the memory is used again.

    Raises:
        CheckpointError: for state that has no place in a flat partition: of another shape than its
            parameter, or a step count that differs from parameter to parameter.
    """
    made: dict[str, Any] = {}
    numbers: defaultdict[str, set[float]] = defaultdict(set)
    for fragment in fragments:
        for key, value in state.get(fragment.name, {}).items():
            if not isinstance(value, StoredTensor) or not value.shape:
                numbers[key].add(float(value.read() if isinstance(value, StoredTensor) else value))
                continue
            if key not in made:
                room = before.get(key)
                if not isinstance(room, torch.Tensor) or room.shape != flat.shape:
                    room = torch.empty_like(flat)
                made[key] = room.zero_()
            if fragment.stop > fragment.start:
                fill_run(fragment.of(made[key]), value, fragment.start, fragment.stop)
    for key, values in numbers.items():
        if len(values) > 1:
            raise CheckpointError(
                f"optimizer state {key!r} differs between parameters, which ZeRO steps together; "
                "go on with strategy full_shard or no_shard"
            )
        made[key] = torch.tensor(values.pop(), dtype=torch.float32, device=flat.device)
    return made
