"""Choose the devices and compute the plan, for ``portable-plan`` and :func:`portable.plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.checks import check_config
from portable.config.rules import uses_zero_strategy
from portable.errors import UserError, require
from portable.planner import device_lookup
from portable.planner.plan import Planner
from portable.planner.plan_tables import LeanOption, Plan
from portable.planner.preparation import build_model_and_work, choose_target, resolve_data_dependent_defaults
from portable.planner.savings import list_memory_savings

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.planner.meta_model import MetaModel
    from portable.planner.plan import ConfigAndTarget, PlanOption, PlanTarget


def resolve_target(
    config: RunConfig,
    *,
    device: str | None = None,
    devices: int = 1,
    device_memory: str | None = None,
    host_memory: str | None = None,
    notes: bool = True,
) -> ConfigAndTarget:
    """Convert the options of ``portable-plan`` to a target, and resolve the config for this target.

    Args:
        config: Config of the run.
        device: Name of the accelerator, such as ``h100``. None if it is unknown.
        devices: Number of devices.
        device_memory: Memory per device, such as ``80GB``. None for the memory of ``device``. If only
            this argument is set, the target is a device with this memory and otherwise typical
            properties.
        host_memory: Memory per node, such as ``512GB``. None if it is unknown.
        notes: Whether to print the backend's notes about the config.

    Returns:
        The config with the backend of the target and a precision that is not ``auto``, and the
        target. The device of the target is None if neither ``device`` nor ``device_memory`` is set.

    Raises:
        UserError: If the device is unknown, if a size is not valid, if the config specifies another
            backend, if the batch cannot be divided among the devices, or if a setting has no effect
            on the backend.
    """
    memory = None if device_memory is None else device_lookup.parse_bytes(device_memory, "--device-memory")
    host = None if host_memory is None else device_lookup.parse_bytes(host_memory, "--host-memory")
    target_device = None
    if device is not None:
        target_device = device_lookup.find_device(device)
    elif memory is not None:
        target_device = device_lookup.build_generic_device(config.backend)
    if target_device is not None and memory is not None:
        target_device = target_device.with_memory(memory)
    return choose_target(config, target_device, devices, host, notes=notes)


def build_plan(config: RunConfig, target: PlanTarget, prices: dict[str, float] | None = None) -> Plan:
    """Compute the resources that a run requires under each strategy, and recommend an option.

    An option is a strategy with a choice of offloading. If the run does not fit without offloading,
    this function also searches for other ways to save memory: changed settings, a LoRA adapter, and
    context parallelism. For a mixture of experts without expert parallelism, it searches for a
    choice of expert parallelism even if the run fits. If the memory of the devices is unknown, it
    computes only the required resources, without any search.

    Args:
        config: Validated config of the run. Its backend is the backend of the target.
        target: Devices to plan for.
        prices: Hourly price of each device, keyed by device name. None if prices are unknown.

    Returns:
        The plan. Its ``best`` option is None if no option fits, or if the memory of the devices is
        unknown.

    Raises:
        UserError: If the run is not possible on the target, or if ``prices`` has no entry for the
            planned device.
    """
    config = resolve_data_dependent_defaults(config)
    model, work = build_model_and_work(config)
    planner = Planner(config, model, target)
    price = None if target.device is None or prices is None else prices.get(target.device.name)
    require(
        price is not None or not prices,
        "--price-per-hour: contains no price for the planned device; specify the device and its price, such "
        "as --device h100 --price-per-hour h100=2.50",
    )
    options = planner.build_options()
    best = planner.find_best_option(options)
    searches = target.device is not None and not _fits_without_offloading(best)
    lean = find_lean_option(planner) if searches else None
    adapter = _find_option_with_adapter(planner) if searches else None
    shared = _find_option_with_shared_sequences(planner) if searches else None
    divided = _find_option_with_divided_experts(planner, best) if target.device is not None else None
    return Plan(planner, options, best, lean, adapter, shared, divided, work, price)


def _fits_without_offloading(option: PlanOption | None) -> bool:
    """Return whether an option was found that does not use offloading.

    Args:
        option: Option with which the run fits. None if no option fits.
    """
    return option is not None and not option.setting.offload_targets


def find_lean_option(planner: Planner) -> LeanOption | None:
    """Find the first memory-saving settings with which the run fits without offloading.

    The settings are tried in the order of :func:`list_memory_savings`.

    Args:
        planner: Planner of a config that does not fit without offloading.

    Returns:
        The settings, and the best option with them. None if no settings are sufficient.
    """
    for settings in list_memory_savings(planner.config, planner.target.cluster.devices):
        # The dtype of the weights is part of the model.
        model = None if "train.master_dtype" in settings else planner.meta_model
        option = _find_option_with_settings(planner, settings, model)
        if option is not None:
            return LeanOption(settings, option)
    return None


def _find_option_with_adapter(planner: Planner) -> PlanOption | None:
    """Find an option that trains only a LoRA adapter, so that the run fits without offloading.

    Returns:
        The option. None if no such option fits, if the config already has an adapter, or if an
        adapter is incompatible with the config's other settings.
    """
    if planner.config.adapter.type is not None:
        return None
    return _find_option_with_settings(planner, {"adapter.type": "lora"})


def _find_option_with_shared_sequences(planner: Planner) -> PlanOption | None:
    """Find an option with more context parallelism that fits without offloading.

    The function tries each ``context_parallel_size`` that is larger than the config's value and
    divides the number of devices. It stops at the smallest size that fits.

    Returns:
        The option that the planner prefers for this size. None if no size fits.
    """
    devices = planner.target.cluster.devices
    for size in range(planner.config.context_parallel_size + 1, devices + 1):
        if devices % size == 0:
            option = _find_option_with_settings(planner, {"context_parallel_size": size}, planner.meta_model)
            if option is not None:
                return option
    return None


def _find_option_with_divided_experts(planner: Planner, best: PlanOption | None) -> PlanOption | None:
    """Find the expert-parallel option that sends the fewest bytes, if it is better than ``best``.

    Only options that fit without offloading are considered. Their ``expert_parallel_size`` divides
    the number of devices, and is at most the number of devices in a node. The options have the
    strategy of the config, or ``full_shard`` if the config has ``no_shard`` or a ZeRO strategy.

    Args:
        planner: Planner of the config.
        best: Recommended option of the config. None if no option fits.

    Returns:
        The option. None in these cases:

        - The model has no experts.
        - The config already has expert parallelism.
        - No expert-parallel option fits without offloading.
        - ``best`` fits without offloading, and sends at most as much as the option.
    """
    config, cluster = planner.config, planner.target.cluster
    if config.expert_parallel_size > 1 or not planner.model.num_mixture_layers:
        return None
    is_fsdp = config.strategy != "no_shard" and not uses_zero_strategy(config)
    strategy = config.strategy if is_fsdp else "full_shard"
    options = [
        _find_option_with_settings(
            planner, {"expert_parallel_size": size, "strategy": strategy}, planner.meta_model
        )
        for size in range(2, min(cluster.per_node, cluster.devices) + 1)
        if cluster.devices % size == 0
    ]
    fitting = [option for option in options if option is not None]
    option = min(fitting, key=lambda option: option.communication_bytes, default=None)
    if option is None or not _fits_without_offloading(best):
        return option
    assert best is not None
    return option if option.communication_bytes < best.communication_bytes else None


def _find_option_with_settings(
    planner: Planner, settings: dict[str, Any], model: MetaModel | None = None
) -> PlanOption | None:
    """Find the best option for the config with some settings changed.

    Args:
        planner: Planner of the unchanged config.
        settings: New values, keyed by setting.
        model: Model of ``planner``. Pass it only if the settings do not change the model. None to
            build the model from the changed config.

    Returns:
        The option. None if no option fits without offloading, or if the changed settings are not
        supported.
    """
    try:
        config = planner.config.replaced(settings)
        check_config(config)
        if model is None:
            model = build_model_and_work(config).model
        else:
            model.check_parallel_sizes(config)
        changed_planner = Planner(config, model, planner.target)
        best = changed_planner.find_best_option(changed_planner.build_options(offloading=False))
    except UserError:  # the changed settings are not supported
        return None
    return best if _fits_without_offloading(best) else None
