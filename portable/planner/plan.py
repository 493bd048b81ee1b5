"""Compute the memory of a run under each strategy, and find the best strategy that fits.

Strategies are tried in a fixed order, which begins with the strategies that send the fewest bytes
per step. See docs/planning.md.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import yaml

from portable.checks import check_config
from portable.config.derived_defaults import find_largest_divisor
from portable.errors import UserError
from portable.planner.memory_model import PLACEHOLDER_DISK_PATH, Cluster, Footprint, StrategySetting
from portable.planner.pass_cost import Activations, PassRequest
from portable.registry import load_backend_package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig
    from portable.planner.device import Device
    from portable.planner.meta_model import MetaModel
    from portable.planner.parameter_inventory import ModelInventory

# Position of each combination in the order of strategies. Lower positions are preferred, because they cost
# less communication. DDP and ZeRO-1 sum gradients once per step, and ZeRO-2 once per micro-batch. Keeping
# gathered parameters (shard_grad_op) adds one gather of the parameters, and sharding them (full_shard, zero3)
# adds two. Links inside a node are fast, so hybrid_shard is preferred to full_shard. Offloading is the last
# resort, because copies to the host are slower than collectives, and a disk is slower than the host.
# Combinations with equal positions cost about the same. Among these, the family of the configured strategy
# (FSDP2 or ZeRO) is preferred.
_ORDER: dict[StrategySetting, int] = {
    StrategySetting("no_shard"): 0,
    StrategySetting("shard_grad_op"): 1,
    StrategySetting("hybrid_shard_zero2"): 1,
    StrategySetting("zero1"): 1,
    StrategySetting("zero2"): 1,
    StrategySetting("hybrid_shard"): 2,
    StrategySetting("full_shard"): 3,
    StrategySetting("zero3"): 3,
    StrategySetting("zero1", "cpu"): 4,
    StrategySetting("zero2", "cpu"): 5,
    StrategySetting("zero3", "none", "cpu"): 6,
    StrategySetting("full_shard", "cpu"): 7,
    StrategySetting("zero3", "cpu"): 7,
    StrategySetting("full_shard", "none", "cpu"): 8,
    StrategySetting("zero3", "cpu", "cpu"): 8,
    StrategySetting("zero3", "nvme"): 9,
    StrategySetting("zero3", "nvme", "nvme"): 10,
}
_ORDERED_SETTINGS = list(_ORDER)
_LAST_POSITION = 11


@dataclass(frozen=True)
class PlanTarget:
    """Backend and devices that a run is planned for."""

    backend: str
    """Name of the backend, such as ``cuda``."""
    cluster: Cluster
    device: Device | None
    """Type of device. None if it is unknown. In this case, the plan does not determine which options fit."""
    host_memory: int | None
    """Host memory per node in bytes. None if it is unknown."""


class ConfigAndTarget(NamedTuple):
    """Resolved config of a run, and the target (backend and devices) for which it is resolved."""

    config: RunConfig
    target: PlanTarget


@dataclass(frozen=True)
class DeviceBytes:
    """Breakdown of the peak device memory, in bytes, on the rank that needs the most."""

    parameters: int
    gathered: int
    """Size of gathered parameters, communication buffers, and copies of weights at the time of the peak."""
    gradients: int
    optimizer: int
    activations: int

    @property
    def resident(self) -> int:
        """Total size of the parameters, gradients, and optimizer state, in bytes.

        The planner counts the gradients in all phases of a step, although some engines free the
        gradients after each update.
        """
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Peak memory in bytes, which is the sum of all fields."""
        return self.resident + self.gathered + self.activations


@dataclass(frozen=True)
class PlanOption:
    """Combination of settings for a run, and the resources that the run needs with these settings."""

    setting: StrategySetting
    micro_batch: int
    """Value of ``train.micro_batch_size``."""
    recompute: str
    """Value of ``memory.activation_checkpointing``."""
    device_bytes: DeviceBytes
    host_bytes: int
    """Host memory that all ranks of a node need together, in bytes."""
    disk_bytes: int
    """Number of bytes that all ranks of a node need together on its local disk for offloading."""
    checkpoint_bytes: int
    """Size of a checkpoint's tensors in bytes."""
    communication_bytes: int
    """Number of bytes that a device sends per step, either within its node or to other nodes. The
    larger of the two numbers."""
    fits: bool | None
    """Whether the memory of the devices, and of the hosts if it is known, is sufficient.

    None if the memory of the devices is unknown.
    """
    context_parallel_size: int = 1
    """Value of ``context_parallel_size``."""
    expert_parallel_size: int = 1
    """Value of ``expert_parallel_size``."""

    def format_config_yaml(self, config: RunConfig) -> str:
        """Format the settings of this option as YAML lines that the user can copy into the config file.

        ``context_parallel_size`` and ``expert_parallel_size`` are not included.

        Args:
            config: Config of the run, which provides the precision and ``memory.nvme_path``.
        """
        memory = {
            "activation_checkpointing": self.recompute,
            "offload_optimizer": self.setting.offload_optimizer,
            "offload_params": self.setting.offload_params,
        }
        if self.setting.uses_disk:
            memory["nvme_path"] = str(config.memory.nvme_path or PLACEHOLDER_DISK_PATH)
        lines = {
            "strategy": self.setting.strategy,
            "precision": config.precision,
            "train": {"micro_batch_size": self.micro_batch},
            "memory": memory,
        }
        return yaml.safe_dump(lines, sort_keys=False).rstrip()


class Planner:
    """Planner that computes which resources a run needs with each strategy and micro-batch size.

    Footprints and measured activations are cached.

    Args:
        config: Config of the run. Its precision must not be ``auto``. If ``train.micro_batch_size``
            is ``auto``, the planner starts with a size of 1.
        model: Model on the meta device.
        target: Devices to plan for.

    Attributes:
        config: The config, with ``micro_batch`` as its ``train.micro_batch_size``.
        micro_batch: Largest divisor of ``batch_per_group`` that does not exceed the configured
            micro-batch size.
        batch_per_group: Number of sequences that a group of devices processes per step. Under
            context or tensor parallelism, a group consists of the devices that process the same
            sequences. Otherwise, it is a single device.
        model: Inventory of the model's parameters.
        meta_model: Value of the argument ``model``.
    """

    def __init__(self, config: RunConfig, model: MetaModel, target: PlanTarget) -> None:
        self.target = target
        self.model: ModelInventory = model.inventory
        self.meta_model = model
        self._footprint_module = load_backend_package(target.backend).load_footprint()
        groups = target.cluster.devices // config.ranks_together
        share = max(1, config.train.global_batch_size // max(1, groups))
        wanted = config.train.micro_batch_size
        self.micro_batch = find_largest_divisor(share, 1 if wanted == "auto" else wanted)
        self.config = config.replaced({"train.micro_batch_size": self.micro_batch})
        self.batch_per_group = share
        self._footprints: dict[tuple[StrategySetting, int | str, str], Footprint] = {}
        self.failure: str | None = None
        """Reason why activations are estimated with a formula. None if they were measured."""
        self._checkpoint = self.model.compute_checkpoint_bytes(config.train)

    def get_peak_flops(self) -> float | None:
        """Return the peak FLOP/s of a device in the run's precision, as listed in its data sheet.

        Returns None if the device or its peak is unknown.
        """
        device = self.target.device
        return None if device is None else dict(device.peak_flops_by_precision).get(self.config.precision)

    def compute_max_tokens_per_second(self) -> float | None:
        """Compute an upper bound on the throughput, assuming that all devices reach their peak FLOP/s.

        Returns None if the peak is unknown.
        """
        peak = self.get_peak_flops()
        return None if peak is None else peak * self.target.cluster.devices / self.meta_model.flops_per_token

    # -- one option ----------------------------------------------------------------------------------------

    def build_option(
        self, setting: StrategySetting, *, micro_batch: int | None = None, recompute: str | None = None
    ) -> PlanOption:
        """Compute the resources that the run needs with a combination of settings.

        Args:
            setting: Strategy and offloading.
            micro_batch: Micro-batch size. None for the size in the config.
            recompute: Value of ``memory.activation_checkpointing``. None for the value in the config.

        Raises:
            UserError: If the combination is incompatible with the other settings.
        """
        micro_batch = micro_batch or self.micro_batch
        config = setting.apply_to(self.config).replaced({"train.micro_batch_size": micro_batch})
        if recompute is not None:
            config = config.replaced({"memory.activation_checkpointing": recompute})
        check_config(config)
        recompute = config.memory.activation_checkpointing
        cluster = self.target.cluster
        footprint = self._get_footprint(config)
        working = self._measure_activations(config, footprint, micro_batch)
        device_bytes = _compute_device_bytes(footprint, working)
        ranks = min(cluster.per_node, cluster.devices)
        micro_batches = max(1, self.batch_per_group // micro_batch)
        host = (footprint.host + working.host_bytes) * ranks
        device = self.target.device
        fits: bool | None = None
        if device is not None:
            fits = device_bytes.total <= device.compute_usable_bytes(cluster.devices)
            if self.target.host_memory is not None:
                fits = fits and host <= self.target.host_memory
        exchanged = self.meta_model.compute_context_parallel_traffic(config, cluster)
        links, network = (
            traffic.compute_step_bytes(micro_batches) + more * micro_batches
            for traffic, more in zip((footprint.links, footprint.network), exchanged, strict=True)
        )
        saved = self._checkpoint + footprint.also_saved
        disk = footprint.disk * ranks
        return PlanOption(
            setting,
            micro_batch,
            recompute,
            device_bytes,
            host_bytes=host,
            disk_bytes=disk,
            checkpoint_bytes=saved,
            communication_bytes=int(max(links, network)),
            fits=fits,
            context_parallel_size=config.context_parallel_size,
            expert_parallel_size=config.expert_parallel_size,
        )

    def _get_footprint(self, config: RunConfig) -> Footprint:
        """Compute the footprint of the engine for a config. Results are cached.

        ``config`` must be equal to the planner's config, except for the strategy, offloading,
        micro-batch size and recomputation. The cache key contains only these settings.
        """
        key = (
            StrategySetting.from_config(config),
            config.train.micro_batch_size,
            config.memory.activation_checkpointing,
        )
        if key not in self._footprints:
            self._footprints[key] = self._footprint_module.compute_footprint(
                self.model, config, self.target.cluster
            )
        return self._footprints[key]

    def _measure_activations(self, config: RunConfig, footprint: Footprint, micro_batch: int) -> Activations:
        """Measure the activation memory for a config, or estimate it if the model cannot be run.

        The estimate uses a formula. In this case, the reason is stored in ``self.failure``.

        Args:
            config: Config of the run.
            footprint: Memory and communication estimate for ``config``. It determines the compute
                mode and the compiler of the measured pass.
            micro_batch: Micro-batch size.
        """
        request = PassRequest.from_config(
            config,
            micro_batch=micro_batch,
            compute=footprint.compute,
            on_gpu=load_backend_package(self.target.backend).runs_cuda,
            compiler=footprint.compiler,
        )
        activations = self.meta_model.measure_activations(request)
        self.failure = activations.failure or self.failure
        return activations

    # -- all of them ---------------------------------------------------------------------------------------

    def build_options(self, *, offloading: bool = True) -> list[PlanOption]:
        """Compute a memory plan for each supported combination of strategy and offloading.

        Such a plan is called an option. All other settings, such as the micro-batch size, have the
        values in the config. Combinations that are incompatible with the other settings are
        omitted. The configured combination is considered even if the backend does not list it.

        Args:
            offloading: Whether to include combinations with offloading. If False, the result also
                omits strategies that do not fit even with micro-batches of one sample and full
                recomputation. This saves time, but the device of the target must be known.

        Returns:
            First the options that fit or may fit, and then the options that do not fit. Within each
            part, the planner's preferred strategies come first.

        Raises:
            UserError: If the configured combination is incompatible with the other settings.
        """
        configured = StrategySetting.from_config(self.config)
        settings = list(self._footprint_module.iter_settings(self.config, self.target.cluster))
        if configured not in settings:
            settings.append(configured)
        options = []
        for setting in sorted(settings, key=self._compute_order_key):
            try:
                if offloading or (not setting.offload_targets and self._can_fit_without_offloading(setting)):
                    options.append(self.build_option(setting))
            except UserError:
                if setting == configured:
                    raise
        return sorted(options, key=lambda option: option.fits is False)

    @staticmethod
    def get_order_position(setting: StrategySetting) -> int:
        """Return the position of a strategy, with its offloading, in the order of preference.

        Position 0 is the most preferred. Combinations of strategy and offloading that cost about
        the same have the same position.
        """
        return _ORDER.get(setting, _LAST_POSITION)

    def _compute_order_key(self, setting: StrategySetting) -> tuple[int, bool, int]:
        """Return the key by which combinations of strategy and offloading are sorted.

        Returns:
            Position in the order of preference, whether the strategy's family (FSDP2 or ZeRO)
            differs from the configured family, and a tie-breaker.
        """
        family = setting.strategy.startswith("zero") != self.config.strategy.startswith("zero")
        return (
            self.get_order_position(setting),
            family,
            _ORDERED_SETTINGS.index(setting) if setting in _ORDER else len(_ORDERED_SETTINGS),
        )

    def comes_before(self, option: PlanOption, other: PlanOption) -> bool:
        """Return whether the planner prefers the strategy of ``option`` to the strategy of ``other``.

        The order of preference takes the offloading of both options into account, but not whether
        they fit into memory.
        """
        return self._compute_order_key(option.setting) < self._compute_order_key(other.setting)

    def describe_next_setting(self, setting: StrategySetting) -> str | None:
        """Describe the combination of strategy and offloading to try if ``setting`` does not fit.

        This is the next combination of the same family (FSDP2 or ZeRO) in the order of preference that
        is compatible with the other settings.

        Args:
            setting: Combination that does not fit.

        Returns:
            Text such as ``strategy zero2 with memory.offload_optimizer cpu``. None if no
            combination follows.
        """
        later = [
            s
            for s in self._footprint_module.iter_settings(self.config, self.target.cluster)
            if self._compute_order_key(s) > self._compute_order_key(setting)
            and self._compute_order_key(s)[1] == self._compute_order_key(setting)[1]
            and self._is_compatible(s)
        ]
        if not later:
            return None
        next_setting = min(later, key=self._compute_order_key)
        moved = [f"memory.offload_{part} {place}" for part, place in next_setting.offload_targets.items()]
        return f"strategy {next_setting.strategy}" + (f" with {' and '.join(moved)}" if moved else "")

    def _is_compatible(self, setting: StrategySetting) -> bool:
        """Return whether a combination of strategy and offloading is compatible with the other settings."""
        try:
            check_config(setting.apply_to(self.config))
        except UserError:
            return False
        return True

    def find_best_option(self, options: list[PlanOption]) -> PlanOption | None:
        """Find the option that fits and is expected to be the fastest.

        The options are examined in four groups, and the first option that fits is returned:

        1. Without offloading, with the config's micro-batch size and recomputation.
        2. Without offloading, with smaller micro-batches. More accumulation costs little.
        3. Without offloading, with full recomputation, which costs a third more computation.
        4. With offloading and full recomputation.

        Within each group, the strategies are in their order of preference. Groups 3 and 4 try the
        config's micro-batch size first, and then smaller micro-batches.

        Args:
            options: Result of ``build_options``.

        Returns:
            The option. None if no option fits or if the device memory is unknown.
        """
        if self.target.device is None:
            return None
        for candidate in self._iter_candidates(options):
            if candidate.fits:
                return candidate
        return None

    def _iter_candidates(self, options: list[PlanOption]) -> Iterator[PlanOption]:
        """Yield options in the order in which ``find_best_option`` tries them.

        Strategies whose training state does not fit are omitted.

        Args:
            options: Result of ``build_options``.
        """
        ordered = sorted(
            (option for option in options if self._has_room_for_state(option.setting)),
            key=lambda option: self._compute_order_key(option.setting),
        )
        plain = [
            o for o in ordered if (o.setting.offload_optimizer, o.setting.offload_params) == ("none",) * 2
        ]
        offloaded = [o for o in ordered if o not in plain]
        yield from plain
        sizes = self._list_smaller_micro_batches()
        for option in plain:
            yield from self._iter_largest_fitting(option.setting, sizes, None)
        if self.config.memory.activation_checkpointing != "full":
            for option in plain:
                yield from self._iter_largest_fitting(option.setting, [self.micro_batch, *sizes], "full")
        for option in offloaded:
            yield from self._iter_largest_fitting(option.setting, [self.micro_batch, *sizes], "full")

    def _has_room_for_state(self, setting: StrategySetting) -> bool:
        """Return whether parameters, gradients and optimizer state fit on the devices and hosts.

        Their size does not depend on the micro-batch size or on recomputation.
        """
        target, footprint = self.target, self._get_footprint(setting.apply_to(self.config))
        assert target.device is not None
        resident = footprint.parameters + footprint.gradients + footprint.optimizer
        host = footprint.host * min(target.cluster.per_node, target.cluster.devices)
        return resident <= target.device.compute_usable_bytes(target.cluster.devices) and (
            target.host_memory is None or host <= target.host_memory
        )

    def _can_fit_without_offloading(self, setting: StrategySetting) -> bool:
        """Return whether the run fits with a micro-batch of one sample and full recomputation.

        Args:
            setting: Strategy without offloading.
        """
        return self._has_room_for_state(setting) and bool(
            self.build_option(setting, micro_batch=1, recompute="full").fits
        )

    def compute_min_device_bytes(self) -> int:
        """Compute the minimum device memory in bytes that the run needs without offloading.

        This is the minimum over all strategies that the backend lists and that are compatible with
        the config, with micro-batches of one sequence and full recomputation.
        """
        sizes = []
        for setting in self._footprint_module.iter_settings(self.config, self.target.cluster):
            if not setting.offload_targets:
                with suppress(UserError):  # the strategy contradicts another setting
                    sizes.append(
                        self.build_option(setting, micro_batch=1, recompute="full").device_bytes.total
                    )
        return min(sizes)

    def _iter_largest_fitting(
        self, setting: StrategySetting, sizes: list[int], recompute: str | None
    ) -> Iterator[PlanOption]:
        """Yield the option with the largest micro-batch size that fits. Yields nothing if no size fits.

        Args:
            setting: Strategy and offloading.
            sizes: Micro-batch sizes to try, in descending order. The smallest size is tried first: if it
                does not fit, no size does.
            recompute: Value of ``memory.activation_checkpointing``. None for the value in the config.
        """
        if sizes and self.build_option(setting, micro_batch=sizes[-1], recompute=recompute).fits:
            options = (self.build_option(setting, micro_batch=size, recompute=recompute) for size in sizes)
            yield next(option for option in options if option.fits)

    def _list_smaller_micro_batches(self) -> list[int]:
        """Return one or two micro-batch sizes that are smaller than the configured size, in descending order.

        One size is 1. The other is the largest divisor of ``batch_per_group`` that does not exceed half of
        the configured size. The list is empty if the configured size is 1, or if ``train.fused_backward``
        needs a single micro-batch.
        """
        if self.micro_batch == 1 or self.config.train.fused_backward:
            return []
        half = find_largest_divisor(self.batch_per_group, max(1, self.micro_batch // 2))
        return list(dict.fromkeys([half, 1]))

    # -- micro-batches -------------------------------------------------------------------------------------

    def find_largest_micro_batch(self, sizes: list[int]) -> int | None:
        """Find the largest micro-batch size that fits with the configured strategy, by binary search.

        Args:
            sizes: Micro-batch sizes in ascending order.

        Returns:
            The size. None if no size fits or if the device memory is unknown.

        Raises:
            UserError: If the configured strategy is incompatible with the other settings.
        """
        if self.target.device is None:
            return None
        configured = StrategySetting.from_config(self.config)
        good, bad = -1, len(sizes)  # Indices of a size that fits and of a size that does not fit
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.build_option(configured, micro_batch=sizes[middle]).fits:
                good = middle
            else:
                bad = middle
        return None if good < 0 else sizes[good]


def _compute_device_bytes(footprint: Footprint, working: Activations) -> DeviceBytes:
    """Compute the peak memory of a device.

    The peak is the maximum over four phases of a step:

    * the forward pass, and the backward pass until it reaches the layers
    * the backward pass of the layers
    * the end of the backward pass, when the activations have been freed
    * the optimizer update

    All gradients are assumed to be in memory in each phase, which is true from the second
    micro-batch of a step on. In a step with only one micro-batch, gradients appear while
    activations are freed, so the actual peak is lower.

    Args:
        footprint: Memory of the engine, without activations.
        working: Peak activation memory, before and after the backward pass reaches the layers.
    """
    before, layers = working.before_layers, working.in_layers
    moments = [
        (footprint.gathered + before.copy_bytes, before.work_bytes),
        (footprint.in_layers + layers.copy_bytes, layers.work_bytes),
        (max(footprint.at_end, footprint.in_update), 0),
    ]
    gathered, work = max(moments, key=sum)
    return DeviceBytes(footprint.parameters, gathered, footprint.gradients, footprint.optimizer, work)
