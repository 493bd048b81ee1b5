"""Everything that a GPU has to show, in one command that fits a visit of some minutes.

``python -m benchmarks.gpu_visit --out FOLDER --minutes 9`` describes the machine, runs
``tests/gpu/test_cuda.py``, trains through ``portable-train`` (:mod:`benchmarks.visit_runs`), and measures
(:mod:`benchmarks.gpu`). Each part is a process with a time limit of its own. ``FOLDER/visit.json`` and
``visit.md`` are rewritten after each part, so a visit that is cut short keeps what was done. The same command
with the same folder goes on with the parts that are missing; ``--again PART`` repeats one. Without a GPU
everything runs small on the CPU: a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import command_line, describe_machine
from portable.durable import write_durably

if TYPE_CHECKING:
    from collections.abc import Sequence

VISIT, TABLE, LOG, TESTS = "visit.json", "visit.md", "log.txt", "tests.jsonl"
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
GRACE = 5.0  # seconds that a part has after SIGTERM


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

    def command(self, out: Path, *, small: bool) -> list[str]:
        """The part's command. ``{out}`` in an argument is the visit's folder."""
        arguments = [argument.replace("{out}", str(out)) for argument in self.arguments]
        small_too = ["--small"] * (small and self.module.startswith("benchmarks"))
        return [sys.executable, "-m", self.module, *arguments, *small_too]


def _tests(*more: str) -> tuple[str, ...]:
    plugins = ("-p", "benchmarks.visit_tests", "--outcomes", f"{{out}}/{TESTS}")
    return (*plugins, "-q", "-n0", "-p", "no:cacheprovider", *more)


PARTS = (
    Part("tests", "pytest", _tests("tests/gpu/test_cuda.py"), 240, resumes=True),
    Part("quickstart", "benchmarks.visit_runs", ("quickstart",), 90),
    Part("parity", "benchmarks.visit_runs", ("parity",), 90),
    Part("resume", "benchmarks.visit_runs", ("resume",), 200),
    Part("move", "benchmarks.visit_runs", ("move",), 120),
    Part("kill", "benchmarks.visit_runs", ("kill",), 150),
    Part("llama", "benchmarks.visit_runs", ("llama",), 120),
    Part("bert", "benchmarks.visit_runs", ("bert",), 90),
    Part("step", "benchmarks.gpu", ("--parts", "step", "--json", "{out}/step.json"), 400),
    Part("roofline", "benchmarks.gpu", ("--parts", "roofline", "--json", "{out}/roofline.json"), 120),
    Part("guide", "benchmarks.gpu", ("--parts", "guide", "--json", "{out}/guide.json"), 400),
)
"""Correctness first: a short visit is of more use with it than with speed."""


def machine() -> dict[str, str]:
    """The card, its driver, and the versions of all packages that the project uses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = describe_machine(device)
    for name in OPTIONAL:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if tool := shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
        found["nvidia-smi"] = _output(tool, asked, "--format=csv,noheader")
    if tool := shutil.which("nvcc"):
        found["nvcc"] = _output(tool, "--version").splitlines()[-1]
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "no output"


class Visit:
    """The results in a folder, read at the start and rewritten after each part."""

    def __init__(self, out: Path, command: str) -> None:
        self._out = out
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
        """The machine and one row for each part."""
        lines = [f"`{self._about['command']}`", ""]
        lines += [f"- {name}: {value}" for name, value in self._about["machine"].items()]
        lines += ["", "| part | result | seconds | figures |", "| --- | --- | ---: | --- |"]
        for name, result in self.results.items():
            figures = ", ".join(f"{key} {value}" for key, value in result.get("figures", {}).items())
            lines.append(
                f"| {name} | {result['status']} | {result['seconds']:.0f} | {figures or result['last']} |"
            )
        return "\n".join(lines)

    def run(self, part: Part, seconds: float, *, small: bool) -> str:
        """Run a part for at most ``seconds``, and record how it ended."""
        limit = min(seconds, part.limit)
        begun = time.monotonic()
        with (self._out / LOG).open("a+", encoding="utf-8") as log:
            command = part.command(self._out, small=small)
            log.write(f"\n$ python {' '.join(command[1:])}\n")
            log.flush()
            start = log.tell()
            code = _within(command, limit, log.fileno())
            log.seek(start)
            lines = log.read().strip().splitlines()
        status = PASSED if code == 0 else FAILED
        if code is None:
            status = CUT if seconds < part.limit or part.resumes else SLOW
        last = lines[-1][:300] if lines else ""
        result: dict[str, Any] = {"status": status, "seconds": time.monotonic() - begun, "last": last}
        with suppress(ValueError):
            figures = json.loads(last)
            if isinstance(figures, dict):
                result["figures"] = figures
        self.results[part.name] = result
        self.write()
        return status


def _within(command: Sequence[str], seconds: float, output: int) -> int | None:
    """Run a command and all that it starts for at most ``seconds``; its exit code, or None."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
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
    parser.add_argument("--again", nargs="+", choices=names, default=[], help="repeat these")
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
        if name == "tests":
            (options.out / TESTS).unlink(missing_ok=True)
    for part in PARTS:
        done = visit.results.get(part.name, {}).get("status") in FINAL
        if done or part.name not in options.parts:
            continue
        left = end - time.monotonic()
        if left < LEAST:
            print("out of time; the same command goes on with the parts that are missing")
            break
        print(f"{part.name}: ", end="", flush=True)
        print(visit.run(part, left, small=small), flush=True)
    print(visit.table())
    return int(any(result["status"] != PASSED for result in visit.results.values()))


if __name__ == "__main__":
    sys.exit(main())
