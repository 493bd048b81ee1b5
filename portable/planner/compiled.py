"""What a device's own compiler says of a run's graphs, beside the plan."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from portable.formatting import aligned, human_bytes, table
from portable.planner.compiled_graph import Compiled, CompiledGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.planner.plan import Option

WIDTH = 100
"""Columns of a terminal that the text fits into."""
_SHOWN = 5
"""Large values that the text lists for a graph."""


GRAPH = TypeAdapter(CompiledGraph)
"""Makes a graph of what :func:`dataclasses.asdict` made of one."""


def advised(compiled: Compiled, remedy: str) -> Compiled:
    """``compiled``, with the settings to change named wherever it does not fit.

    Args:
        compiled: what the compiler says.
        remedy: settings that take less memory.
    """
    problems = compiled.problems
    if not problems and not compiled.fits:
        problems = (
            f"the run does not fit: {human_bytes(compiled.state_bytes)} of arguments, "
            f"{human_bytes(compiled.working_bytes)} of temporary values and results and "
            f"{human_bytes(compiled.code_bytes)} of code are more than {human_bytes(compiled.hbm_bytes)}"
            f"{_largest(compiled)}",
        )
    return replace(compiled, problems=tuple(f"{problem}; remedy: {remedy}" for problem in problems))


def _largest(compiled: Compiled) -> str:
    values = [value for graph in compiled.graphs for value in graph.large_values]
    if not values:
        return ""
    value = max(values, key=lambda value: value.bytes)
    place = " at ".join(filter(None, (value.operation, value.source)))
    return f", the largest value is {value.shape} ({human_bytes(value.bytes)})" + (
        f" of {place}" if place else ""
    )


@dataclass(frozen=True)
class Comparison:
    """A figure of the plan beside the compiler's."""

    name: str
    planned: int
    compiled: int

    @property
    def percent(self) -> float | None:
        """By how much the compiler's figure exceeds the plan's; None where the plan has none."""
        return (self.compiled / self.planned - 1) * 100 if self.planned else None


def compare(compiled: Compiled, option: Option, micro_batches: int) -> list[Comparison]:
    """The plan of the configured setting beside the compiler's figures.

    The gradients' sums are arguments where a step has several micro-batches, and temporary where it has one.
    """
    planned = option.device_bytes
    resident = planned.parameters + planned.optimizer
    working = planned.gathered + planned.activations
    if compiled.graph("step") is None:
        resident += planned.gradients
    else:
        working += planned.gradients
    return [
        Comparison("state (arguments)", resident, compiled.state_bytes),
        Comparison("activations, gathered (temporary)", working, compiled.working_bytes),
        Comparison("peak", planned.total, compiled.peak_bytes),
        Comparison("sent in a step", option.communication_bytes, compiled.sent_bytes(micro_batches)),
    ]


def as_json(compiled: Compiled, compared: Sequence[Comparison]) -> dict[str, Any]:
    """For programs; sizes in bytes, of one device."""
    return {
        "topology": compiled.topology,
        "libtpu": compiled.compiler,
        "fits": compiled.fits,
        "peak_bytes": compiled.peak_bytes,
        "hbm_bytes": compiled.hbm_bytes,
        "problems": list(compiled.problems),
        "notes": list(compiled.notes),
        "host_bytes": compiled.host_bytes,
        "graphs": [asdict(graph) for graph in compiled.graphs],
        "compared": [
            {"name": line.name, "planned": line.planned, "compiled": line.compiled, "percent": line.percent}
            for line in compared
        ],
    }


def as_text(compiled: Compiled, compared: Sequence[Comparison]) -> str:
    """For people, in :data:`WIDTH` columns."""
    parts = [f"compiled for {compiled.topology} by {compiled.compiler}; bytes and FLOPs of one device"]
    parts += compiled.problems
    if compiled.graphs:
        parts.append(_graphs(compiled))
    collectives = _collectives(compiled)
    if collectives:
        parts.append(collectives)
    for graph in compiled.graphs:
        parts += _findings(graph)
    if not compiled.problems:
        parts.append(_aligned([("", "planned", "compiled", ""), *map(_compared, compared)]))
    rows = [
        ("peak", f"{human_bytes(compiled.peak_bytes)} of {human_bytes(compiled.hbm_bytes)}"),
        ("fits", "yes" if compiled.fits else "no"),
    ]
    parts += [table(rows), *(f"note: {note}" for note in compiled.notes)]
    return "\n\n".join(parts)


def _graphs(compiled: Compiled) -> str:
    head = ("graph", "arguments", "results", "aliased", "temporary", "code", "TFLOP", "accessed", "seconds")
    lines = [
        (
            graph.name,
            human_bytes(graph.argument_bytes),
            human_bytes(graph.output_bytes),
            human_bytes(graph.alias_bytes),
            human_bytes(graph.temporary_bytes),
            human_bytes(graph.code_bytes),
            f"{graph.flops / 1e12:.3g}",
            human_bytes(graph.bytes_accessed),
            f"{graph.compile_seconds:.0f}",
        )
        for graph in compiled.graphs
    ]
    return _aligned([head, *lines])


def _collectives(compiled: Compiled) -> str:
    head = ("graph", "collective", "count", "sends", "asynchronous", "overlapped")
    lines = [
        (
            graph.name,
            kind,
            str(found.count),
            human_bytes(found.bytes),
            str(found.asynchronous),
            str(found.overlapped),
        )
        for graph in compiled.graphs
        for kind, found in sorted(graph.collectives.items())
    ]
    return _aligned([head, *lines], left=2) if lines else ""


def _findings(graph: CompiledGraph) -> list[str]:
    lines = [
        f"{graph.name}: {value.count} x {value.shape} ({human_bytes(value.bytes)}), as large as the logits"
        + (f": {' '.join(filter(None, (value.operation, value.source)))}" if value.operation else "")
        for value in graph.large_values[:_SHOWN]
    ]
    if len(graph.large_values) > _SHOWN:
        lines.append(f"{graph.name}: and {len(graph.large_values) - _SHOWN} more; --json lists them")
    lines += [f"{graph.name}: waits for the host: {transfer}" for transfer in graph.host_transfers]
    lines += [f"{graph.name}: {note}" for note in graph.notes]
    return ["\n".join(line[:WIDTH] for line in lines)] if lines else []


def _compared(line: Comparison) -> tuple[str, ...]:
    percent = "" if line.percent is None else f"{line.percent:+.1f} %"
    return line.name, human_bytes(line.planned), human_bytes(line.compiled), percent


def _aligned(lines: Sequence[tuple[str, ...]], left: int = 1) -> str:
    return textwrap.indent(aligned(lines, left), "  ")
