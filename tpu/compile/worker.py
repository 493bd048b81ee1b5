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
from portable.tpu.compile.libtpu import Libtpu, LibtpuError, LibtpuInterfaceError, TpuTopology
from portable.tpu.compile.messages import xla_messages
from portable.tpu.compile.report import analyze_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.tpu.compile.libtpu import LibtpuExecutable
    from portable.tpu.compile.slices import TpuSlice

DUMP_FOLDER = "dump"
"""A folder beside the answer, in which the compiler says what it does."""
_SCHEDULED_FILES = "*.after_optimizations.hlo.pb"
_BUFFER_ASSIGNMENT_FILES = "*.after_optimizations_after_buffer_assignment.hlo.pb"  # is written after it


@dataclass(frozen=True)
class CompileJob:
    """What to compile."""

    libtpu_path: Path
    """libtpu."""
    tpu_slice: TpuSlice
    graph_paths: Mapping[str, Path]
    """Name -> file with a serialized ``HloModuleProto``."""
    large_value_elements: int
    """Elements from which a value is listed."""
    only_memory: bool = False
    """End before code is made; there is one graph then."""


def main() -> None:
    """Compile what standard input asks for."""
    job: CompileJob = read_request()
    try:
        answer = run_compile_job(job, Path(sys.argv[1]).with_name(DUMP_FOLDER) if job.only_memory else None)
    except (LibtpuError, LibtpuInterfaceError) as error:
        answer = {"error": str(error)}
    if job.only_memory:
        write_answer_and_exit(answer)  # the compiler goes on
    write_answer(answer)


def run_compile_job(job: CompileJob, dump_folder: Path | None) -> dict[str, Any]:
    """Compile every graph.

    Args:
        job: what to compile.
        dump_folder: where the compiler writes its schedule, if that is all that is wanted.

    Raises:
        CompileError: libtpu knows no such slice. The refusal of a graph is part of the answer.
        InterfaceError: it is no libtpu, or of another interface.
    """
    topology = Libtpu(job.libtpu_path).open_topology(
        job.tpu_slice.libtpu_name, **job.tpu_slice.topology_options
    )
    answers = []
    for name, path in job.graph_paths.items():
        print(name, flush=True)
        module = path.read_bytes()
        try:
            if dump_folder is None:
                graph = compile_graph(topology, name, module, job.large_value_elements)
            else:
                graph = compile_graph_schedule(topology, name, module, job.large_value_elements, dump_folder)
            answers.append(asdict(graph))
        except LibtpuError as error:
            operation = find_operation_in_message(str(error), module)
            answers.append({"name": name, "error": str(error), "code": error.status_code, "place": operation})
    return {
        "compiler": topology.compiler_version,
        "devices": len(topology.device_ids),
        "hbm_bytes": job.tpu_slice.get_hbm_bytes(topology),
        "graphs": answers,
    }


def compile_graph(
    topology: TpuTopology, name: str, module: bytes, large_value_elements: int
) -> CompiledGraph:
    """Compile one graph and read what became of it.

    Args:
        topology: of the slice.
        name: of the graph.
        module: a serialized ``HloModuleProto``.
        large_value_elements: elements from which a value is listed.

    Raises:
        CompileError: it does not compile, or takes too much memory.
    """
    start = time.monotonic()
    executable = topology.compile_module(module)
    graph = build_compiled_graph(
        executable, name, len(topology.device_ids), large_value_elements, time.monotonic() - start
    )
    executable.destroy()
    return graph


def build_compiled_graph(
    executable: LibtpuExecutable,
    name: str,
    num_devices: int,
    large_value_elements: int,
    compile_seconds: float,
) -> CompiledGraph:
    """What became of a graph.

    Args:
        executable: the compiled graph.
        name: of the graph.
        num_devices: that it is partitioned for.
        large_value_elements: elements from which a value is listed.
        compile_seconds: that it took to compile.
    """
    memory, cost = executable.read_memory_usage(), executable.read_cost_estimate()
    report = analyze_module(executable.read_scheduled_module(), num_devices, large_value_elements)
    notes = []
    if report.loops_of_unknown_length:
        notes.append(f"{report.loops_of_unknown_length} loops of unknown length count as one pass")
    return CompiledGraph(
        name=name,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.result_bytes,
        alias_bytes=memory.aliased_bytes,
        temporary_bytes=memory.temporary_bytes,
        code_bytes=memory.code_bytes,
        flops=cost.flops + report.looped_flops,
        bytes_accessed=cost.bytes_accessed + report.looped_bytes,
        compile_seconds=round(compile_seconds, 2),
        collectives=report.collectives,
        large_values=report.large_values,
        custom_calls=report.custom_calls,
        host_transfers=report.host_transfers,
        notes=tuple(notes),
    )


def compile_graph_schedule(
    topology: TpuTopology, name: str, module: bytes, large_value_elements: int, dump_folder: Path
) -> CompiledGraph:
    """Compile one graph up to its schedule and the assignment of memory: code takes most of the time.

    Args:
        topology, name, module, large_value_elements: as above.
        dump_folder: where the compiler has been told to write what it does.

    Raises:
        CompileError: it does not compile so far, or takes too much memory.
    """
    start = time.monotonic()
    compile_errors: list[LibtpuError] = []

    def compile_in_thread() -> None:
        try:
            topology.compile_module(module)
        except LibtpuError as error:
            compile_errors.append(error)

    thread = threading.Thread(target=compile_in_thread, daemon=True)
    thread.start()
    while thread.is_alive() and not any(dump_folder.glob(_BUFFER_ASSIGNMENT_FILES)):
        thread.join(0.1)
    if compile_errors:
        raise compile_errors[0]
    schedule_file = next(dump_folder.glob(_SCHEDULED_FILES), None)
    if schedule_file is None:
        raise LibtpuInterfaceError("libtpu does not write its schedule; leave out --only-memory")
    proto = xla_messages.HloProto.FromString(schedule_file.read_bytes())
    report = analyze_module(proto.hlo_module, len(topology.device_ids), large_value_elements)
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
        notes=("no code was made, so its size is not counted; FLOPs count only matrix products",),
    )


def find_operation_in_message(message: str, module: bytes) -> str:
    """Where in the model an operation comes from that a message names; empty if it names none.

    Args:
        message: of libtpu.
        module: the ``HloModuleProto`` that it refused.
    """
    words = set(re.findall(r"[\w.-]+", message))
    for computation in HloModule(module).computations.values():
        for instruction in computation.instructions:
            if {instruction.name, instruction.custom_call_target} & words:
                parts = filter(None, (instruction.get_operation_name(), instruction.get_source_location()))
                return " at ".join(parts) or instruction.name
    return ""
