"""The process that compiles: ``python -m tpu.compile.worker FOLDER``.

libtpu may end its process, takes gigabytes, and reads its flags once: so a run's graphs are compiled in a
process of their own. It reads ``job.json`` from its folder, prints the name of each graph as it begins with
it, and writes ``compiled.json`` at the end.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from portable.planner.compiled import CompiledGraph
from portable.ranks.parent_death import die_with_parent
from tpu.compile.hlo import Module
from tpu.compile.libtpu import CompileError, InterfaceError, Libtpu, Topology
from tpu.compile.report import analyse
from tpu.compile.slices import Slice

JOB, ANSWER = "job.json", "compiled.json"


@dataclass(frozen=True)
class Job:
    """What to compile."""

    library: str
    """Path of libtpu."""
    generation: str
    chips: str
    graphs: dict[str, str]
    """Name -> file with a serialized ``HloModuleProto``."""
    large: int
    """Elements from which a value is listed."""
    parent: int
    """The process that waits for the answer."""


def main() -> int:
    """Compile, and return the exit code."""
    folder = Path(sys.argv[1])
    job = Job(**json.loads((folder / JOB).read_text("utf-8")))
    die_with_parent(job.parent)
    try:
        answer = run(job)
    except (CompileError, InterfaceError) as error:
        answer = {"error": str(error)}
    partial = folder / f"{ANSWER}.partial"
    partial.write_text(json.dumps(answer), "utf-8")
    partial.rename(folder / ANSWER)
    return 0


def run(job: Job) -> dict[str, Any]:
    """Compile every graph.

    Raises:
        CompileError: libtpu knows no such slice. The refusal of a graph is part of the answer.
        InterfaceError: it is no libtpu, or of another interface.
    """
    wanted = Slice(job.generation, job.chips)
    topology = Libtpu(Path(job.library)).topology(wanted.name, **wanted.options)
    answers = []
    for name, path in job.graphs.items():
        print(name, flush=True)
        module = Path(path).read_bytes()
        try:
            answers.append(asdict(compile_graph(topology, name, module, job.large)))
        except CompileError as error:
            place = named_in(str(error), module)
            answers.append({"name": name, "error": str(error), "code": error.code, "place": place})
    return {
        "compiler": topology.compiler,
        "devices": len(topology.device_ids),
        "hbm_bytes": wanted.hbm(topology),
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
    seconds = time.monotonic() - start
    memory, cost = executable.memory(), executable.cost()
    report = analyse(executable.program(), len(topology.device_ids), large)
    executable.close()
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
        flops=_number(cost.get("flops")) + report.looped_flops,
        bytes_accessed=_number(cost.get("bytes accessed")) + report.looped_bytes,
        compile_seconds=round(seconds, 2),
        collectives=report.collectives,
        large_values=report.large_values,
        custom_calls=report.custom_calls,
        host_transfers=report.host_transfers,
        notes=tuple(notes),
    )


def named_in(message: str, module: bytes) -> str:
    """Where in the model an operation comes from that a message names; empty if it names none.

    Args:
        message: of libtpu.
        module: the ``HloModuleProto`` that it refused.
    """
    words = set(re.findall(r"[\w.-]+", message))
    for computation in Module(module).computations.values():
        for instruction in computation.instructions:
            if instruction.name in words or (instruction.target and instruction.target in words):
                found = filter(None, (instruction.operation(), instruction.source()))
                return " at ".join(found) or instruction.name
    return ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


if __name__ == "__main__":
    sys.exit(main())
