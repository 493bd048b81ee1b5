"""Main program of the child process that compiles the graphs of a run.

Graphs are compiled in a child process because libtpu can terminate its process, uses gigabytes of
memory, and reads its flags only once. :mod:`portable.tpu.compile.child_process` starts the process
and reads its answer. The process prints the name of each graph before compiling it. If the process
crashes, the last printed name therefore identifies the graph that it was compiling.
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
# The compiler writes this file after the schedule, so its existence means that the schedule is complete.
_BUFFER_ASSIGNMENT_FILES = "*.after_optimizations_after_buffer_assignment.hlo.pb"


@dataclass(frozen=True)
class CompileJob:
    """Request for compiling graphs, which the parent process sends to the child process.

    Attributes:
        libtpu_path: Path of ``libtpu.so``.
        tpu_slice: Slice to compile for.
        graph_paths: Files that contain serialized ``HloModuleProto`` messages, keyed by graph name.
        large_value_elements: Minimum number of elements for a value to be reported as large.
        only_memory: Whether to stop as soon as the memory use is known, without generating code. If
            so, the job must have only one graph.
    """

    libtpu_path: Path
    tpu_slice: TpuSlice
    graph_paths: Mapping[str, Path]
    large_value_elements: int
    only_memory: bool = False


def main() -> None:
    """Run the compile job requested through standard input, and write the answer.

    The first command-line argument is the path of the answer file. For a job with ``only_memory``,
    the compiler's dump is read from the folder ``dump`` next to this file.

    If libtpu cannot run the job, the answer contains only the key ``error`` and the memory use of
    this process. After a job with ``only_memory``, the process ends immediately, because otherwise
    the compiler would continue with code generation.
    """
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

    The name of each graph is printed before the graph is compiled, so that the parent process can
    report the graph that crashed the compiler.

    Args:
        job: Job to run.
        dump_folder: Folder to which the compiler writes its schedule, for a job with
            ``only_memory``. None to compile the graphs completely, including code generation.

    Returns:
        Answer for the parent process. The key ``graphs`` contains one dict per graph. The dict of a
        graph that failed to compile has the key ``error``.

    Raises:
        LibtpuError: If libtpu fails to start, or if it does not support the slice.
        LibtpuInterfaceError: If the file ``job.libtpu_path`` is not libtpu, if its interface is not
            supported, or if it does not provide the schedule of a graph.
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
    """Compile a graph, and return statistics of its memory and operations.

    Args:
        topology: TPU slice to compile for.
        name: Name of the graph.
        module: Serialized ``HloModuleProto``.
        large_value_elements: Minimum number of elements for a value to be reported as large.

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
    """Build a summary of a compiled graph: its memory usage, cost and notable operations.

    Args:
        executable: Executable of the graph.
        name: Name of the graph.
        num_devices: Number of devices over which the graph is partitioned.
        large_value_elements: Minimum number of elements for a value to be reported as large.
        compile_seconds: Compilation time in seconds.
    """
    memory, cost = executable.read_memory_usage(), executable.read_cost_estimate()
    report = analyze_module(executable.read_scheduled_module(), num_devices, large_value_elements)
    notes = []
    if report.loops_of_unknown_length:
        notes.append(
            "each loop of unknown length is counted as one iteration (loops: "
            f"{report.loops_of_unknown_length})"
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

    The function returns before the end of code generation, which accounts for most of the compile
    time. libtpu cannot be stopped before code generation, so the compilation continues in a daemon
    thread. The caller must therefore end the process afterward.

    In the result, the code size and the accessed bytes are 0, and FLOPs include only matrix
    products.

    Args:
        topology: TPU slice to compile for.
        name: Name of the graph.
        module: Serialized ``HloModuleProto``.
        large_value_elements: Minimum number of elements for a value to be reported as large.
        dump_folder: Folder for the compiler's schedule. It must be the same folder as in
            ``XLA_FLAGS``.

    Raises:
        LibtpuError: If compilation fails before the schedule is written, or if the graph requires
            too much memory.
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

    The operation belongs to the first HLO instruction in the module whose name or custom call
    target is a word in the message.

    Args:
        message: Error message from libtpu.
        module: Serialized ``HloModuleProto`` that failed to compile.

    Returns:
        Name and source location of the operation, or the name of the HLO instruction if the
        compiler did not keep them. Empty if no instruction matches.
    """
    words = set(re.findall(r"[\w.-]+", message))
    for computation in HloModule(module).computations.values():
        for instruction in computation.instructions:
            if {instruction.name, instruction.custom_call_target} & words:
                parts = filter(None, (instruction.get_operation_name(), instruction.get_source_location()))
                return " at ".join(parts) or instruction.name
    return ""
