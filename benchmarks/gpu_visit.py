"""Everything that a GPU has to show, in one command that fits a visit of some minutes.

``python -m benchmarks.gpu_visit --out FOLDER --minutes 9`` describes the machine, runs
``tests/gpu/test_cuda.py``, trains through ``portable-train`` (:mod:`benchmarks.visit_runs`), and measures
(:mod:`benchmarks.gpu`). Each part is a process with a time limit of its own. Parts that measure nothing run
beside each other, as many as the machine has cores for; the others have it to themselves. The six files of
``FOLDER`` are rewritten as results come, so a visit that is cut short keeps what was done. The same command
with the same folder goes on with the parts that are missing; ``--again PART`` repeats one. Without a GPU
everything runs small on the CPU: a rehearsal, with more time for each part.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import read_rows, tables
from benchmarks.machine import command_line, describe_machine
from portable.durable import write_durably

if TYPE_CHECKING:
    from collections.abc import Sequence

VISIT, TABLE, LOG, TESTS, FIGURES = "visit.json", "visit.md", "log.txt", "tests.jsonl", "figures.jsonl"
PASSED, FAILED, CUT, SLOW = "passed", "failed", "cut short", "over its limit"
FINAL = (PASSED, FAILED, SLOW)
"""A part with one of these is not run again."""
OPTIONAL = (
    "safetensors",
    "tokenizers",
    "triton",
    "deepspeed",
    "bitsandbytes",
    "torchao",
    "flash-attn",
    "peft",
)
LEAST = 15.0  # seconds left under which no part is started
SHARE = 0.6  # of its limit, under which no part is started that measures
GRACE = 5.0  # seconds that a part has after SIGTERM
SLOWER = 6  # times the limits where there is no GPU
CORES_A_PART = 3
STARTING = 20.0  # seconds of its limit that a part that measures may spend on imports and tables
A_TEST = 150  # seconds, after which a test and its process are given up
# A part runs on in a session of its own, and a visit may be killed: the part must not disturb the next one.
_RUN = (
    "import runpy, sys; from portable.ranks.parent_death import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1))); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Part:
    """One process of a visit."""

    name: str
    module: str
    arguments: tuple[str, ...]
    limit: float
    """Seconds."""
    resumes: bool = False
    """Whether the part goes on where it was cut short, so that its limit holds for each visit."""
    alone: bool = False
    """Whether it measures time, so that nothing may run beside it."""

    def command(self, out: Path, seconds: float, *, small: bool) -> list[str]:
        """The part's command.

        In an argument, ``{out}`` is the visit's folder, ``{seconds}`` the time it has for its work, and
        ``{workers}`` as many processes as it may start.
        """
        workers = (os.cpu_count() or 1) // 4
        left = max(LEAST, seconds - STARTING)
        values = {"{out}": str(out), "{seconds}": f"{left:.0f}", "{workers}": str(workers)}
        arguments = list(self.arguments)
        for name, value in values.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        small_too = ["--small"] * (small and self.module.startswith("benchmarks"))
        return [self.module, *arguments, *small_too]


def _tests(*more: str) -> tuple[str, ...]:
    plugins = ("-p", "benchmarks.visit_tests", "--outcomes", f"{{out}}/{TESTS}")
    # A thread's limit also ends a test that hangs in CUDA, with its process, which xdist replaces.
    limits = ("--timeout", str(A_TEST), "--timeout-method", "thread")
    return (*plugins, "-q", "-n{workers}", *limits, "-p", "no:cacheprovider", *more)


def _run(name: str, limit: float) -> Part:
    return Part(name, "benchmarks.visit_runs", (name,), limit)


def _measured(name: str, limit: float) -> Part:
    arguments = ("--parts", name, "--seconds", "{seconds}", "--rows", f"{{out}}/{FIGURES}")
    more = ("--trace", "{out}/trace.json.gz") if name == "roofline" else ()
    return Part(name, "benchmarks.gpu", (*arguments, *more), limit, resumes=True, alone=True)


PARTS = (
    Part("tests", "pytest", _tests("tests/gpu/test_cuda.py"), 300, resumes=True),
    _run("parity", 120),
    _run("zero", 240),
    _run("kill", 240),
    _run("lora", 240),
    _run("resume", 240),
    _run("cpu_adam", 240),
    _run("zero_moves", 200),
    _run("quickstart", 120),
    _run("move", 150),
    _run("llama", 150),
    _run("bert", 120),
    _run("eight_bits", 120),
    _run("float8", 150),
    _measured("llama-1.2b", 300),
    _measured("llama-8b-lora", 260),
    _measured("saving", 100),
    _measured("roofline", 120),
    _measured("qwen3-1.7b", 200),
    _measured("qwen3-0.6b", 160),
    _measured("guide", 200),
    _measured("llama-1.2b-fp8", 200),
    _measured("llama-8b-full", 280),
)
"""Correctness first: a short visit is of more use with it than with speed, and of what runs at once, what
takes long. Then the most wanted figures."""


def machine() -> dict[str, str]:
    """The card, its driver, and the versions of all packages that the project uses."""
    # Asked of the driver's tool: this process must take no memory of the card, which a part measures.
    found = describe_machine(torch.device("cpu"), *OPTIONAL)
    if torch.version.cuda is not None:
        found["CUDA of torch"] = torch.version.cuda
    if tool := shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
        found["nvidia-smi"] = _output(tool, asked, "--format=csv,noheader")
    if tool := shutil.which("nvcc"):
        found["nvcc"] = _output(tool, "--version").splitlines()[-1]
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "no output"


class Visit:
    """The results in a folder, read at the start and rewritten after each part.

    Args:
        out: the folder.
        command: that repeats the visit.
    """

    def __init__(self, out: Path, command: str) -> None:
        self._out = out
        self._lock = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)
        path = out / VISIT
        self.results: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.results = json.loads(path.read_text("utf-8"))["parts"]
        self._about: dict[str, Any] = {"command": command, "machine": machine()}
        self.write()

    def write(self) -> None:
        """Write both files anew, each by rename."""
        document = {**self._about, "parts": self.results}
        write_durably(self._out / VISIT, json.dumps(document, indent=1) + "\n")
        write_durably(self._out / TABLE, self.table() + "\n")

    def table(self) -> str:
        """The machine, one row for each part, and the tables of what was measured."""
        lines = [f"`{self._about['command']}`", ""]
        lines += [f"- {name}: {value}" for name, value in self._about["machine"].items()]
        lines += ["", "| part | result | seconds | figures |", "| --- | --- | ---: | --- |"]
        order = [part.name for part in PARTS]
        measures = [part.name for part in PARTS if part.alone]
        for name, result in sorted(self.results.items(), key=lambda item: order.index(item[0])):
            figures = ", ".join(f"{key} {value}" for key, value in result.get("figures", {}).items())
            below = name in measures and result["status"] == PASSED
            shown = figures or ("in the tables below" if below else result["last"])
            lines.append(f"| {name} | {result['status']} | {result['seconds']:.0f} | {shown} |")
        if measured := tables(read_rows(self._out / FIGURES)):
            lines += ["", "```", measured, "```"]
        return "\n".join(lines)

    def run(self, part: Part, seconds: float, stopped: threading.Event, *, small: bool) -> str:
        """Run a part for at most ``seconds``, and record how it ended. Parts may run at once."""
        most = part.limit * (1 if torch.cuda.is_available() else SLOWER)
        limit = min(seconds, most)
        begun = time.monotonic()
        command = part.command(self._out, limit, small=small)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            code = _within(command, limit, log.fileno(), stopped, threads=None if part.alone else 1)
            log.seek(0)
            output = log.read()
        lines = output.strip().splitlines()
        status = PASSED if code == 0 else FAILED
        if code is None:
            status = CUT if seconds < most or part.resumes or stopped.is_set() else SLOW
        last = lines[-1][:300] if lines else ""
        result: dict[str, Any] = {"status": status, "seconds": time.monotonic() - begun, "last": last}
        with suppress(ValueError):
            figures = json.loads(last)
            if isinstance(figures, dict):
                result["figures"] = figures
        with self._lock:
            with (self._out / LOG).open("a", encoding="utf-8") as file:
                file.write(f"\n$ python -m {' '.join(command)}\n{output}")
            self.results[part.name] = result
            self.write()
            print(f"{part.name}: {status} after {result['seconds']:.0f} s", flush=True)
        return status


def _within(
    command: Sequence[str], seconds: float, output: int, stopped: threading.Event, *, threads: int | None
) -> int | None:
    """Run a module and all that it starts, for at most ``seconds`` or until ``stopped``.

    Args:
        command: the module, and its arguments.
        seconds: the limit.
        output: a file descriptor.
        stopped: ends it, too.
        threads: of each process's arithmetic; parts beside each other would only wait for one another.

    Returns:
        its exit code, or None if it was ended.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "true"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    whole = [sys.executable, "-c", _RUN, str(os.getpid()), *command]
    process = subprocess.Popen(
        whole, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    end = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end and not stopped.is_set():
            stopped.wait(0.05)
        return process.poll()
    finally:
        for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_visit", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="end within this time; default 9")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument(
        "--again", nargs="+", choices=names, default=[], help="repeat these; of the tests, those that failed"
    )
    jobs = max(1, (os.cpu_count() or 1) // CORES_A_PART)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"parts at once; default {jobs}")
    parser.add_argument("--small", action="store_true", help="tiny models; the default without a GPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are missing; 1 if one failed."""
    end = time.monotonic()
    options = parse(argv)
    end += 60 * options.minutes - GRACE
    small = options.small or not torch.cuda.is_available()
    visit = Visit(options.out.resolve(), command_line("benchmarks.gpu_visit", argv))
    for name in options.again:
        visit.results.pop(name, None)
    done = {name for name, result in visit.results.items() if result["status"] in FINAL}
    missing = [part for part in PARTS if part.name in options.parts and part.name not in done]
    stopped = threading.Event()

    def run(part: Part) -> None:
        least = max(LEAST, SHARE * part.limit * part.alone)
        if (left := end - time.monotonic()) >= least and not stopped.is_set():
            visit.run(part, left, stopped, small=small)

    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                for running in [pool.submit(run, part) for part in missing if not part.alone]:
                    running.result()
            except BaseException:  # the pool waits for its threads
                stopped.set()
                raise
        for part in missing:
            if part.alone:
                run(part)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(visit.table())
    status = {name: result["status"] for name, result in visit.results.items()}
    if left := [part.name for part in missing if status.get(part.name) not in FINAL]:
        print(f"out of time; the same command goes on with {', '.join(left)}")
    return int(any(result["status"] != PASSED for result in visit.results.values()))


if __name__ == "__main__":
    sys.exit(main())
