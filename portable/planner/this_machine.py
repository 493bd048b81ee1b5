"""Plan the memory of a run for the machine on which it is started."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from portable.formatting import format_bytes
from portable.planner import device_lookup as devices
from portable.planner.build_plan import find_lean_option
from portable.planner.memory_model import Cluster, StrategySetting
from portable.planner.meta_model import MetaModel
from portable.planner.plan import Planner, PlanTarget
from portable.planner.plan_tables import describe_option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from portable.backend import Backend
    from portable.batch import Batch
    from portable.config import RunConfig


def build_planner_for_backend(
    config: RunConfig,
    model: PreTrainedModel,
    backend: Backend,
    ranks: int = 1,
    image_columns: Batch | None = None,
) -> Planner:
    """Build a planner for the devices of this run's backend.

    The device memory is queried from the driver. Without a driver, the planner has no device, and
    its plan does not determine which options fit. The host memory is not queried, so an option with
    offloading may need more host memory than the machine has.

    Args:
        config: Resolved config of the run.
        model: Model on the meta device.
        backend: Backend of this process.
        ranks: Number of ranks that this process will start. 1 if the process itself is a rank.
        image_columns: Batch columns with images. See :class:`MetaModel`.
    """
    count = max(ranks, backend.world_size) * backend.devices_per_rank
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks))) * backend.devices_per_rank
    memory = backend.diagnostics.query_driver_memory()
    device = None
    if memory is not None:
        peak = backend.get_peak_flops(config.precision)
        peaks = () if peak is None else ((config.precision, peak),)
        typical = devices.build_generic_device(backend.name)
        device = replace(
            typical, memory_bytes=memory.total_bytes, devices_per_node=per_node, peak_flops_by_precision=peaks
        )
    target = PlanTarget(backend.name, Cluster(count, per_node), device, None)
    return Planner(config, MetaModel(model, config, image_columns), target)


def build_memory_table_rows(planner: Planner) -> list[tuple[str, str]]:
    """Build table rows for the memory that the run needs with its configured settings.

    Returns:
        Pairs of a name and a description. The row ``fits`` is omitted if the device memory is
        unknown. Rows about host memory and disk are each omitted if the run needs 0 bytes.
    """
    option = planner.build_option(StrategySetting.from_config(planner.config))
    size = option.device_bytes
    parts = ("parameters", "gathered", "gradients", "optimizer", "activations")
    sizes = ", ".join(f"{name} {format_bytes(getattr(size, name))}" for name in parts)
    rows = [("memory, planned", f"{format_bytes(size.total)} on each device: {sizes}")]
    if option.fits is not None:
        assert planner.target.device is not None
        usable = planner.target.device.compute_usable_bytes(planner.target.cluster.devices)
        rows.append(("fits", f"{'yes' if option.fits else 'no'} ({format_bytes(usable)} are usable)"))
    if option.host_bytes:
        rows.append(("host memory", f"{format_bytes(option.host_bytes)} on each node"))
    if option.disk_bytes:
        rows.append(("disk", f"{format_bytes(option.disk_bytes)} on each node, for offloading"))
    return rows


def describe_best_fit(planner: Planner) -> str | None:
    """Describe the best option that fits, as a suggestion for the user.

    If no option fits without offloading the optimizer or the parameters, settings that save memory
    are tried next. An option that offloads the optimizer or the parameters is only suggested if
    these settings are not sufficient.

    Returns:
        Text with the settings of the option and its device memory. None if the config already has
        these settings, if nothing fits, or if the device memory is unknown.

    Raises:
        UserError: If the configured strategy is incompatible with the other settings.
    """
    best, more = planner.find_best_option(planner.build_options()), ""
    if planner.target.device is not None and (best is None or best.setting.offload_targets):
        lean = find_lean_option(planner)
        if lean is not None:
            best, more = lean.option, f"{lean.describe_settings()}, "
    configured = (
        StrategySetting.from_config(planner.config),
        planner.micro_batch,
        planner.config.memory.activation_checkpointing,
    )
    if best is None or (not more and (best.setting, best.micro_batch, best.recompute) == configured):
        return None
    assert planner.target.device is not None
    usable = planner.target.device.compute_usable_bytes(planner.target.cluster.devices)
    return (
        f"{describe_option(best)}, {more}train.micro_batch_size {best.micro_batch} and "
        f"memory.activation_checkpointing {best.recompute} ({format_bytes(best.device_bytes.total)} of "
        f"{format_bytes(usable)})"
    )
