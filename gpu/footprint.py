"""What DDP, FSDP2 and DeepSpeed ZeRO keep on a device and move, reckoned from the shapes of a model.

Held against the live engines, to the byte where something stays, in ``tests/gpu/test_footprint.py``; how they
come about is told in docs/planning.md.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.zero import buckets as zero_sizes
from portable.errors import UserError
from portable.planner.memory_model import (
    COMPUTE_BYTES,
    MASTER,
    Cluster,
    Footprint,
    Setting,
    Traffic,
    moment_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from portable.config import RunConfig
    from portable.planner.inventory import Inventory, Weight

_ZERO_OPTIMIZERS = ("adamw", "sgd")
_HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
_KEPT_AFTER_FORWARD = ("shard_grad_op", "hybrid_shard_zero2")


def adopt(config: RunConfig, cluster: Cluster) -> RunConfig:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    if config.deepspeed.config is None:
        return config
    from gpu.zero import engine as zero  # only here: DeepSpeed takes seconds to import

    return zero.adopt(config, "cpu", cluster.devices)


def settings(config: RunConfig, cluster: Cluster) -> Iterator[Setting]:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    yield Setting("no_shard")
    if config.train.optimizer in _ZERO_OPTIMIZERS:
        for strategy in ("zero1", "zero2", "zero3"):
            yield Setting(strategy)
            yield Setting(strategy, "cpu")
        yield Setting("zero3", "none", "cpu")
        yield Setting("zero3", "cpu", "cpu")
        yield Setting("zero3", "nvme")
        yield Setting("zero3", "nvme", "nvme")
    yield Setting("shard_grad_op")
    yield Setting("full_shard")
    yield Setting("full_shard", "cpu")
    yield Setting("full_shard", "none", "cpu")
    if cluster.nodes > 1 and cluster.devices % cluster.per_node == 0:
        yield Setting("hybrid_shard_zero2")
        yield Setting("hybrid_shard")


def units(model: nn.Module, config: RunConfig) -> list[nn.Module]:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    from gpu.fsdp.units import units  # only here: it needs torch

    return units(model, config)


def footprint(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    if config.strategy.startswith("zero"):
        return _Zero(model, config, cluster).footprint()
    alone = cluster.devices == 1 and config.memory.offload_params != "cpu"
    if config.strategy == "no_shard" or alone:
        return _replicated(model, config, cluster)
    return _fully_sharded(model, config, cluster)


def _replicated(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    gradients = MASTER * _elements(w for w in model.weights if w.trained)
    moments = model.moment_bytes(config.train)
    on_host = config.memory.offload_optimizer == "cpu"
    share = (cluster.devices - 1) / cluster.devices
    micro = config.train.micro_batch_size
    several = micro == "auto" or config.train.global_batch_size > micro * cluster.devices
    # DDP's buckets stay; micro-batches before the last, which it does not sum, have gradients beside them.
    beside = gradients if cluster.devices > 1 and several else 0
    return Footprint(
        gathered=beside,
        in_layers=beside,
        parameters=MASTER * model.elements,
        gradients=gradients,
        optimizer=0 if on_host else moments,
        compute="autocast",
        host=2 * gradients + moments if on_host else 0,
        links=Traffic(per_step=2 * gradients * share),
        network=Traffic(per_step=_across(2 * gradients, cluster)),
    )


def _elements(weights: Iterable[Weight]) -> int:
    return sum(w.elements for w in weights)


def _across(volume: float, cluster: Cluster) -> float:
    """Of a collective over all devices, which sends ``volume`` from each, what one sends between nodes.

    A ring leaves each node once: its devices share what passes.
    """
    return 0.0 if cluster.nodes == 1 else volume * (cluster.nodes - 1) / cluster.nodes / cluster.per_node


# -- FSDP2 -----------------------------------------------------------------------------------------------


def _fully_sharded(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    group = cluster.devices
    if config.strategy in _HYBRID:
        group = config.fsdp.shard_group_size or min(cluster.per_node, cluster.devices)
    compute = COMPUTE_BYTES[config.precision]
    parameters = gradients = moments = 0
    for weight in model.weights:
        shape = weight.shape
        rows = -(-shape[0] // group) if shape else 1  # cut along dim 0, and padded: the first rank's part
        size = MASTER * rows * (weight.elements // max(1, shape[0]) if shape else 1)
        parameters += size
        if weight.trained:
            gradients += size
            moments += moment_bytes(config.train, shape, rows, exact=weight.table)
    whole = model.elements
    before, layers, end = _gathered(model, config, group, compute)
    offload_params = config.memory.offload_params == "cpu"
    offload_optimizer = config.memory.offload_optimizer == "cpu" and not offload_params
    host = 0
    if offload_params:
        host = parameters + gradients + moments
    elif offload_optimizer:
        host = 2 * gradients + moments
    gathers = 1 if config.strategy in _KEPT_AFTER_FORWARD else 2
    share = (group - 1) / group
    copies = cluster.devices // group
    per_pass = (gathers * compute + MASTER) * whole * share
    reduced = 2 * gradients * (copies - 1) / copies  # a shard's gradients, over the groups
    network = reduced if config.strategy in _HYBRID else _across(per_pass, cluster)
    return Footprint(
        parameters=0 if offload_params else parameters,
        gradients=0 if offload_params else gradients,
        optimizer=0 if offload_params or offload_optimizer else moments,
        compute="cast",
        gathered=before,
        in_layers=layers,
        at_end=end,
        host=host,
        links=Traffic(per_pass=per_pass),
        network=Traffic(per_pass=network),
    )


def _gathered(model: Inventory, config: RunConfig, group: int, compute: int) -> tuple[int, int, int]:
    """Bytes of gathered parameters and of gradients on their way: before the backward pass comes to a unit,
    in the units, and at the end.

    A unit at work has its own parameters and already those of the next; in the backward pass its whole
    gradients, and these once more in fp32 to be summed, of which a share remains. What lies outside the units
    is there all the time; of its gradients, the head's come first and wait for the others.
    """
    if model.no_units is not None:
        raise UserError(model.no_units)
    largest = max(model.sizes("unit"), default=0)
    outside = _elements(w for w in model.weights if w.unit is None)
    waiting = _elements(w for w in model.weights if w.head and w.unit is None)
    reduced = MASTER + MASTER / group
    there = compute * (outside + (model.elements - outside if _keeps(config) else 2 * largest))
    layers = there + compute * (waiting + largest) + reduced * largest
    end = 2 * compute * outside + reduced * outside
    return int(there), int(layers), int(end)


def _keeps(config: RunConfig) -> bool:
    return config.strategy in _KEPT_AFTER_FORWARD


# -- DeepSpeed ZeRO --------------------------------------------------------------------------------------


class _Zero:
    """What the stages of ZeRO keep, in DeepSpeed 0.19; elements unless bytes are said."""

    def __init__(self, model: Inventory, config: RunConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._ranks = cluster.devices
        self._stage = int(config.strategy[-1])
        self._compute = COMPUTE_BYTES[config.precision]
        self._weights = model.weights
        self._trained = [w for w in self._weights if w.trained]
        self._whole = model.elements
        self._largest = max(w.elements for w in self._weights)
        self._hidden = model.hidden_size
        self._optimizer_on_host = config.memory.offload_optimizer != "none"
        self._parameters_on_host = config.memory.offload_params != "none"
        self._optimizer_on_disk = config.memory.offload_optimizer == "nvme"
        self._parameters_on_disk = config.memory.offload_params == "nvme"

    def footprint(self) -> Footprint:
        whole, compute, share = self._whole, self._compute, self._shard
        master = MASTER * share
        moments = self._moments()
        gradients = self._gradients()
        on_host = self._optimizer_on_host
        resident = compute * (self._shard_of(self._weights) if self._stage == 3 else self._flat_row)
        links = (self._ranks - 1) / self._ranks
        summed = MASTER * whole * links
        if self._stage == 3:
            gathers = 1 if whole <= self._size("stage3_max_live_parameters") else 2
            traffic = Traffic(per_pass=summed + gathers * compute * whole * links)
        elif self._stage == 2:
            traffic = Traffic(per_pass=summed, per_step=compute * whole * links)
        else:
            traffic = Traffic(per_step=summed + compute * whole * links)
        passes, layers, at_end = self._in_passes()
        network = Traffic(_across(traffic.per_pass, self._cluster), _across(traffic.per_step, self._cluster))
        return Footprint(
            parameters=0 if self._parameters_on_host else resident,
            gradients=gradients,
            optimizer=0 if on_host else master + moments,
            compute="cast",
            gathered=passes,
            in_layers=layers,
            at_end=at_end,
            in_update=self._in_update(),
            # Stages 1 and 2 save the compute copy as well.
            also_saved=compute * whole if self._stage < 3 else 0,
            host=self._host(resident),
            disk=self._disk(),
            links=traffic,
            network=network,
        )

    # -- what stays ----------------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> list[list[Weight]]:
        """The optimizer's groups of parameters; see :func:`portable.optim.build.parameter_groups`."""
        decaying = [w for w in self._trained if w.decays]
        others = [w for w in self._trained if not w.decays]
        return [group for group in (decaying, others) if group]

    @cached_property
    def _flat_row(self) -> int:
        """All parameters under stages 1 and 2: a group's lie end to end, padded for all ranks to be equal."""
        alignment = 2 * self._ranks
        row = sum(-(-_elements(group) // alignment) * alignment for group in self._groups)
        return row + self._whole - _elements(self._trained)

    @cached_property
    def _shard(self) -> int:
        """What a rank updates."""
        if self._stage == 3:
            return self._shard_of(self._trained)
        frozen = self._whole - _elements(self._trained)
        return (self._flat_row - frozen) // self._ranks

    def _shard_of(self, weights: Iterable[Weight]) -> int:
        return sum(-(-w.elements // self._ranks) for w in weights)

    def _moments(self) -> int:
        """Bytes: of flat partitions, so that no moment knows rows, and each has one step count."""
        return self._moments_kept * MASTER * self._shard + self._step_counts

    @property
    def _moments_kept(self) -> int:
        """Of each element."""
        return {"adamw": 2, "sgd": 1 if self._config.train.betas[0] else 0}[self._config.train.optimizer]

    @property
    def _step_counts(self) -> int:
        """Bytes: each group, or sub-group, has one."""
        if self._config.train.optimizer != "adamw":
            return 0
        return MASTER * len(self._groups if self._stage < 3 else self._sub_groups)

    @cached_property
    def _sub_groups(self) -> list[list[Weight]]:
        """Parameters that stage 3 updates together, and swaps together."""
        most = self._size("sub_group_size")
        found: list[list[Weight]] = []
        for group in self._groups:
            filled = most  # so that each group begins with a sub-group of its own
            for parameter in group:
                if filled >= most:
                    found.append([])
                    filled = 0
                found[-1].append(parameter)
                filled += self._shard_of([parameter])
        return found

    def _gradients(self) -> int:
        """Bytes: whole in the compute type under stage 1, this rank's in fp32 else."""
        trained = _elements(self._trained)
        if self._stage == 1:
            return self._compute * trained
        if self._optimizer_on_host and self._stage == 3:
            return 0
        if self._stage == 2 and self._compute == MASTER:
            return MASTER * self._reached()
        return MASTER * self._shard

    def _reached(self) -> int:
        """The parameters that the first rank's part of a row reaches, which stage 2 keeps whole in fp32."""
        reached = 0
        for group in self._groups:
            row, end = 0, -(-_elements(group) // (2 * self._ranks)) * 2
            for parameter in group:
                if row < end:
                    reached += parameter.elements
                row += parameter.elements
        return reached

    def _host(self, resident: int) -> int:
        """Bytes: also of the buffers through which gradients and parameters pass."""
        host = 0
        if self._parameters_on_host:
            host += self._host_of_swapped_parameters() if self._parameters_on_disk else resident
        if not self._optimizer_on_host:
            return host
        in_memory = self._shard
        if self._optimizer_on_disk:
            largest = max(self._shard_of(group) for group in self._sub_groups)
            in_memory -= sum(self._shard_of(group) for group in self._swapped_groups)
            host += self._size("offload_optimizer.buffer_count") * zero_sizes.aligned(largest, MASTER)
        host += (2 + self._moments_kept) * MASTER * in_memory + self._step_counts  # with their gradients
        if self._stage == 3:
            return host + MASTER * self._shard
        return host + self._compute * (self._shard + self._largest)

    # -- on a disk -----------------------------------------------------------------------------------------

    @cached_property
    def _swapped_groups(self) -> list[list[Weight]]:
        """The sub-groups whose masters and moments are swapped."""
        if not self._optimizer_on_disk:
            return []
        least = zero_sizes.SWAPPED_BYTES
        return [group for group in self._sub_groups if MASTER * self._shard_of(group) >= least]

    def _host_of_swapped_parameters(self) -> int:
        """Bytes of buffers, and of the compute copies that are in memory besides."""
        compute, ranks = self._compute, self._ranks
        buffers = self._size("offload_param.buffer_count") * zero_sizes.swap_buffer(self._largest, ranks)
        most = self._size("offload_param.max_in_cpu")
        room = min(most, self._shard)
        filled, outside = 0, 0
        apart: list[list[Weight]] = []
        for group in self._sub_groups:
            share = self._shard_of(group)
            if filled + share > room:
                apart.append(group)
                outside += self._shard_of([w for w in group if not self._swaps(w)])
            filled += share
        outside += self._shard_of([w for w in self._weights if not w.trained and not self._swaps(w)])
        # What is not in the room is written through a buffer, for which DeepSpeed counts whole parameters.
        largest = max(apart, key=self._shard_of, default=[])
        written = sum(zero_sizes.aligned(w.elements, compute) for w in largest)
        return compute * (buffers + room + outside) + written

    def _swaps(self, parameter: Weight) -> bool:
        """Whether its compute copy has a file."""
        return self._compute * self._shard_of([parameter]) >= zero_sizes.SWAPPED_BYTES

    def _disk(self) -> int:
        """Bytes of all files."""
        found = 0
        for group in self._swapped_groups:
            found += (1 + self._moments_kept) * zero_sizes.aligned(self._shard_of(group), MASTER)
            gradients = [MASTER * self._shard_of([parameter]) for parameter in group]
            found += sum(size for size in gradients if size >= zero_sizes.SWAPPED_BYTES)
        if self._parameters_on_disk:
            swapped = [self._shard_of([w]) for w in self._weights if self._swaps(w)]
            found += sum(zero_sizes.aligned(share, self._compute) for share in swapped)
        return found

    # -- what comes and goes -------------------------------------------------------------------------------

    def _in_passes(self) -> tuple[int, int, int]:
        """Bytes of buffers, gathered parameters and gradients on their way: before the backward pass comes to
        the layers, in them, and when few activations are there."""
        bucket = self._size("reduce_bucket_size")
        compute = self._compute
        cast = 0 if compute == MASTER else MASTER
        layer = max(w.elements for w in self._weights if not w.table)
        if self._stage < 3:
            buffer = compute * bucket
            if self._optimizer_on_host:
                buffer += compute * self._largest
            # A gradient larger than the bucket is summed by itself, in a copy in fp32.
            layers = buffer + cast * min(bucket, self._whole) + (compute + cast) * self._alone(layer)
            own = compute * self._shard  # a copy of this rank's part of them, once it is summed
            return buffer, layers, buffer + own + (compute + cast) * self._alone(self._largest)
        threshold = self._size("stage3_param_persistence_threshold")
        persistent = sum(w.elements for w in self._weights if w.elements <= threshold)
        coming = self._whole - persistent
        # What is swapped in is given back after each use.
        most = 0 if self._parameters_on_disk else self._size("stage3_max_live_parameters")
        live = min(coming, max(most, self._largest))
        # Gathered in one row ahead of the layers, and copied out of it into each parameter.
        row = min(coming, max(self._size("stage3_prefetch_bucket_size"), self._largest))
        there = MASTER * bucket + compute * (persistent + live)
        layers = there + (compute + 2 * MASTER) * self._alone(layer)
        if coming > live:  # it goes on being gathered
            there, layers = there + compute * row, layers + compute * row
        end = (compute + 2 * MASTER) * self._alone(self._largest)
        return there, layers, MASTER * bucket + compute * (persistent + live) + max(compute * row, end)

    def _alone(self, elements: int) -> int:
        """Of a parameter, if its gradient is too large for a bucket."""
        return elements if elements > self._size("reduce_bucket_size") else 0

    def _in_update(self) -> int:
        """Bytes: gradients are laid out once more, in fp32, for the optimizer."""
        if self._optimizer_on_host:
            return 0
        if self._stage == 1:
            return (MASTER + 2 * self._compute) * self._shard - self._gradients()
        if self._stage == 2 and self._compute != MASTER:
            return 2 * MASTER * self._largest
        if self._stage == 3:
            return MASTER * max(self._shard_of(group) for group in self._sub_groups)
        return MASTER * self._shard

    # -- its JSON ------------------------------------------------------------------------------------------

    def _size(self, name: str) -> int:
        given: Any = self._document
        for part in name.split("."):
            given = given.get(part) if isinstance(given, dict) else None
        if given is None:
            return zero_sizes.DEFAULTS[name]
        return zero_sizes.automatic(self._hidden)[name] if given == "auto" else int(given)

    @cached_property
    def _document(self) -> dict[str, Any]:
        """The section zero_optimization of the run's DeepSpeed JSON, unchecked: the run checks it."""
        given = self._config.deepspeed.config
        try:
            values = json.loads(Path(given).read_text("utf-8")) if isinstance(given, str) else given
        except (OSError, ValueError):
            return {}
        zero = values.get("zero_optimization") if isinstance(values, dict) else None
        return {k: v for k, v in zero.items() if v is not None} if isinstance(zero, dict) else {}
