"""Plan of a run, with functions that format it as text and JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.derived_defaults import find_largest_divisor
from portable.formatting import format_bytes, format_columns, format_count, format_table
from portable.planner.run_time import estimate_run_hours
from portable.planner.savings import is_result_changed
from portable.registry import load_backend_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.planner.plan import Planner, PlanOption
    from portable.planner.run_time import EstimateRange, TrainingWork

_TEXT_COLUMNS = ("strategy", "offload", "recompute")
_MEMORY_COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "activations")
"""Columns that break down the device memory. Only a wide table shows them."""


class LeanOption(NamedTuple):
    """Option that fits without offloading because some settings are changed to save memory.

    Attributes:
        settings: New values of the changed settings, keyed by dotted key. One of the combinations
            that :func:`~portable.planner.savings.list_memory_savings` returns.
        option: Memory plan with these settings.
    """

    settings: dict[str, Any]
    option: PlanOption

    def describe_settings(self) -> str:
        """Describe the settings as text, such as ``memory.offload_activations true``.

        The micro-batch size and recomputation are omitted, because callers read them from the
        attribute ``option``. If the settings change the result of the run, the text ends with a
        note about it.
        """
        shown = [
            f"{key} {'null' if value is None else str(value).lower()}"
            for key, value in self.settings.items()
            if key not in ("train.micro_batch_size", "memory.activation_checkpointing")
        ]
        note = " (changes the result)" if is_result_changed(self.settings) else ""
        return " and ".join(shown) + note


@dataclass(frozen=True)
class Plan:
    """Resources that a run requires on the planned devices, with a recommendation.

    ``str()`` returns the text that ``portable-plan`` prints.

    The options ``lean``, ``adapter`` and ``shared`` change settings so that the run fits without
    offloading. Each of them is None if no such option fits. All three are None if ``best`` already
    fits without offloading, or if the memory of the devices is unknown, because the planner then
    does not search for them.

    Attributes:
        planner: Planner that computed the plan.
        options: One option for each supported combination of strategy and offloading.
        best: Recommended option. None if no option fits, or if the memory of the devices is
            unknown.
        lean: Option with settings that save memory. See
            :func:`~portable.planner.savings.list_memory_savings`.
        adapter: Option that trains a LoRA adapter. Also None if the config already has an adapter.
        shared: Option with a larger ``context_parallel_size``.
        divided: Option with expert parallelism that fits without offloading. None if no such option
            exists, if the config already has expert parallelism, or if the memory of the devices is
            unknown. Also None if ``best`` fits without offloading and does not communicate more
            bytes.
        work: Number of steps and tokens of the run. None if it is unknown.
        price: Price of a device per hour. None if it is unknown.
    """

    planner: Planner
    options: Sequence[PlanOption]
    best: PlanOption | None
    lean: LeanOption | None = None
    adapter: PlanOption | None = None
    shared: PlanOption | None = None
    divided: PlanOption | None = None
    work: TrainingWork | None = None
    price: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON-compatible dict. Sizes are in bytes."""
        return plan_to_json(self)

    def __str__(self) -> str:
        return format_plan(self)

    @cached_property
    def hours(self) -> EstimateRange | None:
        """Estimated range of the run time in hours with the recommended option.

        None if no option is recommended, if the option uses offloading, or if the number of tokens
        or the peak FLOP/s of the device is unknown.
        """
        return estimate_run_hours(self.planner, self.best, self.work) if self.best and self.work else None

    @cached_property
    def cost(self) -> EstimateRange | None:
        """Estimated range of the cost, in the currency of ``price``. None if hours or price are unknown."""
        if self.hours is None or self.price is None:
            return None
        return self.hours.compute_cost(self.price * self.planner.target.cluster.devices)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Convert a plan to a JSON-compatible dict. Sizes are in bytes, and unknown values are None."""
    planner, target, hours = plan.planner, plan.planner.target, plan.hours
    device, devices = target.device, target.cluster.devices
    reached = device.reached if device and hours else None
    return {
        "model": planner.model.architecture,
        "parameters": planner.model.num_parameters,
        "precision": planner.config.precision,
        "backend": target.backend,
        "device": device and device.name,
        "device_memory": device and device.memory_bytes,
        "usable_memory": device and device.compute_usable_bytes(devices),
        "devices": devices,
        "host_memory": target.host_memory,
        "activations_estimated": planner.failure,
        "most_tokens_per_second": planner.compute_max_tokens_per_second(),
        "tokens": plan.work and plan.work.tokens,
        "hours": hours and [hours.least, hours.most],
        "share_of_peak": reached and list(reached.mfu_range),
        "share_of_peak_source": reached and reached.source,
        "cost": plan.cost and [plan.cost.least, plan.cost.most],
        "best": plan.best and _option_to_json(plan.best) | {"reason": explain_choice(plan)},
        "with_savings": plan.lean and {"settings": plan.lean.settings, **_option_to_json(plan.lean.option)},
        "with_adapter": plan.adapter and _option_to_json(plan.adapter),
        "with_shared_sequences": plan.shared and _option_to_json(plan.shared),
        "with_divided_experts": plan.divided and _option_to_json(plan.divided),
        "options": [_option_to_json(option) for option in plan.options],
    }


def _option_to_json(option: PlanOption) -> dict[str, Any]:
    """Convert an option to a JSON-compatible dict. Sizes are in bytes."""
    return {
        **asdict(option.setting),
        "context_parallel_size": option.context_parallel_size,
        "expert_parallel_size": option.expert_parallel_size,
        "micro_batch_size": option.micro_batch,
        "activation_checkpointing": option.recompute,
        "device_bytes": {**asdict(option.device_bytes), "total": option.device_bytes.total},
        "host_bytes": option.host_bytes,
        "disk_bytes": option.disk_bytes,
        "checkpoint_bytes": option.checkpoint_bytes,
        "communication_bytes": option.communication_bytes,
        "fits": option.fits,
    }


def format_plan(plan: Plan, *, wide: bool = False, width: int = 100) -> str:
    """Format a plan as the text that ``portable-plan`` prints.

    Args:
        plan: Plan to format.
        wide: Whether the table of options includes a breakdown of the device memory.
        width: Maximum line width in characters. Lines of the table of options may be wider.
    """
    planner, best = plan.planner, plan.best
    device, cluster = planner.target.device, planner.target.cluster
    devices_text = format_count(cluster.devices, "device")
    if device is not None:
        devices_text = f"{cluster.devices} x {device.name}, {format_bytes(device.memory_bytes)} each"
    size = planner.config.ranks_together
    group = "device" if size == 1 else f"{size} devices"
    rows = [
        ("model", f"{planner.model.architecture}, {planner.model.num_parameters:,} parameters"),
        ("devices", devices_text),
        (
            "batch",
            f"micro-batches of {planner.micro_batch} x {planner.config.data.seq_len} tokens, "
            f"{format_count(planner.batch_per_group, 'sequence')} per step and {group}; "
            f"{planner.config.precision}",
        ),
        ("a checkpoint", format_bytes(min(option.checkpoint_bytes for option in plan.options))),
    ]
    if (peak := planner.get_peak_flops()) and (most := planner.compute_max_tokens_per_second()):
        each = f"{cluster.devices} x {peak / 1e12:,.0f} TFLOP/s"
        rounded = float(f"{most:.3g}")
        rows.append(("tokens/s", f"at most {rounded:,.0f}, at the peak of {each} in the data sheet"))
    parts = [format_table(rows + build_time_rows(plan), width)]
    if planner.failure is not None:
        note = (
            "note: the memory of activations is estimated with a formula, because the model could not be "
            f"run without data ({planner.failure})"
        )
        parts.append(wrap_text(note, width))
    if device is not None:
        parts.append(wrap_text(explain_choice(plan), width))
    if best is not None:
        parts.append(best.format_config_yaml(planner.config))
    parts.append(format_option_table(plan, wide=wide))
    if best is not None:
        parts.append(wrap_text("* recommended; the row shows the settings that the run would use", width))
    if device is None:
        advice = (
            "specify a device to see which options fit: --device h100, --device v5e, or --device-memory 80GB"
        )
        parts.append(wrap_text(advice, width))
    return "\n\n".join(parts)


def build_time_rows(plan: Plan) -> list[tuple[str, str]]:
    """Build table rows for the time and the cost of the run.

    Returns:
        Pairs of a name and a description. Empty if the time is unknown. The cost is omitted if the
        price is unknown.
    """
    device, work = plan.planner.target.device, plan.work
    if device is None or work is None or plan.hours is None:
        return []
    low, high = device.reached.mfu_range
    bound = "at most " if work.is_upper_bound else ""
    share = f"{low:.0%} to {high:.0%} of the peak ({device.reached.source})"
    rows = [("time", f"{plan.hours.format_time(bound)} for {bound}{work.tokens:,} tokens: {share}")]
    if plan.cost is not None:
        cost = plan.cost.format_cost(bound)
        rows.append(("cost", f"{cost}, at {plan.price:g} an hour for each device"))
    return rows


def wrap_text(text: str, width: int) -> str:
    """Wrap a string into lines of at most ``width`` characters, without breaking words.

    A word that is longer than ``width`` forms a longer line. Line breaks in ``text`` are kept, and
    blank lines are removed.
    """
    return "\n".join(
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False)
    )


def format_option_table(plan: Plan, *, wide: bool = False) -> str:
    """Format a table with one row per option.

    If there is a best option, its row is first and has a star. The columns for host memory, disk
    space and sent bytes are each omitted if they contain only dashes. Unless ``wide`` is True, the
    columns for recomputation and micro-batch size are each omitted if all options have the config's
    value.

    Args:
        plan: Plan with the options.
        wide: Whether to add a breakdown of the device memory, and to always show the recomputation
            and the micro-batch size.
    """
    planner, best = plan.planner, plan.best
    shown = [*plan.options]
    if best is not None:
        shown = [best, *(option for option in shown if option.setting != best.setting)]
    rows = [
        _format_cells(option, star="" if best is None else "* " if option is best else "  ")
        for option in shown
    ]
    idle = dict.fromkeys(("host", "disk", "sends"), "-")
    if not wide:
        idle["recompute"] = planner.config.memory.activation_checkpointing
        idle["batch"] = str(planner.micro_batch)
    names = [
        name
        for name in rows[0]
        if (wide or name not in _MEMORY_COLUMNS) and any(row[name] != idle.get(name) for row in rows)
    ]
    head = [("  " if best else "") + names[0], *names[1:]]
    lines = [head, *([row[name] for name in names] for row in rows)]
    return format_columns(lines, num_text_columns=len({*names} & {*_TEXT_COLUMNS}))


def _format_cells(option: PlanOption, star: str) -> dict[str, str]:
    """Format the cells of an option's row in the table.

    Args:
        option: Option to format.
        star: Prefix of the strategy name, which marks the best option.

    Returns:
        Text of the cells, keyed by column name.
    """
    size = option.device_bytes
    numbers = {name: getattr(size, name) for name in _MEMORY_COLUMNS}
    numbers |= {"device": size.total, "host": option.host_bytes, "disk": option.disk_bytes}
    numbers["sends"] = option.communication_bytes
    return {
        "strategy": star + option.setting.strategy,
        "offload": format_offloading_cell(option),
        "recompute": option.recompute,
        "batch": str(option.micro_batch),
        **{name: format_bytes(number) if number else "-" for name, number in numbers.items()},
        "fits": {True: "yes", False: "no", None: "?"}[option.fits],
    }


def format_offloading_cell(option: PlanOption) -> str:
    """Format the offloading of an option for a table cell. The result is ``-`` without offloading.

    A target is named only if it is NVMe. For example, ``optimizer+params nvme`` offloads the
    optimizer to CPU memory and the parameters to NVMe. If both have the same target, the result is
    ``all`` or ``all nvme``.
    """
    moved = option.setting.offload_targets
    if len(moved) == 2 and len(set(moved.values())) == 1:
        moved = {"all": next(iter(moved.values()))}
    return "+".join(f"{name} nvme" if place == "nvme" else name for name, place in moved.items()) or "-"


def describe_option(option: PlanOption) -> str:
    """Describe the strategy and offloading of an option, such as ``zero3 with optimizer on the host``."""
    moved = "+".join(option.setting.offload_targets)
    location = "on a disk" if option.setting.uses_disk else "on the host"
    return option.setting.strategy + (f" with {moved} {location}" if moved else "")


def explain_choice(plan: Plan) -> str:
    """Explain in a few sentences why the best option is recommended, and how to save more memory.

    If there is no best option, explain why nothing fits. The text also mentions the plan's options
    that use an adapter, context parallelism, expert parallelism, or settings that save memory.

    Args:
        plan: Plan whose device is known.
    """
    planner, best = plan.planner, plan.best
    device = planner.target.device
    assert device is not None
    usable = device.compute_usable_bytes(planner.target.cluster.devices)
    instead = ""
    others = [("an adapter (adapter.type lora)", plan.adapter)]
    if plan.lean is not None:
        others.insert(0, (plan.lean.describe_settings(), plan.lean.option))
    if plan.shared is not None:
        name = f"context_parallel_size {plan.shared.context_parallel_size}, the smallest that fits"
        others.insert(0, (name, plan.shared))
    if plan.divided is not None:
        name = f"expert_parallel_size {plan.divided.expert_parallel_size}"
        others.insert(0, (name, plan.divided))
    for name, other in others:
        if other is None:
            continue
        instead += f".\nWith {name}, {describe_option(other)} takes {format_bytes(other.device_bytes.total)}"
        if changes := list_changed_settings(planner, other):
            instead += " with " + " and ".join(changes)
        if other is plan.divided:
            instead += f", and a device sends {format_bytes(other.communication_bytes)} per step"
            instead += "" if best is None else f" instead of {format_bytes(best.communication_bytes)}"
    instead += "." if instead else ""
    if best is None:
        least = min(plan.options, key=lambda option: option.device_bytes.total)
        return (
            f"no option fits: the smallest, {describe_option(least)}, needs "
            f"{format_bytes(least.device_bytes.total)} of {format_bytes(usable)} usable memory, mostly for "
            f"{describe_largest_part(least)}, even with micro_batch_size 1 and activation checkpointing; "
            f"{_describe_last_resorts(planner)}{instead}"
        )
    text = (
        f"best: {describe_option(best)}, the first option that fits: "
        f"{format_bytes(best.device_bytes.total)} of {format_bytes(usable)} usable"
    )
    if best.host_bytes:
        text += f", and {format_bytes(best.host_bytes)} of a node's host memory"
    if best.disk_bytes:
        text += f", and {format_bytes(best.disk_bytes)} of its disk"
    before = [
        option for option in plan.options if option.fits is False and planner.comes_before(option, best)
    ]
    if before:
        last = before[-1]
        text += (
            f"; the previous option, {describe_option(last)}, needs {format_bytes(last.device_bytes.total)}, "
            f"mostly for {describe_largest_part(last)}"
        )
    if changes := list_changed_settings(planner, best):
        text += "; the recommended settings include " + " and ".join(changes)
    text += f".\nIf memory runs out: {describe_next_reductions(planner, best)}"
    return text + instead


def list_changed_settings(planner: Planner, option: PlanOption) -> list[str]:
    """Describe how an option differs from the planner's config.

    Only the micro-batch size and activation checkpointing are compared, not strategy and
    offloading.

    Returns:
        A description of each setting that differs, such as
        ``train.micro_batch_size 2 instead of 4``.
    """
    changes = []
    if option.micro_batch != planner.micro_batch:
        changes.append(f"train.micro_batch_size {option.micro_batch} instead of {planner.micro_batch}")
    if option.recompute != planner.config.memory.activation_checkpointing:
        changes.append(f"memory.activation_checkpointing {option.recompute}")
    return changes


def describe_largest_part(option: PlanOption) -> str:
    """Describe the largest part of an option's device memory, such as ``activations (20.0 GiB)``."""
    parts = asdict(option.device_bytes)
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({format_bytes(parts[name])})"


def describe_next_reductions(planner: Planner, option: PlanOption) -> str:
    """Describe the next one or two settings to change if an option runs out of memory.

    The setting to try first comes first, as in ``train.micro_batch_size 2, then strategy zero2``.
    If no such setting is left, describe larger changes to the run, such as more devices or a
    shorter ``data.seq_len``.
    """
    steps = []
    if option.micro_batch > 1 and not planner.config.train.fused_backward:
        smaller_size = find_largest_divisor(planner.batch_per_group, option.micro_batch // 2)
        steps.append(f"train.micro_batch_size {smaller_size}")
    config = option.setting.apply_to(planner.config).replaced(
        {
            "train.micro_batch_size": option.micro_batch,
            "memory.activation_checkpointing": option.recompute,
        }
    )
    following = planner.describe_next_setting(option.setting)
    for remedy in _list_backend_remedies(planner, config):
        if not remedy.startswith(_STRATEGY_REMEDIES):
            steps.append(remedy)
        elif following is not None and following not in steps:
            steps.append(following)
    if following is not None and following not in steps:
        steps.append(following)
    return ", then ".join(steps[:2]) if steps else _describe_last_resorts(planner)


_STRATEGY_REMEDIES = ("strategy", "memory.offload_optimizer", "memory.offload_params")
"""Keys of remedies that the planner replaces by the next combination in the order of strategies."""
_PLANNED_REMEDIES = (
    *_STRATEGY_REMEDIES,
    "memory.activation_checkpointing",
    "memory.offload_activations",
    "train.fused_backward",
    "train.master_dtype",
)
"""Keys of remedies that the planner has tried if no option fits."""


def _list_backend_remedies(planner: Planner, config: RunConfig) -> list[str]:
    """List the backend's suggestions for reducing the device memory of a run with this config.

    Each suggestion is a setting with its new value, such as
    ``memory.activation_checkpointing full``. Another setting that it requires, or a remark, may
    follow.
    """
    package = load_backend_package(planner.target.backend)
    return list(package.iter_memory_remedies(config, planner.target.cluster.devices))


def _describe_last_resorts(planner: Planner) -> str:
    """Suggest changes for a run that does not fit into device memory with any option of the plan.

    The result is a verb phrase, such as ``use more devices or a shorter data.seq_len``.
    """
    remedies = _list_backend_remedies(planner, planner.config)
    more = [remedy for remedy in remedies if not remedy.startswith(_PLANNED_REMEDIES)]
    more += ["more devices", "a shorter data.seq_len"]
    if planner.config.train.optimizer == "adamw":
        more.append("train.optimizer adafactor")
    return "use " + ", ".join(more[:-1]) + " or " + more[-1]
