"""The process that compiles.

libtpu may end its process, takes gigabytes, and reads its flags once: so a run's graphs are compiled in a
process of their own (:mod:`portable.tpu.compile.child_process`). It prints the name of each graph as it
begins with it.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.planner.compiled_graph import CompiledGraph
from portable.tpu.compile.child_process import read_request, write_answer, write_answer_and_exit
from portable.tpu.compile.hlo import HloModule
from portable.tpu.compile.libtpu import CompileError, InterfaceError, Libtpu, Topology
from portable.tpu.compile.messages import messages
from portable.tpu.compile.report import analyze_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.tpu.compile.libtpu import Executable
    from portable.tpu.compile.slices import TpuSlice

DUMP = "dump"
"""A folder beside the answer, in which the compiler says what it does."""
_SCHEDULED = "*.after_optimizations.hlo.pb"
_ASSIGNED = "*.after_optimizations_after_buffer_assignment.hlo.pb"  # is written after it


@dataclass(frozen=True)
class Job:
    """What to compile."""

    library: Path
    """libtpu."""
    wanted: TpuSlice
    graphs: Mapping[str, Path]
    """Name -> file with a serialized ``HloModuleProto``."""
    large: int
    """Elements from which a value is listed."""
    only_memory: bool = False
    """End before code is made; there is one graph then."""


def main() -> None:
    """Compile what standard input asks for."""
    job: Job = read_request()
    try:
        answer = run_job(job, Path(sys.argv[1]).with_name(DUMP) if job.only_memory else None)
    except (CompileError, InterfaceError) as error:
        answer = {"error": str(error)}
    if job.only_memory:
        write_answer_and_exit(answer)  # the compiler goes on
    write_answer(answer)


def run_job(job: Job, dumped: Path | None) -> dict[str, Any]:
    """Compile every graph.

    Args:
        job: what to compile.
        dumped: where the compiler writes its schedule, if that is all that is wanted.

    Raises:
        CompileError: libtpu knows no such slice. The refusal of a graph is part of the answer.
        InterfaceError: it is no libtpu, or of another interface.
    """
    topology = Libtpu(job.library).open_topology(job.wanted.name, **job.wanted.options)
    answers = []
    for name, path in job.graphs.items():
        print(name, flush=True)
        module = path.read_bytes()
        try:
            if dumped is None:
                graph = compile_graph(topology, name, module, job.large)
            else:
                graph = schedule_graph(topology, name, module, job.large, dumped)
            answers.append(asdict(graph))
        except CompileError as error:
            place = find_named_operation(str(error), module)
            answers.append({"name": name, "error": str(error), "code": error.code, "place": place})
    return {
        "compiler": topology.compiler,
        "devices": len(topology.device_ids),
        "hbm_bytes": job.wanted.get_hbm_bytes(topology),
        "graphs": answers,
    }


def compile_graph(topology: Topology, name: str, module: bytes, large: int) -> CompiledGraph:
    """Compile one graph and read what became of it.

    Args:
        topology: of the slice.
        name: of the graph.
        module: a serialized ``HloModuleProto``.
        large: elements from which a value is listed.

    Raises:
        CompileError: it does not compile, or takes too much memory.
    """
    start = time.monotonic()
    executable = topology.compile(module)
    graph = measure_graph(executable, name, len(topology.device_ids), large, time.monotonic() - start)
    executable.close()
    return graph


def measure_graph(
    executable: Executable, name: str, devices: int, large: int, seconds: float
) -> CompiledGraph:
    """What became of a graph.

    Args:
        executable: the compiled graph.
        name: of the graph.
        devices: that it is partitioned for.
        large: elements from which a value is listed.
        seconds: that it took to compile.
    """
    memory, cost = executable.read_memory(), executable.read_cost()
    report = analyze_module(executable.read_program(), devices, large)
    notes = []
    if report.unknown_loops:
        notes.append(f"{report.unknown_loops} loops of unknown length count as one pass")
    return CompiledGraph(
        name=name,
        argument_bytes=memory.arguments,
        output_bytes=memory.results,
        alias_bytes=memory.aliased,
        temporary_bytes=memory.temporary,
        code_bytes=memory.code,
        flops=cost.flops + report.looped_flops,
        bytes_accessed=cost.bytes_accessed + report.looped_bytes,
        compile_seconds=round(seconds, 2),
        collectives=report.collectives,
        large_values=report.large_values,
        custom_calls=report.custom_calls,
        host_transfers=report.host_transfers,
        notes=tuple(notes),
    )


def schedule_graph(topology: Topology, name: str, module: bytes, large: int, dumped: Path) -> CompiledGraph:
    """Compile one graph up to its schedule and the assignment of memory: code takes most of the time.

    Args:
        topology, name, module, large: as above.
        dumped: where the compiler has been told to write what it does.

    Raises:
        CompileError: it does not compile so far, or takes too much memory.
    """
    start = time.monotonic()
    refused: list[CompileError] = []

    def compile_all() -> None:
        try:
            topology.compile(module)
        except CompileError as error:
            refused.append(error)

    thread = threading.Thread(target=compile_all, daemon=True)
    thread.start()
    while thread.is_alive() and not any(dumped.glob(_ASSIGNED)):
        thread.join(0.1)
    if refused:
        raise refused[0]
    written = next(dumped.glob(_SCHEDULED), None)
    if written is None:
        raise InterfaceError("libtpu does not write its schedule; leave out --only-memory")
    proto = messages.HloProto.FromString(written.read_bytes())
    report = analyze_module(proto.hlo_module, len(topology.device_ids), large)
    sizes = Counter[str]()
    for allocation in proto.buffer_assignment.buffer_allocations:
        if allocation.color:
            continue  # not in HBM
        is_input, is_result = allocation.is_entry_parameter, allocation.maybe_live_out
        kinds = ["arguments"] * is_input + ["results"] * is_result + ["aliased"] * (is_input & is_result)
        for kind in kinds or ["temporary"]:
            sizes[kind] += allocation.size
    return CompiledGraph(
        name=name,
        argument_bytes=sizes["arguments"],
        output_bytes=sizes["results"],
        alias_bytes=sizes["aliased"],
        temporary_bytes=sizes["temporary"],
        code_bytes=0,
        flops=report.matrix_flops,
        bytes_accessed=0.0,
        compile_seconds=round(time.monotonic() - start, 2),
        collectives=report.collectives,
        large_values=report.large_values,
        custom_calls=report.custom_calls,
        host_transfers=report.host_transfers,
        notes=("no code was made, so its size is not counted; FLOPs are those of matrix products",),
    )


def find_named_operation(message: str, module: bytes) -> str:
    """Where in the model an operation comes from that a message names; empty if it names none.

    Args:
        message: of libtpu.
        module: the ``HloModuleProto`` that it refused.
    """
    words = set(re.findall(r"[\w.-]+", message))
    for computation in HloModule(module).computations.values():
        for instruction in computation.instructions:
            if {instruction.name, instruction.custom_call_target} & words:
                parts = filter(None, (instruction.operation(), instruction.source()))
                return " at ".join(parts) or instruction.name
    return ""
