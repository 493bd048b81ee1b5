"""Process that compiles the graphs of a run.

libtpu may end its process, takes gigabytes of memory, and reads its flags only once. The graphs of a run are
therefore compiled in a child process (:mod:`portable.tpu.compile.child_process`). The process prints the name
of each graph when it starts to compile the graph.
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
    """Request to compile graphs, which the parent process sends to the child process.

    Attributes:
        libtpu_path: Path of ``libtpu.so``.
        tpu_slice: Slice to compile for.
        graph_paths: File with a serialized ``HloModuleProto`` for each name of a graph.
        large_value_elements: Minimum number of elements of a value that is reported.
        only_memory: Whether to stop before code generation. The job has only one graph in this case.
    """

    libtpu_path: Path
    tpu_slice: TpuSlice
    graph_paths: Mapping[str, Path]
    large_value_elements: int
    only_memory: bool = False


def main() -> None:
    """Run the job of the request that standard input contains, and write the answer."""
    job: CompileJob = read_request()
    try:
        answer = run_compile_job(job, Path(sys.argv[1]).with_name(DUMP_FOLDER) if job.only_memory else None)
    except (LibtpuError, LibtpuInterfaceError) as error:
        answer = {"error": str(error)}
    if job.only_memory:
        write_answer_and_exit(answer)  # otherwise the compiler would continue with code generation
    write_answer(answer)


def run_compile_job(job: CompileJob, dump_folder: Path | None) -> dict[str, Any]:
    """Compile every graph of a job.

    Args:
        job: Job to run.
        dump_folder: Folder into which the compiler writes its schedule, if only the memory is requested;
            otherwise None.

    Returns:
        Answer with the compiled graphs. A graph that libtpu refused has the key ``error``.

    Raises:
        LibtpuError: If libtpu does not support the slice.
        LibtpuInterfaceError: If the library is not libtpu, or if its interface differs.
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
    """Compile one graph and read its memory and operations.

    Args:
        topology: The slice.
        name: Name of the graph.
        module: A serialized ``HloModuleProto``.
        large_value_elements: Minimum number of elements of a value that is reported.

    Raises:
        LibtpuError: If the graph does not compile, or takes too much memory.
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
    """Read the memory and operations of an executable.

    Args:
        executable: Compiled graph.
        name: Name of the graph.
        num_devices: Number of devices that the graph is partitioned for.
        large_value_elements: Minimum number of elements of a value that is reported.
        compile_seconds: Time that compilation took.
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
    """Compile one graph up to its schedule and its memory assignment.

    This is fast, because code generation takes most of the time of a compilation. libtpu cannot be stopped
    there, so code generation continues in a daemon thread. End the process afterwards.

    Args:
        topology: The slice.
        name: Name of the graph.
        module: A serialized ``HloModuleProto``.
        large_value_elements: Minimum number of elements of a value that is reported.
        dump_folder: Folder into which the compiler writes its schedule. It must be the folder that
            ``XLA_FLAGS`` contains.

    Raises:
        LibtpuError: If compilation fails before the schedule, or the graph takes too much memory.
        LibtpuInterfaceError: If libtpu does not write its schedule.
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
    """Find the operation of the model that an error message names.

    Args:
        message: Error message of libtpu.
        module: Serialized ``HloModuleProto`` that libtpu refused.

    Returns:
        Name and source location of the operation. Empty if the message names none.
    """
    words = set(re.findall(r"[\w.-]+", message))
    for computation in HloModule(module).computations.values():
        for instruction in computation.instructions:
            if {instruction.name, instruction.custom_call_target} & words:
                parts = filter(None, (instruction.get_operation_name(), instruction.get_source_location()))
                return " at ".join(parts) or instruction.name
    return ""
