"""Format the report on a run's compiled graphs as text and JSON, and compare it with the plan."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from portable.formatting import format_bytes, format_columns, format_table
from portable.planner.compiled_graph import CompiledGraph, CompiledRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.planner.plan import PlanOption

MAX_COLUMNS = 100
"""Maximum length in characters of the report lines about large values, host transfers, and notes.

Longer lines are cut off.
"""
_MAX_SHOWN_VALUES = 5
"""Maximum number of large values to list per graph."""


GRAPH_ADAPTER = TypeAdapter(CompiledGraph)
"""Pydantic adapter that restores a graph from the dict that :func:`dataclasses.asdict` returns."""


def add_remedy_to_problems(compiled: CompiledRun, remedy: str) -> CompiledRun:
    """Return a copy of a compiled run with a remedy appended to each problem.

    If the compiler reported no problem although the run does not fit, a problem that states the
    required memory is added first.

    Args:
        compiled: Result of the compiler.
        remedy: Text that lists settings that reduce the memory.
    """
    problems = compiled.problems
    if not problems and not compiled.fits:
        problems = (
            f"the run does not fit into the {format_bytes(compiled.hbm_bytes)} of device memory, because it "
            f"needs {format_bytes(compiled.state_bytes)} for arguments, "
            f"{format_bytes(compiled.working_bytes)} for temporary values and results, and "
            f"{format_bytes(compiled.code_bytes)} for code{_describe_largest_value(compiled)}",
        )
    return replace(compiled, problems=tuple(f"{problem}; to reduce memory: {remedy}" for problem in problems))


def _describe_largest_value(compiled: CompiledRun) -> str:
    """Describe the value that occupies the most memory in any graph, as the end of a sentence.

    Returns:
        Text that begins with a semicolon. Empty if the graphs list no large values.
    """
    values = [value for graph in compiled.graphs for value in graph.large_values]
    if not values:
        return ""
    value = max(values, key=lambda value: value.bytes)
    place = " at ".join(filter(None, (value.operation, value.source)))
    return f"; the largest value is {value.shape} ({format_bytes(value.bytes)})" + (
        f" of {place}" if place else ""
    )


@dataclass(frozen=True)
class Comparison:
    """Comparison of a number of bytes in the plan with the number that the compiler reports.

    Attributes:
        name: Name of the compared quantity, such as ``peak``.
        planned: Number of bytes in the plan.
        compiled: Number of bytes according to the compiler.
    """

    name: str
    planned: int
    compiled: int

    @property
    def percent(self) -> float | None:
        """Percentage by which the bytes that the compiler reports exceed the bytes in the plan.

        Negative if the compiler reports fewer bytes. None if the number in the plan is 0.
        """
        return (self.compiled / self.planned - 1) * 100 if self.planned else None


def compare_with_plan(compiled: CompiledRun, option: PlanOption, micro_batches: int) -> list[Comparison]:
    """Compare the memory and communication of a plan with the numbers that the compiler reports.

    If a step consists of the graphs ``micro-batch`` and ``update``, these graphs receive the
    accumulated gradients as arguments. The planned gradients are then counted as state. If the
    graph ``step`` computes a complete step, the planned gradients are counted as temporary values.

    Args:
        compiled: Result of the compiler.
        option: Plan for the settings that were compiled.
        micro_batches: Number of micro-batches in a step.

    Returns:
        Comparisons of the state, the temporary values, the peak memory, and the bytes sent in a
        step.
    """
    planned = option.device_bytes
    resident = planned.parameters + planned.optimizer
    working = planned.gathered + planned.activations
    if compiled.find_graph("step") is None:
        resident += planned.gradients
    else:
        working += planned.gradients
    return [
        Comparison("state (arguments)", resident, compiled.state_bytes),
        Comparison("activations, gathered (temporary)", working, compiled.working_bytes),
        Comparison("peak", planned.total, compiled.peak_bytes),
        Comparison(
            "sent in a step", option.communication_bytes, compiled.compute_sent_bytes_per_step(micro_batches)
        ),
    ]


def to_json_values(compiled: CompiledRun, compared: Sequence[Comparison]) -> dict[str, Any]:
    """Convert the compiler's result and its comparison with the plan to a JSON-compatible dict.

    Sizes are in bytes per device, except for ``host_bytes``: the peak memory of the compiler
    process.

    Args:
        compiled: Result of the compiler.
        compared: Result of :func:`compare_with_plan`.
    """
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


def format_report(compiled: CompiledRun, compared: Sequence[Comparison]) -> str:
    """Format the report as text, with tables of the graphs, their collectives, and the comparison.

    The text also contains the problems, the large values, the transfers to the host, and the notes.
    If there are problems, the comparison is omitted.

    Args:
        compiled: Result of the compiler.
        compared: Result of :func:`compare_with_plan`.
    """
    parts = [f"compiled for {compiled.topology} by {compiled.compiler}; bytes and FLOPs of one device"]
    parts += compiled.problems
    if compiled.graphs:
        parts.append(_format_graphs(compiled))
    collectives = _format_collectives(compiled)
    if collectives:
        parts.append(collectives)
    for graph in compiled.graphs:
        parts += _format_findings(graph)
    if not compiled.problems:
        parts.append(_align_columns([("", "planned", "compiled", ""), *map(_format_comparison, compared)]))
    rows = [
        ("peak", f"{format_bytes(compiled.peak_bytes)} of {format_bytes(compiled.hbm_bytes)}"),
        ("fits", "yes" if compiled.fits else "no"),
    ]
    parts += [format_table(rows), *(f"note: {note}" for note in compiled.notes)]
    return "\n\n".join(parts)


def _format_graphs(compiled: CompiledRun) -> str:
    """Format a table with one row per graph: its sizes, FLOPs, and compile time."""
    head = ("graph", "arguments", "results", "aliased", "temporary", "code", "TFLOP", "accessed", "seconds")
    lines = [
        (
            graph.name,
            format_bytes(graph.argument_bytes),
            format_bytes(graph.output_bytes),
            format_bytes(graph.alias_bytes),
            format_bytes(graph.temporary_bytes),
            format_bytes(graph.code_bytes),
            f"{graph.flops / 1e12:.3g}",
            format_bytes(graph.bytes_accessed),
            f"{graph.compile_seconds:.0f}",
        )
        for graph in compiled.graphs
    ]
    return _align_columns([head, *lines])


def _format_collectives(compiled: CompiledRun) -> str:
    """Format a table with one row per graph and collective type. Empty if there are no collectives."""
    head = ("graph", "collective", "count", "sends", "asynchronous", "overlapped")
    lines = [
        (
            graph.name,
            kind,
            str(collective.count),
            format_bytes(collective.bytes),
            str(collective.asynchronous),
            str(collective.overlapped),
        )
        for graph in compiled.graphs
        for kind, collective in sorted(graph.collectives.items())
    ]
    return _align_columns([head, *lines], left_columns=2) if lines else ""


def _format_findings(graph: CompiledGraph) -> list[str]:
    """Format the large values, host transfers, and notes of a graph as a block of lines.

    Returns:
        A list with the block as its only element. Empty if the graph has no large values, host
        transfers, or notes. At most ``_MAX_SHOWN_VALUES`` large values are listed, and long lines
        are cut off.
    """
    lines = [
        f"{graph.name}: {value.count} x {value.shape} ({format_bytes(value.bytes)}), as large as the logits"
        + (f": {' '.join(filter(None, (value.operation, value.source)))}" if value.operation else "")
        for value in graph.large_values[:_MAX_SHOWN_VALUES]
    ]
    if len(graph.large_values) > _MAX_SHOWN_VALUES:
        lines.append(
            f"{graph.name}: and {len(graph.large_values) - _MAX_SHOWN_VALUES} more; --json lists them"
        )
    lines += [f"{graph.name}: waits for the host: {transfer}" for transfer in graph.host_transfers]
    lines += [f"{graph.name}: {note}" for note in graph.notes]
    return ["\n".join(line[:MAX_COLUMNS] for line in lines)] if lines else []


def _format_comparison(line: Comparison) -> tuple[str, ...]:
    """Format the cells of a table row: name, planned bytes, compiled bytes, and difference in percent."""
    percent = "" if line.percent is None else f"{line.percent:+.1f} %"
    return line.name, format_bytes(line.planned), format_bytes(line.compiled), percent


def _align_columns(lines: Sequence[tuple[str, ...]], left_columns: int = 1) -> str:
    """Format rows of cells as an indented table. The first ``left_columns`` columns are left-aligned."""
    return textwrap.indent(format_columns(lines, left_columns), "  ")
