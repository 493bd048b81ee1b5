"""Compile the graphs of a run for a TPU slice, and summarize the results."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.errors import UserError, to_one_line
from portable.formatting import format_bytes
from portable.planner.compiled_graph import CompiledRun
from portable.planner.compiler_report import GRAPH_ADAPTER
from portable.temporary_folder import create_scratch_folder
from portable.terminal import shows_run_progress_bars
from portable.tpu.compile.child_process import run_in_child_process
from portable.tpu.compile.hlo import strip_package_prefix
from portable.tpu.compile.slices import TpuSlice, select_tpu_slice
from portable.tpu.compile.trace import trace_graphs
from portable.tpu.compile.worker import DUMP_FOLDER, CompileJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.registry import CompileTarget

_RESOURCE_EXHAUSTED = 8
NO_LARGE_VALUES = 1 << 62
"""Value of ``large_value_elements`` that disables the report of large values, because no value
has this many elements.
"""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class LibtpuInstallation:
    """Installation of libtpu on this machine.

    Attributes:
        path: Path of ``libtpu.so``.
        version: Version of the installed package ``libtpu``. None if it is unknown, for example
            because the environment variable ``TPU_LIBRARY_PATH`` names a file outside the package.
    """

    path: Path
    version: str | None


def find_libtpu() -> LibtpuInstallation:
    """Find libtpu at ``TPU_LIBRARY_PATH`` or in the installed package, without loading it.

    Raises:
        UserError: If ``TPU_LIBRARY_PATH`` is not a file, or if libtpu is not installed.
    """
    installed = _find_installed_libtpu()
    env_path = os.environ.get("TPU_LIBRARY_PATH")  # torch_xla also sets this variable
    if env_path:
        path = Path(env_path)
        if not path.is_file():
            raise UserError(
                f"TPU_LIBRARY_PATH: {env_path} is not a file; set TPU_LIBRARY_PATH to the path of libtpu.so"
            )
        return (
            installed if installed is not None and installed.path == path else LibtpuInstallation(path, None)
        )
    if installed is not None:
        return installed
    raise UserError(
        "--compile: needs libtpu, the TPU compiler; install libtpu with: pip install "
        "'portable-trainer[tpu-compile]', or set TPU_LIBRARY_PATH to the path of libtpu.so"
    )


def _find_installed_libtpu() -> LibtpuInstallation | None:
    """Find libtpu in the installed package ``libtpu``, or return None if it is not installed."""
    spec = find_spec("libtpu")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "libtpu.so"
        if path.is_file():
            with suppress(metadata.PackageNotFoundError):
                return LibtpuInstallation(path, metadata.version("libtpu"))
            return LibtpuInstallation(path, None)
    return None


def compile_xla_graphs(config: RunConfig, target: CompileTarget) -> CompiledRun:
    """Trace and compile the graphs of a run with torch_xla, in child processes.

    See :meth:`portable.registry.BackendPackage.compile_graphs` for the arguments.

    Raises:
        UserError: If the config or the TPU slice is not supported, if libtpu is not installed, or
            if tracing or compilation fails. A graph that needs too much memory is not an
            error. It is listed in ``problems`` of the result.
    """
    tpu_slice = select_tpu_slice(target.device, target.num_devices, target.topology)
    library = find_libtpu()
    with create_scratch_folder("portable-compile") as folder:
        _show_progress(f"tracing the run's graphs for {target.num_devices} devices ...")
        traced = trace_graphs(config, target.num_devices, folder / "graphs")
        _show_progress("")
        files = {graph.name: graph.hlo_path for graph in traced}
        large_value_elements = target.min_listed_elements or NO_LARGE_VALUES
        return compile_graph_files(
            files, tpu_slice, library, large_value_elements, only_memory=target.stops_after_memory_report
        )


def compile_graph_files(
    graph_paths: dict[str, Path],
    tpu_slice: TpuSlice,
    library: LibtpuInstallation,
    large_value_elements: int,
    *,
    only_memory: bool = False,
) -> CompiledRun:
    """Compile graphs in child processes.

    Args:
        graph_paths: Files that contain serialized ``HloModuleProto`` messages, keyed by graph name.
        tpu_slice: TPU slice. Each graph is partitioned over all of its devices.
        library: Libtpu installation to compile with.
        large_value_elements: Minimum number of elements for a value to be reported as large.
        only_memory: Whether to stop as soon as the memory use is known, without generating code.
            Each graph is then compiled in a separate process.

    Raises:
        UserError: If libtpu does not support the slice, if the compiler crashes, or if a graph
            does not compile for a reason other than memory.
    """
    batches = [{name: path} for name, path in graph_paths.items()] if only_memory else [graph_paths]
    answers = [
        _run_compile_job(CompileJob(library.path, tpu_slice, batch, large_value_elements, only_memory))
        for batch in batches
    ]
    return merge_compile_answers(tpu_slice, library, answers)


def merge_compile_answers(
    tpu_slice: TpuSlice, library: LibtpuInstallation, answers: Sequence[dict[str, Any]]
) -> CompiledRun:
    """Merge the answers from processes that compiled graphs for the same slice.

    Args:
        tpu_slice: TPU slice.
        library: Libtpu installation that compiled the graphs.
        answers: Answer from each process.

    Returns:
        The compiled graphs. Graphs that do not fit into device memory are listed in ``problems``.

    Raises:
        UserError: If libtpu failed to compile a graph for a reason other than memory.
    """
    compiled, problems, needed = [], [], 0
    for graph in (graph for answer in answers for graph in answer["graphs"]):
        if "error" not in graph:
            compiled.append(GRAPH_ADAPTER.validate_python(graph))
        elif is_out_of_memory(graph["error"], graph["code"]):
            problems.append(
                f"{graph['name']} does not fit into device memory: {describe_memory_shortage(graph['error'])}"
            )
            needed = max(needed, _parse_required_bytes(graph["error"]))
        else:
            raise UserError(
                f"--compile: {graph['name']}: libtpu cannot compile this graph: "
                f"{describe_compile_error(graph['error'], graph['place'])}"
            )
    return CompiledRun(
        tpu_slice.libtpu_name,
        describe_libtpu(library, answers[0]["compiler"]),
        answers[0]["hbm_bytes"],
        tuple(compiled),
        tuple(problems),
        needed,
        host_bytes=max(answer["host_bytes"] for answer in answers),
    )


def _run_compile_job(job: CompileJob) -> dict[str, Any]:
    """Run a compile job in a child process, and return its answer.

    If a graph does not compile, no error is raised. Its dict in the answer has the key ``error``.
    On a terminal, the name of the graph that is being compiled is shown.

    Raises:
        UserError: If libtpu does not support the slice, if the file is not a supported libtpu, or
            if the process crashes.
    """
    started_graphs: list[str] = []

    def note_graph_start(name: str) -> None:
        started_graphs.append(name)
        _show_progress(f"compiling {name} ...")

    with create_scratch_folder("portable-compile") as folder:
        environment = job.tpu_slice.build_compiler_environment(dict(os.environ))
        if job.only_memory:
            environment["XLA_FLAGS"] = f"--xla_dump_to={folder / DUMP_FOLDER} --xla_dump_hlo_as_proto"
        answer = run_in_child_process(
            "from portable.tpu.compile.worker import main; main()",
            folder / "compiled.json",
            request=job,
            environment=environment,
            format_failure=lambda code, log: describe_crash(code, started_graphs, log),
            on_output_line=note_graph_start,
        )
    _show_progress("")
    if "error" in answer:
        raise UserError(f"--compile: {job.tpu_slice.libtpu_name}: {to_one_line(answer['error'])}")
    return answer


def describe_crash(exit_code: int, started_graphs: Sequence[str], error_output: str) -> str:
    """Describe in one line why the compiler process has written no answer.

    Args:
        exit_code: Exit code of the process, or the negative signal number if a signal ended the
            process.
        started_graphs: Names of the graphs whose compilation was started.
        error_output: Standard error output of the process.
    """
    moment = f"while it compiled {started_graphs[-1]}" if started_graphs else "when it started"
    how = f"with exit code {exit_code}"
    if exit_code < 0:
        how = f"by {signal.Signals(-exit_code).name}"
    if exit_code == -signal.SIGKILL:
        return (
            f"--compile: the process of libtpu was killed {moment}, probably because the host ran out of "
            "memory; free some memory, or use a host with more memory"
        )
    lines = [line.strip() for line in error_output.splitlines() if line.strip()]
    error_lines = [
        line for line in lines if re.match(r"[EF]\d{4}|.*(?:Check failed|ERROR|Error|Unknown)", line)
    ]
    last = to_one_line((error_lines or lines or ["no error output"])[0])
    last = re.sub(r"^[EF]\d{4,}[\d :.]*\s*\d*\s+", "", last)
    remedy = (
        "remove this flag from LIBTPU_INIT_ARGS"
        if "command line flag" in last
        else "try another version of libtpu"
    )
    return f"--compile: libtpu ended {how} {moment}: {last}; {remedy}"


# -- libtpu's messages about graphs that it refuses --------------------------------------------------------


def is_out_of_memory(message: str, code: int) -> bool:
    """Return whether libtpu's error means that a graph exceeds the device memory."""
    return code == _RESOURCE_EXHAUSTED or "would exceed memory" in message or "Ran out of memory" in message


def describe_memory_shortage(message: str) -> str:
    """Summarize a libtpu out-of-memory error in one line.

    The summary states how much memory the graph needs, how much of it the arguments take, and which
    value is the largest. It omits numbers that the message does not contain. If the message
    contains none of them, the message itself is returned. An example of a summary is ``needs 20.1
    GiB (4.0 GiB for arguments), but a chip has 15.7 GiB``.
    """
    total = re.search(r"Used (\S+) of (\S+) hbm", message)
    temporary = re.search(r"HLO temporaries \((\S+)\) exceeds available HBM \((\S+)\)", message)
    allocation = re.search(
        r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?'?(\w+\[[\d,]*\])", message
    )
    arguments = re.search(r"^\s+arguments\s+(\S+)\s*$", message, re.MULTILINE)
    part = ""
    if arguments and _parse_size_bytes(arguments[1]):
        part = f" ({format_bytes(_parse_size_bytes(arguments[1]))} for arguments)"
    parts = []
    if usage := total or temporary:
        parts.append(
            f"needs {format_bytes(_parse_size_bytes(usage[1]))}{part}, but a chip has "
            f"{format_bytes(_parse_size_bytes(usage[2]))}"
        )
    elif allocation:
        parts.append(
            f"a single value {allocation[3]} takes {format_bytes(int(allocation[1]))}, but a chip has "
            f"{format_bytes(int(allocation[2]))}"
        )
    largest = re.search(r"^\s*1\. Size: (\S+)\s*\n(.*?)={5}", message, re.MULTILINE | re.DOTALL)
    if largest:
        shape = re.search(r"Shape: (\w+\[[\d,]*\])", largest[2])
        size = format_bytes(_parse_size_bytes(largest[1]))
        value = f"the largest value is {shape[1]} ({size})" if shape else f"the largest value takes {size}"
        parts.append(value + _describe_operation(largest[2]))
    return "; ".join(parts) or to_one_line(message)


_REMEDIES_BY_KERNEL = {
    "ragged-dot": "model.experts batched_mm",
    "scaled_dot_product": "model.attention eager",
}
"""Settings that avoid kernels which some TPU generations (v5p, v4) do not support, keyed by kernel
name.
"""


def describe_compile_error(message: str, operation: str) -> str:
    """Describe in one line why libtpu failed to compile a graph.

    The description contains the first line of the message. It also contains the model operation
    and a remedy, if they are known.

    Args:
        message: Error message of libtpu.
        operation: Model operation from :func:`portable.tpu.compile.worker.find_operation_in_message`.
            It is used if the message does not contain operation metadata. Empty if unknown.
    """
    first = (message.strip().splitlines() or ["libtpu gives no reason"])[0]
    location = _describe_operation(message) or (f" of {operation}" if operation else "")
    remedy = next(
        (f"; use {setting}" for kernel, setting in _REMEDIES_BY_KERNEL.items() if kernel in first), ""
    )
    return f"{to_one_line(first)[:300]}{location and f', in the operation{location}'}{remedy}"


def _describe_operation(text: str) -> str:
    """Format the operation metadata in a libtpu message as ``of <name> at <file>:<line>``.

    The result starts with a space. The name or the location is omitted if the message does not
    contain it. Without any metadata, the result is an empty string.
    """
    operation = re.search(r'op_name="([^"]+)"', text)
    file, line = re.search(r'source_file="([^"]+)"', text), re.search(r"source_line=(\d+)", text)
    parts = [
        operation[1] if operation else "",
        f"{strip_package_prefix(file[1])}:{line[1]}" if file and line else "",
    ]
    return f" of {' at '.join(filter(None, parts))}" if any(parts) else ""


def _parse_required_bytes(message: str) -> int:
    match = re.search(r"Used (\S+) of|HLO temporaries \((\S+)\)", message)
    if match:
        return _parse_size_bytes(match[1] or match[2])
    allocation = re.search(r"Allocation \(size=(\d+)\)", message)
    return int(allocation[1]) if allocation else 0


def _parse_size_bytes(text: str) -> int:
    """Parse a size such as ``18.63G`` in a libtpu message, and return it in bytes.

    Returns 0 for other strings.
    """
    match = re.fullmatch(r"([\d.]+)([KMGT]?)B?", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


# ----------------------------------------------------------------------------------------------------------


def describe_libtpu(library: LibtpuInstallation, compiler: str) -> str:
    """Describe the compiler in one line: its name, version, and build date.

    If the version is unknown, the path of libtpu is used instead. An unknown build date is omitted.

    Args:
        library: Libtpu installation that contains the compiler.
        compiler: Compiler version from libtpu, which contains the build date.
    """
    built = re.search(r"Built on (\w+ +\d+ \d+)", compiler)
    day = f", built on {' '.join(built[1].split())}" if built else ""
    return f"libtpu {library.version or library.path}{day}"


def _show_progress(line: str) -> None:
    if shows_run_progress_bars():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
