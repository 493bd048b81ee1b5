"""Compile the graphs of a run in a child process.

libtpu can terminate its process, uses gigabytes of memory, and reads its flags only once.
Therefore, graphs are compiled in a child process (:mod:`portable.tpu.compile.child_process`), which
prints the name of each graph before compiling it.
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
"""Name of the folder next to the answer, into which the compiler writes its schedule."""
_SCHEDULED_FILES = "*.after_optimizations.hlo.pb"
# The compiler writes this file after the schedule.
_BUFFER_ASSIGNMENT_FILES = "*.after_optimizations_after_buffer_assignment.hlo.pb"


@dataclass(frozen=True)
class CompileJob:
    """Request for compiling graphs, which the parent process sends to the child process.

    Attributes:
        libtpu_path: Path of ``libtpu.so``.
        tpu_slice: Slice to compile for.
        graph_paths: Files that contain serialized ``HloModuleProto`` messages, keyed by graph name.
        large_value_elements: Minimum number of elements of reported values.
        only_memory: Whether to stop before code generation. In this case, the job must have only one
            graph.
    """

    libtpu_path: Path
    tpu_slice: TpuSlice
    graph_paths: Mapping[str, Path]
    large_value_elements: int
    only_memory: bool = False


def main() -> None:
    """Run the compile job requested through standard input, and write the answer."""
    job: CompileJob = read_request()
    try:
        answer = run_compile_job(job, Path(sys.argv[1]).with_name(DUMP_FOLDER) if job.only_memory else None)
    except (LibtpuError, LibtpuInterfaceError) as error:
        answer = {"error": str(error)}
    if job.only_memory:
        write_answer_and_exit(answer)  # otherwise the compiler would continue with code generation
    write_answer(answer)


def run_compile_job(job: CompileJob, dump_folder: Path | None) -> dict[str, Any]:
    """Compile every graph in a job.

    Args:
        job: Job to run.
        dump_folder: Folder for the compiler's schedule if only the memory is requested, otherwise None.

    Returns:
        Answer that contains the compiled graphs. A graph that failed to compile has the key ``error``.

    Raises:
        LibtpuError: If libtpu does not support the slice.
        LibtpuInterfaceError: If the library is not libtpu, or if its interface is not supported.
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
    """Compile a graph, and read its memory and operations.

    Args:
        topology: TPU slice to compile for.
        name: Name of the graph.
        module: Serialized ``HloModuleProto``.
        large_value_elements: Minimum number of elements of reported values.

    Raises:
        LibtpuError: If the graph does not compile, or if it requires too much memory.
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
    """Read the memory and operations of a compiled graph.

    Args:
        executable: Executable of the graph.
        name: Name of the graph.
        num_devices: Number of devices over which the graph is partitioned.
        large_value_elements: Minimum number of elements of reported values.
        compile_seconds: Compilation time in seconds.
    """
    memory, cost = executable.read_memory_usage(), executable.read_cost_estimate()
    report = analyze_module(executable.read_scheduled_module(), num_devices, large_value_elements)
    notes = []
    if report.loops_of_unknown_length:
        notes.append(
            f"loops of unknown length ({report.loops_of_unknown_length}) are counted as one iteration"
        )
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
    """Compile a graph until its schedule and memory assignment are available.

    This is fast, because code generation accounts for most of the compile time. libtpu cannot be
    stopped before code generation, so it continues in a daemon thread. End the process afterward.

    Args:
        topology: TPU slice to compile for.
        name: Name of the graph.
        module: Serialized ``HloModuleProto``.
        large_value_elements: Minimum number of elements of reported values.
        dump_folder: Folder for the compiler's schedule. It must be the same folder as in ``XLA_FLAGS``.

    Raises:
        LibtpuError: If compilation fails before the schedule is written, or if the graph requires too
            much memory.
        LibtpuInterfaceError: If libtpu does not write a schedule.
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
        raise LibtpuInterfaceError("libtpu does not write its schedule; remove --only-memory")
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
        notes=("no code was generated, so its size is not counted; FLOPs include only matrix products",),
    )


def find_operation_in_message(message: str, module: bytes) -> str:
    """Find the model operation that an error message refers to.

    Args:
        message: Error message from libtpu.
        module: Serialized ``HloModuleProto`` that failed to compile.

    Returns:
        Name and source location of the operation. Empty if the message contains none.
    """
    words = set(re.findall(r"[\w.-]+", message))
    for computation in HloModule(module).computations.values():
        for instruction in computation.instructions:
            if {instruction.name, instruction.custom_call_target} & words:
                parts = filter(None, (instruction.get_operation_name(), instruction.get_source_location()))
                return " at ".join(parts) or instruction.name
    return ""
