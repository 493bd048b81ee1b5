"""Compute the memory and traffic of DeepSpeed ZeRO for the planner, from the shapes of a model.

``tests/gpu/test_footprint.py`` checks that the sizes of parameters, gradients and optimizer state
are exactly the same in real engines. See docs/planning.md.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.config.derived_defaults import ZERO_STRATEGIES
from portable.engines.communication_volume import compute_internode_bytes, sum_elements
from portable.engines.fsdp.footprint import PassMemory
from portable.gpu.zero import buckets
from portable.gpu.zero.checks import ZERO_OPTIMIZERS
from portable.planner.memory_model import (
    COMPUTE_BYTES,
    Cluster,
    Footprint,
    StrategySetting,
    Traffic,
    compute_muon_update_cost,
)
from portable.planner.optimizer_memory import FP32_BYTES, compute_custom_state_bytes
from portable.plugins import is_plugin_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from portable.config import RunConfig
    from portable.config.sections import TrainConfig
    from portable.planner.parameter_inventory import ModelInventory, ParameterEntry


def iter_zero_settings(config: RunConfig) -> Iterator[StrategySetting]:
    """Yield the ZeRO strategies that the planner compares, with their offloading settings.

    Offloading to NVMe is included for AdamW and SGD without a weight average. Yields nothing if
    ZeRO does not support the optimizer of the run. For a custom optimizer, this check runs the
    optimizer's code.
    """
    train = config.train
    if train.optimizer in ZERO_OPTIMIZERS or _is_elementwise(train):
        for strategy in ZERO_STRATEGIES:
            yield StrategySetting(strategy)
            yield StrategySetting(strategy, "cpu")
        yield StrategySetting("zero3", "none", "cpu")
        yield StrategySetting("zero3", "cpu", "cpu")
        if train.optimizer in ("adamw", "sgd") and train.ema is None:
            yield StrategySetting("zero3", "nvme")
            yield StrategySetting("zero3", "nvme", "nvme")


def _is_elementwise(train: TrainConfig) -> bool:
    if not is_plugin_name(train.optimizer):
        return False
    from portable.optim import custom_optimizer  # imports torch

    return custom_optimizer.is_elementwise(train) and not custom_optimizer.has_state_before_first_step(train)


def compute_zero_footprint(model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Compute the memory and traffic per rank under ``config.strategy``, which must be a ZeRO stage."""
    return _ZeroFootprint(model, config, cluster).compute_footprint()


class _RankShares:
    """Sizes of the model parts that one rank updates and stores.

    Sizes are in elements, unless a name contains ``bytes``.

    Args:
        model: Inventory of the model's weights.
        config: Config of the run.
        cluster: Number of nodes, and devices per node.
    """

    def __init__(self, model: ModelInventory, config: RunConfig, cluster: Cluster) -> None:
        self._config, self._cluster = config, cluster
        self._zero_section = _get_zero_section(config)
        self._num_ranks = cluster.devices
        self._stage = int(config.strategy[-1])
        self._compute_bytes = COMPUTE_BYTES[config.precision]
        self._model = model
        self._weights = model.weights
        self._trained = model.trained_weights
        self._total_elements = model.num_elements
        self._trained_elements = sum_elements(self._trained)
        self._largest_parameter = max(w.num_elements for w in self._weights)
        self._largest_gradient = max(w.num_elements for w in self._trained)
        self._hidden_size = model.hidden_size
        self._optimizer_on_host = config.memory.offload_optimizer != "none"
        self._parameters_on_host = config.memory.offload_params != "none"
        self._optimizer_on_disk = config.memory.offload_optimizer == "nvme"
        self._parameters_on_disk = config.memory.offload_params == "nvme"

    @cached_property
    def _parameter_groups(self) -> list[list[ParameterEntry]]:
        """Trained parameters in each parameter group of the optimizer, in the order of the groups.

        See :func:`portable.optim.optimizers.build_parameter_groups`.
        """
        groups: dict[Any, list[ParameterEntry]] = {}
        for weight in self._trained:
            groups.setdefault(weight.group, []).append(weight)
        return [groups[group] for group in sorted(groups)]

    @cached_property
    def _updated_elements(self) -> int:
        """Number of elements that one rank updates, including padding."""
        return sum(map(self._count_share_elements, self._parameter_groups))

    def _count_shard_elements(self, weights: Iterable[ParameterEntry]) -> int:
        return sum(-(-w.num_elements // self._num_ranks) for w in weights)

    def _compute_moment_and_step_counter_bytes(self) -> int:
        """Compute a rank's optimizer state in bytes: fp32 moments and step counters.

        The moments include the weight average, if there is one. Master weights are not included.
        """
        return int(self._moments_per_element * FP32_BYTES * self._updated_elements) + self._step_counter_bytes

    @property
    def _moments_per_element(self) -> int | Fraction:
        """Number of fp32 optimizer state values per element, including the weight average.

        With Muon, this is an average over matrices and other parameters.
        """
        return self._optimizer_moments + (self._config.train.ema is not None)

    @property
    def _optimizer_moments(self) -> int | Fraction:
        """Size of the optimizer state per updated element, in fp32 values.

        For example, this is 2 for AdamW, which has two moments. For SGD, it is 1, or 0 without
        momentum. It is a fraction for Muon, because layer matrices have one moment and other
        parameters have two. It can also be a fraction for a custom optimizer. The weight average
        and step counters are not included.
        """
        if is_plugin_name(self._config.train.optimizer):
            return Fraction(compute_custom_state_bytes(self._config.train, (1,), 1).sharded, FP32_BYTES)
        if self._config.train.optimizer == "muon":
            moments = sum(
                (1 if group[0].uses_muon else 2) * self._count_share_elements(group)
                for group in self._parameter_groups
            )
            return Fraction(moments, self._updated_elements)
        return {"adamw": 2, "sgd": 1 if self._config.train.betas[0] else 0}[self._config.train.optimizer]

    def _count_share_elements(self, group: list[ParameterEntry]) -> int:
        """Count the elements of a parameter group that each rank updates, including padding.

        With stage 3, each parameter is divided among the ranks, and padded to a multiple of the
        number of ranks. With stages 1 and 2, the group is divided as one flat tensor. This tensor
        is padded to a multiple of twice the number of ranks.
        """
        if self._stage == 3:
            return self._count_shard_elements(group)
        alignment = 2 * self._num_ranks
        return -(-sum_elements(group) // alignment) * 2

    @property
    def _step_counter_bytes(self) -> int:
        """Size of the step counters in bytes. SGD has none.

        With other optimizers, there is one counter per parameter group or, with stage 3, per
        sub-group. Groups of matrices that Muon updates have none. All state of a custom optimizer
        whose shape differs from the shape of the parameter is counted here.
        """
        if self._config.train.optimizer == "sgd":
            return 0
        groups = self._parameter_groups if self._stage < 3 else self._sub_groups
        if is_plugin_name(self._config.train.optimizer):
            return compute_custom_state_bytes(self._config.train, (1,), 1).replicated * len(groups)
        return FP32_BYTES * sum(not group[0].uses_muon for group in groups)

    @cached_property
    def _sub_groups(self) -> list[list[ParameterEntry]]:
        """Sub-groups of trained parameters. Stage 3 updates and swaps each sub-group as a unit.

        A sub-group contains consecutive parameters of one parameter group. It ends when a
        rank's shards have at least ``sub_group_size`` elements, or at the end of the group.
        """
        max_elements = self._get_deepspeed_size("sub_group_size")
        sub_groups: list[list[ParameterEntry]] = []
        for group in self._parameter_groups:
            filled = max_elements  # so that each group starts a new sub-group
            for parameter in group:
                if filled >= max_elements:
                    sub_groups.append([])
                    filled = 0
                sub_groups[-1].append(parameter)
                filled += self._count_shard_elements([parameter])
        return sub_groups

    def _get_deepspeed_size(self, name: str) -> int:
        """Return the value of a DeepSpeed setting that counts elements or buffers.

        The value comes from the DeepSpeed JSON of the run. If it is missing, DeepSpeed's default is
        used. ``auto`` is replaced by the value that the Hugging Face Trainer uses,
        from :func:`portable.gpu.zero.buckets.compute_auto_bucket_sizes`, or by DeepSpeed's default if
        the Trainer does not replace it.

        Args:
            name: Dotted key in the section ``zero_optimization``, such as
                ``offload_param.max_in_cpu``.
        """
        value: Any = self._zero_section
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value == "auto":
            value = buckets.compute_auto_bucket_sizes(self._hidden_size).get(name)
        return buckets.DEEPSPEED_DEFAULTS[name] if value is None else int(value)


class _ZeroFootprint(_RankShares):
    """Memory and traffic (bytes sent) per rank for the ZeRO stages in DeepSpeed 0.19.

    They include the memory on the device, the memory on the host and the disk space for offloading,
    and the traffic of Muon's update.
    """

    def compute_footprint(self) -> Footprint:
        """Compute the memory and traffic per rank."""
        total, learning, compute, share = (
            self._total_elements,
            self._trained_elements,
            self._compute_bytes,
            self._updated_elements,
        )
        master = FP32_BYTES * share
        moments = self._compute_moment_and_step_counter_bytes()
        gradients = self._compute_gradient_bytes()
        on_host = self._optimizer_on_host
        resident = compute * (
            self._count_shard_elements(self._weights) if self._stage == 3 else self._padded_total_elements
        )
        links = (self._num_ranks - 1) / self._num_ranks
        summed = FP32_BYTES * learning * links
        if self._stage == 3:
            gathers = 1 if total <= self._get_deepspeed_size("stage3_max_live_parameters") else 2
            traffic = Traffic(per_pass=summed + gathers * compute * total * links)
        elif self._stage == 2:
            traffic = Traffic(per_pass=summed, per_step=compute * learning * links)
        else:
            traffic = Traffic(per_step=summed + compute * learning * links)
        pass_memory = self._compute_pass_memory()
        in_update, sent = compute_muon_update_cost(self._model, compute, self._num_ranks, replicated=False)
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
            # A checkpoint of stages 1 and 2 also contains the compute copy.
            also_saved=compute * learning if self._stage < 3 else 0,
            host=self._compute_host_bytes(resident),
            disk=self._compute_disk_bytes(),
            links=traffic,
            network=network,
        )

    # -- resident ------------------------------------------------------------------------------------------

    @cached_property
    def _padded_total_elements(self) -> int:
        """Number of parameter elements that each rank stores in ZeRO stages 1 and 2, with padding.

        In these stages, each rank stores all parameters in the compute dtype. The trained
        parameters of each parameter group are padded, so that they can be divided equally among
        the ranks for the update.
        """
        return self._num_ranks * self._updated_elements + self._total_elements - self._trained_elements

    def _compute_gradient_bytes(self) -> int:
        """Compute the size in bytes of the gradients that a rank keeps on the device between passes.

        - Stage 1: unsharded gradients in the compute dtype.
        - Stage 2: the rank's shard in fp32. In an fp32 run, DeepSpeed instead keeps the complete
          gradient of each parameter that is at least partly in the rank's shard.
        - Stage 3: the rank's shard in fp32, or nothing if the optimizer is offloaded, because the
          shard is then on the host.
        """
        if self._stage == 1:
            return self._compute_bytes * self._trained_elements
        if self._optimizer_on_host and self._stage == 3:
            return 0
        if self._stage == 2 and self._compute_bytes == FP32_BYTES:
            return FP32_BYTES * self._count_overlapping_elements()
        return FP32_BYTES * self._updated_elements

    def _count_overlapping_elements(self) -> int:
        """Count the elements of all parameters that are at least partly in rank 0's share.

        Each parameter group is one flat tensor, and its first part is rank 0's share. A parameter
        that is only partly in the share is counted completely. The count is used for stage 2 in an
        fp32 run, where rank 0 stores the complete gradient of such a parameter.
        """
        overlapping_elements = 0
        for group in self._parameter_groups:
            group_offset, share_end = 0, -(-sum_elements(group) // (2 * self._num_ranks)) * 2
            for parameter in group:
                if group_offset < share_end:
                    overlapping_elements += parameter.num_elements
                group_offset += parameter.num_elements
        return overlapping_elements

    def _compute_host_bytes(self, resident: int) -> int:
        """Compute the host memory that a rank needs, in bytes.

        The result includes the offloaded parameters and optimizer state, and buffers for gradients
        and parameters. It also includes fp32 copies of the frozen weights that the compute dtype
        cannot represent exactly.

        Args:
            resident: Size in bytes of the rank's parameters in the compute dtype.
        """
        host = FP32_BYTES * self._exact_frozen_elements
        if self._parameters_on_host:
            host += self._compute_swap_host_bytes() if self._parameters_on_disk else resident
        if not self._optimizer_on_host:
            return host
        in_memory = self._updated_elements
        if self._optimizer_on_disk:
            largest = max(self._count_shard_elements(group) for group in self._sub_groups)
            in_memory -= sum(self._count_shard_elements(group) for group in self._swapped_sub_groups)
            host += self._get_deepspeed_size(
                "offload_optimizer.buffer_count"
            ) * buckets.compute_aligned_bytes(largest, FP32_BYTES)
        moments = int(self._moments_per_element * FP32_BYTES * in_memory) + self._step_counter_bytes
        host += 2 * FP32_BYTES * in_memory + moments  # the factor 2 is for master weights and gradients
        if self._stage == 3:
            return host + FP32_BYTES * self._updated_elements
        return host + self._compute_bytes * (self._updated_elements + self._largest_gradient)

    @property
    def _exact_frozen_elements(self) -> int:
        """Number of elements per rank in the fp32 copies of frozen weights in host memory.

        A frozen weight is copied if its dtype has more bytes than the compute dtype, because a cast
        to the compute dtype would round the weight. With stage 3, each rank copies only its shards.
        With stages 1 and 2, only rank 0 keeps copies. The ranks of a node share the host memory, so
        the number of elements is then divided by the number of ranks per node.
        """
        rounded = [w for w in self._weights if not w.is_trained and w.itemsize > self._compute_bytes]
        if self._stage == 3:
            return self._count_shard_elements(rounded)
        return -(-sum_elements(rounded) // min(self._cluster.per_node, self._num_ranks))

    # -- on disk -------------------------------------------------------------------------------------------

    @cached_property
    def _swapped_sub_groups(self) -> list[list[ParameterEntry]]:
        """Sub-groups with master weights and moments on disk.

        Empty if the optimizer is not offloaded to disk. A sub-group stays in memory if its fp32
        master weights on a rank are smaller than
        :data:`portable.gpu.zero.buckets.MIN_SWAPPED_BYTES`.
        """
        if not self._optimizer_on_disk:
            return []
        min_bytes = buckets.MIN_SWAPPED_BYTES
        return [
            group for group in self._sub_groups if FP32_BYTES * self._count_shard_elements(group) >= min_bytes
        ]

    def _compute_swap_host_bytes(self) -> int:
        """Compute the host memory in bytes that is needed for swapping parameters to NVMe.

        This is the total size of:

        - The swap buffers.
        - The trained parameters that DeepSpeed keeps in memory, which have at most
          ``offload_param.max_in_cpu`` elements.
        - Parameters that are too small to be swapped. See :meth:`_is_parameter_swapped`.
        - A buffer for writing a sub-group to disk. This buffer has the size of the
          sub-group's unsharded parameters.

        All of them are in the compute dtype.
        """
        compute, ranks = self._compute_bytes, self._num_ranks
        buffers = self._get_deepspeed_size(
            "offload_param.buffer_count"
        ) * buckets.compute_swap_buffer_elements(self._largest_parameter, ranks)
        max_in_memory = self._get_deepspeed_size("offload_param.max_in_cpu")
        in_memory = min(max_in_memory, self._updated_elements)
        filled, small_elements = 0, 0
        groups_on_disk: list[list[ParameterEntry]] = []
        for group in self._sub_groups:
            share = self._count_shard_elements(group)
            if filled + share > in_memory:
                groups_on_disk.append(group)
                small_elements += self._count_shard_elements(
                    [w for w in group if not self._is_parameter_swapped(w)]
                )
            filled += share
        small_elements += self._count_shard_elements(
            [w for w in self._weights if not w.is_trained and not self._is_parameter_swapped(w)]
        )
        # The other sub-groups are written through a buffer, whose size DeepSpeed computes from unsharded
        # parameters.
        largest = max(groups_on_disk, key=self._count_shard_elements, default=[])
        written = sum(buckets.compute_aligned_bytes(w.num_elements, compute) for w in largest)
        return compute * (buffers + in_memory + small_elements) + written

    def _is_parameter_swapped(self, parameter: ParameterEntry) -> bool:
        """Return whether a parameter's shard is large enough to be swapped to a file.

        The limit for its size in the compute dtype is
        :data:`portable.gpu.zero.buckets.MIN_SWAPPED_BYTES`.
        """
        return self._compute_bytes * self._count_shard_elements([parameter]) >= buckets.MIN_SWAPPED_BYTES

    def _compute_disk_bytes(self) -> int:
        """Compute the size of a rank's swap files in bytes. 0 without offloading to NVMe.

        For an optimizer on NVMe, the files contain the fp32 master weights, moments and gradients
        of the swapped sub-groups. Small gradients are not swapped. For parameters on NVMe, the
        files contain the shards of the swapped parameters in the compute dtype.
        """
        disk_bytes = 0
        for group in self._swapped_sub_groups:
            disk_bytes += int(1 + self._moments_per_element) * buckets.compute_aligned_bytes(
                self._count_shard_elements(group), FP32_BYTES
            )
            gradients = [FP32_BYTES * self._count_shard_elements([parameter]) for parameter in group]
            disk_bytes += sum(size for size in gradients if size >= buckets.MIN_SWAPPED_BYTES)
        if self._parameters_on_disk:
            swapped = [
                self._count_shard_elements([w]) for w in self._weights if self._is_parameter_swapped(w)
            ]
            disk_bytes += sum(buckets.compute_aligned_bytes(share, self._compute_bytes) for share in swapped)
        return disk_bytes

    # -- temporary -----------------------------------------------------------------------------------------

    def _compute_pass_memory(self) -> PassMemory:
        """Compute the memory for buffers, gathered parameters and unreduced gradients in a backward pass."""
        bucket = self._get_deepspeed_size("reduce_bucket_size")
        compute = self._compute_bytes
        fp32_copy_bytes = 0 if compute == FP32_BYTES else FP32_BYTES
        largest_layer_gradient = max((w.num_elements for w in self._trained if not w.is_embedding), default=0)
        if self._stage < 3:
            buffer = compute * bucket
            if self._optimizer_on_host:
                buffer += compute * self._largest_gradient
            # A gradient that is larger than the bucket is reduced separately, in an fp32 copy.
            layers = (
                buffer
                + fp32_copy_bytes * min(bucket, self._trained_elements)
                + (compute + fp32_copy_bytes) * self._get_unbucketed_elements(largest_layer_gradient)
            )
            share_copy = compute * self._updated_elements  # a copy of this rank's share after the reduction
            return PassMemory(
                buffer,
                layers,
                buffer
                + share_copy
                + (compute + fp32_copy_bytes) * self._get_unbucketed_elements(self._largest_gradient),
            )
        threshold = self._get_deepspeed_size("stage3_param_persistence_threshold")
        persistent = sum(w.num_elements for w in self._weights if w.num_elements <= threshold)
        gathered_elements = self._total_elements - persistent
        # Swapped parameters do not stay gathered, because they are released after each use.
        max_live_elements = (
            0 if self._parameters_on_disk else self._get_deepspeed_size("stage3_max_live_parameters")
        )
        live_elements = min(gathered_elements, max(max_live_elements, self._largest_parameter))
        # Parameters are prefetched into one flat buffer, and then copied out of it.
        prefetch_elements = min(
            gathered_elements,
            max(self._get_deepspeed_size("stage3_prefetch_bucket_size"), self._largest_parameter),
        )
        bytes_before_layers = FP32_BYTES * bucket + compute * (persistent + live_elements)
        layers = bytes_before_layers + (compute + 2 * FP32_BYTES) * self._get_unbucketed_elements(
            largest_layer_gradient
        )
        if gathered_elements > live_elements:  # gathering continues during the pass
            bytes_before_layers, layers = (
                bytes_before_layers + compute * prefetch_elements,
                layers + compute * prefetch_elements,
            )
        end_gradient_bytes = (compute + 2 * FP32_BYTES) * self._get_unbucketed_elements(
            self._largest_gradient
        )
        at_end = (
            FP32_BYTES * bucket
            + compute * (persistent + live_elements)
            + max(compute * prefetch_elements, end_gradient_bytes)
        )
        return PassMemory(bytes_before_layers, layers, at_end)

    def _get_unbucketed_elements(self, elements: int) -> int:
        """Return ``elements`` if a gradient with this size exceeds the bucket size, otherwise 0."""
        return elements if elements > self._get_deepspeed_size("reduce_bucket_size") else 0

    def _compute_update_bytes(self) -> int:
        """Compute the additional device memory in bytes during an optimizer step.

        The memory is mainly for flat fp32 gradients. The result is 0 if the optimizer is
        offloaded. The temporary values of Muon are not included.
        """
        if self._optimizer_on_host:
            return 0
        if self._stage == 1:
            return (
                FP32_BYTES + 2 * self._compute_bytes
            ) * self._updated_elements - self._compute_gradient_bytes()
        if self._stage == 2 and self._compute_bytes != FP32_BYTES:
            return 2 * FP32_BYTES * self._largest_gradient
        if self._stage == 3:
            return FP32_BYTES * max(self._count_shard_elements(group) for group in self._sub_groups)
        return FP32_BYTES * self._updated_elements


def _get_zero_section(config: RunConfig) -> dict[str, Any]:
    """Return the section ``zero_optimization`` of the run's DeepSpeed JSON, without null values.

    The values may be invalid, because the JSON may not have been checked yet. The result is empty
    if the run has no JSON, or if the JSON file has not been read yet.
    """
    document, setting = config.documents.get("deepspeed.config"), config.deepspeed.config
    values = setting if document is None else document.values
    zero = values.get("zero_optimization") if isinstance(values, dict) else None
    return {k: v for k, v in zero.items() if v is not None} if isinstance(zero, dict) else {}
