"""A plan as text and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.formatting import human_bytes, human_count, table
from portable.planner.hours import hours_of, rounded
from portable.registry import backend_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.planner.hours import Work
    from portable.planner.plan import Option, Planner

_TEXT = ("strategy", "offload", "recompute")
_PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations")
"""The columns of device memory, in a wide table only."""
_BYTES = ("device", "host", "disk", "sends")


class Shared(NamedTuple):
    """What fits where ``size`` devices share each sequence, and nothing does where fewer do."""

    size: int
    option: Option


def as_json(
    planner: Planner,
    options: Sequence[Option],
    best: Option | None,
    adapter: Option | None = None,
    shared: Shared | None = None,
    work: Work | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """The plan for programs; sizes in bytes. The arguments are those of :func:`as_text`."""
    why = reason(planner, options, best, adapter, shared) if best is not None else None
    target = planner.target
    device = target.device
    hours = None if best is None or work is None else hours_of(planner, best, work)
    cost = None if hours is None or price is None else hours.cost(price * target.cluster.devices)
    return {
        "model": planner.model.architecture,
        "parameters": planner.model.parameters,
        "precision": planner.config.precision,
        "backend": target.backend,
        "device": None if device is None else device.name,
        "device_memory": None if device is None else device.memory,
        "usable_memory": None if device is None else device.usable(target.cluster.devices),
        "devices": target.cluster.devices,
        "host_memory": target.host_memory,
        "activations_estimated": planner.failure,
        "most_tokens_per_second": planner.most_tokens_per_second(),
        "tokens": None if work is None else work.tokens,
        "hours": None if hours is None else [hours.least, hours.most],
        "share_of_peak": None if device is None or hours is None else list(device.reached.share),
        "share_of_peak_source": None if device is None or hours is None else device.reached.source,
        "cost": None if cost is None else [cost.least, cost.most],
        "best": None if best is None else _option(best) | {"reason": why},
        "with_adapter": None if adapter is None else _option(adapter),
        "with_shared_sequences": None
        if shared is None
        else {"context_parallel_size": shared.size, **_option(shared.option)},
        "options": [_option(option) for option in options],
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "strategy": option.setting.strategy,
        "offload_optimizer": option.setting.offload_optimizer,
        "offload_params": option.setting.offload_params,
        "micro_batch_size": option.micro_batch,
        "activation_checkpointing": option.recompute,
        "device_bytes": {**asdict(option.device_bytes), "total": option.device_bytes.total},
        "host_bytes": option.host_bytes,
        "disk_bytes": option.disk_bytes,
        "checkpoint_bytes": option.checkpoint_bytes,
        "communication_bytes": option.communication_bytes,
        "fits": option.fits,
    }


def as_text(
    planner: Planner,
    options: Sequence[Option],
    best: Option | None,
    adapter: Option | None = None,
    shared: Shared | None = None,
    *,
    work: Work | None = None,
    price: float | None = None,
    wide: bool = False,
    width: int = 100,
) -> str:
    """The plan for people.

    Args:
        planner: that made it.
        options: all of them.
        best: the recommended one.
        adapter: what fits with an adapter, where without one nothing does, or only with offloading.
        work: the tokens, if they are known.
        price: of a device for an hour.
        shared: the same of devices that share sequences.
        wide: show what device memory consists of.
        width: of a line of prose.
    """
    target = planner.target
    device, cluster = target.device, target.cluster
    where = (
        f"{cluster.devices} x {device.name}" if device is not None else human_count(cluster.devices, "device")
    )
    size = planner.config.ranks_together
    on = "a device" if size == 1 else f"{size} devices"
    rows = [
        ("model", f"{planner.model.architecture}, {planner.model.parameters:,} parameters"),
        ("devices", where + ("" if device is None else f", {human_bytes(device.memory)} each")),
        (
            "batch",
            f"{planner.micro_batch} of {planner.config.data.seq_len} tokens at a time on {on}, "
            f"{planner.share} a step; {planner.config.precision}",
        ),
        ("a checkpoint", human_bytes(min(option.checkpoint_bytes for option in options))),
    ]
    if (peak := planner.peak_flops()) and (most := planner.most_tokens_per_second()):
        each = f"{cluster.devices} x {peak / 1e12:,.0f} TFLOP/s"
        rounded = float(f"{most:.3g}")
        rows.append(
            ("tokens/s", f"at most {rounded:,.0f}, at the data sheet's {each}; MFU is a run's share of it")
        )
    rows += hours_rows(planner, best, work, price)
    parts = [table(rows, width)]
    if planner.failure is not None:
        parts.append(f"note: activations are estimated by formula: {planner.failure}")
    if device is not None:
        parts.append(folded(reason(planner, options, best, adapter, shared), width))
    if best is not None:
        parts.append(best.yaml(planner.config))
    parts.append(columns(options, planner, best, wide=wide))
    if best is not None:
        parts.append("* is recommended; the row shows it as it would run")
    if device is None:
        advice = "name a device to see what fits: --device h100, --device v5e, or --device-memory 80GB"
        parts.append(folded(advice, width))
    return "\n\n".join(parts)


def hours_rows(
    planner: Planner, best: Option | None, work: Work | None, price: float | None = None
) -> list[tuple[str, str]]:
    """How long the run takes under ``best`` and what that costs, as far as that is known."""
    device = planner.target.device
    if device is None or best is None or work is None or (hours := hours_of(planner, best, work)) is None:
        return []
    low, high = device.reached.share
    bound = "at most " if work.at_most else ""
    share = f"{low:.0%} to {high:.0%} of the peak ({device.reached.source})"
    rows = [("time", f"{bound}{hours} for {bound}{work.tokens:,} tokens: {share}")]
    if price is not None:
        cost = hours.cost(price * planner.target.cluster.devices)
        at = f"{price:g} an hour for each device"
        rows.append(("cost", f"{bound}{rounded(cost.least)} to {rounded(cost.most)}, at {at}"))
    return rows


def folded(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` characters; words stay whole."""
    return "\n".join(
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False)
    )


def columns(options: Sequence[Option], planner: Planner, best: Option | None, *, wide: bool = False) -> str:
    """One line for each option; ``best`` first, with a star. Columns that say nothing new are left out."""
    shown = [*options]
    if best is not None:
        shown = [best, *(option for option in options if option.setting != best.setting)]
    rows = [_cells(option, star="" if best is None else "* " if option is best else "  ") for option in shown]
    idle = dict.fromkeys(("host", "disk", "sends"), "-")
    if not wide:
        idle["recompute"] = planner.config.memory.activation_checkpointing
        idle["batch"] = str(planner.micro_batch)
    names = [
        name
        for name in rows[0]
        if (wide or name not in _PARTS) and any(row[name] != idle.get(name) for row in rows)
    ]
    lines = [
        [("  " if best else "") + names[0], *names[1:]],
        *([row[name] for name in names] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in _TEXT else cell.rjust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _cells(option: Option, star: str) -> dict[str, str]:
    size = option.device_bytes
    numbers = {
        **{name: getattr(size, name) for name in _PARTS},
        **dict(
            zip(
                _BYTES,
                (size.total, option.host_bytes, option.disk_bytes, option.communication_bytes),
                strict=True,
            )
        ),
    }
    return {
        "strategy": star + option.setting.strategy,
        "offload": offloading(option),
        "recompute": option.recompute,
        "batch": str(option.micro_batch),
        **{name: human_bytes(number) if number else "-" for name, number in numbers.items()},
        "fits": {True: "yes", False: "no", None: "?"}[option.fits],
    }


def offloading(option: Option) -> str:
    """What is offloaded, for a cell."""
    moved = option.setting.offloaded
    if len(moved) == 2 and len(set(moved.values())) == 1:
        moved = {"all": next(iter(moved.values()))}
    return "+".join(f"{name} nvme" if place == "nvme" else name for name, place in moved.items()) or "-"


def in_words(option: Option) -> str:
    """The name of an option, for a sentence."""
    moved = "+".join(option.setting.offloaded)
    where = "on a disk" if option.setting.swaps else "on the host"
    return option.setting.strategy + (f" with {moved} {where}" if moved else "")


def reason(
    planner: Planner,
    options: Sequence[Option],
    best: Option | None,
    adapter: Option | None = None,
    shared: Shared | None = None,
) -> str:
    """Why ``best`` is recommended, what to reduce next, and what fits with an adapter or shared sequences."""
    device = planner.target.device
    assert device is not None
    usable = device.usable(planner.target.cluster.devices)
    instead = ""
    others = [("an adapter (adapter.type lora)", adapter)]
    if shared is not None:
        others.insert(0, (f"context_parallel_size {shared.size}, the smallest that fits", shared.option))
    for name, other in others:
        if other is None:
            continue
        instead += f".\nWith {name}, {in_words(other)} takes {human_bytes(other.device_bytes.total)}"
        if changes := changed(planner, other):
            instead += " with " + " and ".join(changes)
    if best is None:
        least = min(options, key=lambda option: option.device_bytes.total)
        return (
            f"nothing fits: even {in_words(least)} takes {human_bytes(least.device_bytes.total)} of "
            f"{human_bytes(usable)} usable, most of it {largest_part(least)}, also with one sequence at a "
            f"time and recomputation; {_last_resorts(planner)}{instead}"
        )
    text = (
        f"best: {in_words(best)}, the first in the order that fits: "
        f"{human_bytes(best.device_bytes.total)} of {human_bytes(usable)} usable"
    )
    if best.host_bytes:
        text += f", and {human_bytes(best.host_bytes)} of a node's host memory"
    if best.disk_bytes:
        text += f", and {human_bytes(best.disk_bytes)} of its disk"
    before = [option for option in options if option.fits is False and planner.comes_before(option, best)]
    if before:
        last = before[-1]
        text += (
            f"; {in_words(last)} before it takes {human_bytes(last.device_bytes.total)}, most of it "
            f"{largest_part(last)}"
        )
    if changes := changed(planner, best):
        text += "; it takes " + " and ".join(changes)
    text += f".\nIf memory runs out: {next_reductions(planner, best)}"
    return text + instead


def changed(planner: Planner, option: Option) -> list[str]:
    """Settings of ``option`` that differ from the config, except its strategy."""
    changes = []
    if option.micro_batch != planner.micro_batch:
        changes.append(f"train.micro_batch_size {option.micro_batch} in place of {planner.micro_batch}")
    if option.recompute != planner.config.memory.activation_checkpointing:
        changes.append(f"memory.activation_checkpointing {option.recompute}")
    return changes


def largest_part(option: Option) -> str:
    """The largest part of an option's device memory, with its size."""
    parts = asdict(option.device_bytes)
    name = max(parts, key=lambda part: parts[part])
    return f"{name} ({human_bytes(parts[name])})"


def next_reductions(planner: Planner, option: Option) -> str:
    """The next two settings to change if ``option`` does not fit."""
    steps = []
    if option.micro_batch > 1:
        steps.append(f"train.micro_batch_size {max(1, option.micro_batch // 2)}")
    if option.recompute != "full":
        steps.append("memory.activation_checkpointing full")
    steps += _of_backend(planner)
    following = planner.following(option.setting)
    if following is not None:
        steps.append(following)
    return ", then ".join(steps[:2]) if steps else _last_resorts(planner)


def _of_backend(planner: Planner) -> list[str]:
    """The backend's remedies that are in no option of a plan."""
    found = backend_package(planner.target.backend).remedies(planner.config, planner.target.cluster.devices)
    planned = ("strategy", "memory.offload", "memory.activation_checkpointing")
    return [remedy for remedy in found if not remedy.startswith(planned)]


def _last_resorts(planner: Planner) -> str:
    more = [*_of_backend(planner), "more devices", "a shorter data.seq_len"]
    if planner.config.train.optimizer == "adamw":
        more.append("train.optimizer adafactor")
    return "take " + ", ".join(more[:-1]) + " or " + more[-1]
