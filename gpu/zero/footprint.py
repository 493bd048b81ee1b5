"""Memory and traffic of DeepSpeed ZeRO, computed from a model's shapes.

``tests/gpu/test_footprint.py`` compares the resident sizes with live engines, to the byte. See
docs/planning.md.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.config.derived_defaults import ZERO
from portable.engines.communication_volume import compute_internode_bytes, count_elements
from portable.engines.fsdp.footprint import PassMemory
from portable.gpu.zero import buckets
from portable.gpu.zero.checks import OPTIMIZERS
from portable.planner.memory_model import (
    COMPUTE_BYTES,
    Cluster,
    Footprint,
    StrategySetting,
    Traffic,
    compute_muon_cost,
)
from portable.planner.optimizer_memory import MASTER, compute_custom_state_bytes
from portable.plugins import names_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from portable.config import RunConfig
    from portable.config.sections import TrainConfig
    from portable.planner.parameter_inventory import Inventory, Weight


def iter_zero_settings(config: RunConfig) -> Iterator[StrategySetting]:
    """What ZeRO adds to :func:`portable.engines.footprint.settings`."""
    train = config.train
    if train.optimizer in OPTIMIZERS or _is_elementwise(train):
        for strategy in ZERO:
            yield StrategySetting(strategy)
            yield StrategySetting(strategy, "cpu")
        yield StrategySetting("zero3", "none", "cpu")
        yield StrategySetting("zero3", "cpu", "cpu")
        if train.optimizer in ("adamw", "sgd") and train.ema is None:
            yield StrategySetting("zero3", "nvme")
            yield StrategySetting("zero3", "nvme", "nvme")


def _is_elementwise(train: TrainConfig) -> bool:
    if not names_code(train.optimizer):
        return False
    from portable.optim import custom_optimizer  # only here: it needs torch

    return custom_optimizer.is_elementwise(train) and not custom_optimizer.constructs_state(train)


def compute_zero_footprint(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Memory and traffic of ``model`` under ``config.strategy``, one of ZeRO's stages."""
    return _Zero(model, config, cluster).compute_footprint()


class _Shares:
    """What a rank updates of each group. Sizes are in elements unless they say bytes."""

    def __init__(self, model: Inventory, config: RunConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._section = _get_zero_section(config)
        self._ranks = cluster.devices
        self._stage = int(config.strategy[-1])
        self._compute = COMPUTE_BYTES[config.precision]
        self._model = model
        self._weights = model.weights
        self._trained = model.trained
        self._whole = model.elements
        self._learning = count_elements(self._trained)
        self._largest = max(w.elements for w in self._weights)
        self._largest_gradient = max(w.elements for w in self._trained)
        self._hidden = model.hidden_size
        self._optimizer_on_host = config.memory.offload_optimizer != "none"
        self._parameters_on_host = config.memory.offload_params != "none"
        self._optimizer_on_disk = config.memory.offload_optimizer == "nvme"
        self._parameters_on_disk = config.memory.offload_params == "nvme"

    @cached_property
    def _groups(self) -> list[list[Weight]]:
        """The optimizer's parameter groups; see :func:`portable.optim.optimizers.build_parameter_groups`."""
        groups: dict[Any, list[Weight]] = {}
        for weight in self._trained:
            groups.setdefault(weight.group, []).append(weight)
        return [groups[group] for group in sorted(groups)]

    @cached_property
    def _shard(self) -> int:
        """Elements that a rank updates."""
        return sum(map(self._count_share_elements, self._groups))

    def _count_shard_elements(self, weights: Iterable[Weight]) -> int:
        return sum(-(-w.elements // self._ranks) for w in weights)

    def _compute_moment_bytes(self) -> int:
        """Bytes of the moments of flat partitions, and their step counts."""
        return int(self._moments_per_element * MASTER * self._shard) + self._step_counts

    @property
    def _moments_per_element(self) -> int | Fraction:
        """Moments per element; with Muon on average."""
        return self._optimizer_moments + (self._config.train.ema is not None)

    @property
    def _optimizer_moments(self) -> int | Fraction:
        if names_code(self._config.train.optimizer):
            return Fraction(compute_custom_state_bytes(self._config.train, (1,), 1).sharded, MASTER)
        if self._config.train.optimizer == "muon":
            moments = sum(
                (1 if group[0].matrices else 2) * self._count_share_elements(group) for group in self._groups
            )
            return Fraction(moments, self._shard)
        return {"adamw": 2, "sgd": 1 if self._config.train.betas[0] else 0}[self._config.train.optimizer]

    def _count_share_elements(self, group: list[Weight]) -> int:
        """Elements of a group of parameters that a rank updates."""
        if self._stage == 3:
            return self._count_shard_elements(group)
        alignment = 2 * self._ranks
        return -(-count_elements(group) // alignment) * 2

    @property
    def _step_counts(self) -> int:
        """Bytes: one step count per group or sub-group."""
        if self._config.train.optimizer == "sgd":
            return 0
        groups = self._groups if self._stage < 3 else self._sub_groups
        if names_code(self._config.train.optimizer):
            return compute_custom_state_bytes(self._config.train, (1,), 1).replicated * len(groups)
        return MASTER * sum(not group[0].matrices for group in groups)

    @cached_property
    def _sub_groups(self) -> list[list[Weight]]:
        """Parameters that stage 3 updates and swaps together."""
        most = self._get_size("sub_group_size")
        sub_groups: list[list[Weight]] = []
        for group in self._groups:
            filled = most  # start a new sub-group with each group
            for parameter in group:
                if filled >= most:
                    sub_groups.append([])
                    filled = 0
                sub_groups[-1].append(parameter)
                filled += self._count_shard_elements([parameter])
        return sub_groups

    def _get_size(self, name: str) -> int:
        value: Any = self._section
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            return buckets.DEFAULTS[name]
        return buckets.compute_auto_sizes(self._hidden)[name] if value == "auto" else int(value)


class _Zero(_Shares):
    """What the stages of ZeRO in DeepSpeed 0.19 hold, and where."""

    def compute_footprint(self) -> Footprint:
        total, learning, compute, share = self._whole, self._learning, self._compute, self._shard
        master = MASTER * share
        moments = self._compute_moment_bytes()
        gradients = self._compute_gradient_bytes()
        on_host = self._optimizer_on_host
        resident = compute * (
            self._count_shard_elements(self._weights) if self._stage == 3 else self._flat_row
        )
        links = (self._ranks - 1) / self._ranks
        summed = MASTER * learning * links
        if self._stage == 3:
            gathers = 1 if total <= self._get_size("stage3_max_live_parameters") else 2
            traffic = Traffic(per_pass=summed + gathers * compute * total * links)
        elif self._stage == 2:
            traffic = Traffic(per_pass=summed, per_step=compute * learning * links)
        else:
            traffic = Traffic(per_step=summed + compute * learning * links)
        pass_memory = self._compute_pass_memory()
        in_update, sent = compute_muon_cost(self._model, compute, self._ranks, replicated=False)
        traffic = replace(traffic, per_step=traffic.per_step + sent)
        network = Traffic(
            compute_internode_bytes(traffic.per_pass, self._cluster),
            compute_internode_bytes(traffic.per_step, self._cluster),
        )
        return Footprint(
            parameters=0 if self._parameters_on_host else resident,
            gradients=gradients,
            optimizer=0 if on_host else master + moments,
            compute="cast",
            gathered=pass_memory.before_layers,
            in_layers=pass_memory.in_layers,
            at_end=pass_memory.at_end,
            in_update=self._compute_update_bytes() + in_update,
            # Stages 1 and 2 also save the compute copy.
            also_saved=compute * learning if self._stage < 3 else 0,
            host=self._compute_host_bytes(resident),
            disk=self._compute_disk_bytes(),
            links=traffic,
            network=network,
        )

    # -- resident ------------------------------------------------------------------------------------------

    @cached_property
    def _flat_row(self) -> int:
        """All parameters under stages 1 and 2: groups are concatenated and padded to equal shares."""
        return self._ranks * self._shard + self._whole - self._learning

    def _compute_gradient_bytes(self) -> int:
        """Bytes: unsharded in the compute type under stage 1, otherwise this rank's shard in fp32."""
        if self._stage == 1:
            return self._compute * self._learning
        if self._optimizer_on_host and self._stage == 3:
            return 0
        if self._stage == 2 and self._compute == MASTER:
            return MASTER * self._count_reached_elements()
        return MASTER * self._shard

    def _count_reached_elements(self) -> int:
        """Elements of the parameters that overlap rank 0's share, which stage 2 keeps unsharded in fp32."""
        reached = 0
        for group in self._groups:
            row, end = 0, -(-count_elements(group) // (2 * self._ranks)) * 2
            for parameter in group:
                if row < end:
                    reached += parameter.elements
                row += parameter.elements
        return reached

    def _compute_host_bytes(self, resident: int) -> int:
        """Bytes in host memory, buffers for gradients and parameters included."""
        host = MASTER * self._exact
        if self._parameters_on_host:
            host += self._compute_swap_host_bytes() if self._parameters_on_disk else resident
        if not self._optimizer_on_host:
            return host
        in_memory = self._shard
        if self._optimizer_on_disk:
            largest = max(self._count_shard_elements(group) for group in self._sub_groups)
            in_memory -= sum(self._count_shard_elements(group) for group in self._swapped_groups)
            host += self._get_size("offload_optimizer.buffer_count") * buckets.compute_aligned_bytes(
                largest, MASTER
            )
        moments = int(self._moments_per_element * MASTER * in_memory) + self._step_counts
        host += 2 * MASTER * in_memory + moments  # with master weights and gradients
        if self._stage == 3:
            return host + MASTER * self._shard
        return host + self._compute * (self._shard + self._largest_gradient)

    @property
    def _exact(self) -> int:
        """Elements of the frozen weights that a rank keeps in fp32 too, which the compute type would round.

        Under stages 1 and 2 rank 0 has all of them: this is a rank's share of its node's memory.
        """
        rounded = [w for w in self._weights if not w.trained and w.itemsize > self._compute]
        if self._stage == 3:
            return self._count_shard_elements(rounded)
        return -(-count_elements(rounded) // min(self._cluster.per_node, self._ranks))

    # -- on disk -------------------------------------------------------------------------------------------

    @cached_property
    def _swapped_groups(self) -> list[list[Weight]]:
        """The sub-groups whose master weights and moments are swapped."""
        if not self._optimizer_on_disk:
            return []
        least = buckets.SWAPPED_BYTES
        return [group for group in self._sub_groups if MASTER * self._count_shard_elements(group) >= least]

    def _compute_swap_host_bytes(self) -> int:
        """Bytes of swap buffers, and of compute copies that stay in memory."""
        compute, ranks = self._compute, self._ranks
        buffers = self._get_size("offload_param.buffer_count") * buckets.compute_swap_buffer(
            self._largest, ranks
        )
        most = self._get_size("offload_param.max_in_cpu")
        in_memory = min(most, self._shard)
        filled, outside = 0, 0
        apart: list[list[Weight]] = []
        for group in self._sub_groups:
            share = self._count_shard_elements(group)
            if filled + share > in_memory:
                apart.append(group)
                outside += self._count_shard_elements([w for w in group if not self._is_swapped(w)])
            filled += share
        outside += self._count_shard_elements(
            [w for w in self._weights if not w.trained and not self._is_swapped(w)]
        )
        # The rest is written through a buffer, which DeepSpeed sizes for unsharded parameters.
        largest = max(apart, key=self._count_shard_elements, default=[])
        written = sum(buckets.compute_aligned_bytes(w.elements, compute) for w in largest)
        return compute * (buffers + in_memory + outside) + written

    def _is_swapped(self, parameter: Weight) -> bool:
        """Whether its compute copy is swapped to a file."""
        return self._compute * self._count_shard_elements([parameter]) >= buckets.SWAPPED_BYTES

    def _compute_disk_bytes(self) -> int:
        """Bytes of all swap files."""
        disk_bytes = 0
        for group in self._swapped_groups:
            disk_bytes += int(1 + self._moments_per_element) * buckets.compute_aligned_bytes(
                self._count_shard_elements(group), MASTER
            )
            gradients = [MASTER * self._count_shard_elements([parameter]) for parameter in group]
            disk_bytes += sum(size for size in gradients if size >= buckets.SWAPPED_BYTES)
        if self._parameters_on_disk:
            swapped = [self._count_shard_elements([w]) for w in self._weights if self._is_swapped(w)]
            disk_bytes += sum(buckets.compute_aligned_bytes(share, self._compute) for share in swapped)
        return disk_bytes

    # -- temporary -----------------------------------------------------------------------------------------

    def _compute_pass_memory(self) -> PassMemory:
        """Bytes of buffers, gathered parameters and unreduced gradients: before the backward pass reaches the
        layers, in them, and at the end, when few activations are left."""
        bucket = self._get_size("reduce_bucket_size")
        compute = self._compute
        cast = 0 if compute == MASTER else MASTER
        layer = max((w.elements for w in self._trained if not w.table), default=0)
        if self._stage < 3:
            buffer = compute * bucket
            if self._optimizer_on_host:
                buffer += compute * self._largest_gradient
            # A gradient larger than the bucket is reduced alone, in an fp32 copy.
            layers = (
                buffer + cast * min(bucket, self._learning) + (compute + cast) * self._count_unbucketed(layer)
            )
            share_copy = compute * self._shard  # a copy of this rank's share after the reduction
            return PassMemory(
                buffer,
                layers,
                buffer + share_copy + (compute + cast) * self._count_unbucketed(self._largest_gradient),
            )
        threshold = self._get_size("stage3_param_persistence_threshold")
        persistent = sum(w.elements for w in self._weights if w.elements <= threshold)
        coming = self._whole - persistent
        # Swapped parameters are released after each use.
        most = 0 if self._parameters_on_disk else self._get_size("stage3_max_live_parameters")
        live = min(coming, max(most, self._largest))
        # Gathered into one flat buffer ahead of the layers, and copied out to each parameter.
        row = min(coming, max(self._get_size("stage3_prefetch_bucket_size"), self._largest))
        there = MASTER * bucket + compute * (persistent + live)
        layers = there + (compute + 2 * MASTER) * self._count_unbucketed(layer)
        if coming > live:  # gathering continues during the pass
            there, layers = there + compute * row, layers + compute * row
        end = (compute + 2 * MASTER) * self._count_unbucketed(self._largest_gradient)
        at_end = MASTER * bucket + compute * (persistent + live) + max(compute * row, end)
        return PassMemory(there, layers, at_end)

    def _count_unbucketed(self, elements: int) -> int:
        """``elements`` if a gradient of that size is too large for a bucket, else 0."""
        return elements if elements > self._get_size("reduce_bucket_size") else 0

    def _compute_update_bytes(self) -> int:
        """Bytes of the flat fp32 gradients for the optimizer."""
        if self._optimizer_on_host:
            return 0
        if self._stage == 1:
            return (MASTER + 2 * self._compute) * self._shard - self._compute_gradient_bytes()
        if self._stage == 2 and self._compute != MASTER:
            return 2 * MASTER * self._largest_gradient
        if self._stage == 3:
            return MASTER * max(self._count_shard_elements(group) for group in self._sub_groups)
        return MASTER * self._shard


def _get_zero_section(config: RunConfig) -> dict[str, Any]:
    """The section zero_optimization of the run's DeepSpeed JSON; the run checks it."""
    document, setting = config.documents.get("deepspeed.config"), config.deepspeed.config
    values = setting if document is None else document.values
    zero = values.get("zero_optimization") if isinstance(values, dict) else None
    return {k: v for k, v in zero.items() if v is not None} if isinstance(zero, dict) else {}
