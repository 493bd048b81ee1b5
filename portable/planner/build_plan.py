"""Choose the devices and compute the plan, for ``portable-plan`` and :func:`portable.plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.checks import check_config
from portable.config.rules import uses_zero_strategy
from portable.errors import UserError, require
from portable.planner import device_lookup
from portable.planner.plan import Planner
from portable.planner.plan_tables import Plan
from portable.planner.preparation import build_model_and_work, choose_target, resolve_data_dependent_defaults

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
        The config with the backend of the target, and the target. The device of the target is None if
        neither ``device`` nor ``device_memory`` is set.

    Raises:
        UserError: If the device is unknown, a size is not valid, or the config specifies another
            backend.
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
    """Compute the resources that a run requires on a target under each strategy, and recommend an option.

    If the run does not fit without offloading, options with an adapter and with context parallelism are
    searched as well. For a mixture of experts, options with expert parallelism are always searched.

    Args:
        config: Config of the run, checked, with the backend of the target.
        target: Devices to plan for.
        prices: Price of a device for an hour, keyed by the name of the device.

    Returns:
        The plan. Its ``best`` option is None if no option fits, or if the memory of the devices is unknown.

    Raises:
        UserError: If the config is not possible on the target, or if ``prices`` lacks the device.
    """
    config = resolve_data_dependent_defaults(config)
    model, work = build_model_and_work(config)
    planner = Planner(config, model, target)
    price = None if target.device is None or prices is None else prices.get(target.device.name)
    require(
        price is not None or not prices,
        "--price-per-hour: has no price for the planned device; specify both: --device h100 "
        "--price-per-hour h100=2.50",
    )
    options = planner.build_options()
    best = planner.find_best_option(options)
    searches = target.device is not None and not _fits_without_offloading(best)
    adapter = _find_option_with_adapter(planner) if searches else None
    shared = _find_option_with_shared_sequences(planner) if searches else None
    divided = _find_option_with_divided_experts(planner, best) if target.device is not None else None
    return Plan(planner, options, best, adapter, shared, divided, work, price)


def _fits_without_offloading(option: PlanOption | None) -> bool:
    """Return whether an option that fits was found and does not use offloading.

    Args:
        option: Option that fits, or None if no option fits.
    """
    return option is not None and not option.setting.offload_targets


def _find_option_with_adapter(planner: Planner) -> PlanOption | None:
    """Find an option that fits by training a LoRA adapter instead of all weights.

    Returns:
        The option. None if no such option fits without offloading, if the config already has an
        adapter, or if an adapter is incompatible with its other settings.
    """
    if planner.config.adapter.type is not None:
        return None
    return _find_option_with_settings(planner, {"adapter.type": "lora"})


def _find_option_with_shared_sequences(planner: Planner) -> PlanOption | None:
    """Find an option that fits with context parallelism, with the smallest ``context_parallel_size``.

    Returns:
        The option. None if no size larger than the config's fits without offloading.
    """
    devices = planner.target.cluster.devices
    for size in range(planner.config.context_parallel_size + 1, devices + 1):
        if devices % size == 0:
            option = _find_option_with_settings(planner, {"context_parallel_size": size}, planner.meta_model)
            if option is not None:
                return option
    return None


def _find_option_with_divided_experts(planner: Planner, best: PlanOption | None) -> PlanOption | None:
    """Find the option with expert parallelism within a node that sends the fewest bytes.

    Args:
        planner: Planner of the config.
        best: Recommended option of the config, if any.

    Returns:
        The option. None if no option fits without offloading, if ``best`` fits without offloading and sends
        fewer bytes, or if the config already has expert parallelism.
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
        model: Model of the planner, to reuse it if the settings do not change the model. None to build
            the model again.

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
