"""Every check of the project: ``python -m tests [--fast | --all] [pytest arguments]``.

``--fast`` leaves out the tests marked slow. ``--all`` adds those marked exhaustive, which the others imply.
The static checks run beside the tests. Several processes share the tests; ``-n0`` or tests that are named run
in one. ``.durations.json`` records where the time went. The exit code is 0 only where every check passed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import durations

ROOT = Path(__file__).resolve().parents[1]

MOST = 8
NEEDED = 5 << 30
"""Bytes of memory for each process that runs tests, with the ranks that it keeps."""

NICE = 10
"""Of the static checks: tests wait for other processes often enough."""

STATIC: dict[str, list[str]] = {
    "ruff check": ["-m", "ruff", "check"],
    "ruff format": ["-m", "ruff", "format", "--check"],
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command as main; main()"],
    "reference": ["-m", "portable.config.reference", "--check"],
    "mypy": ["-m", "mypy"],
}
"""The quick ones first, each as what follows this Python."""


class Result(NamedTuple):
    """How a check ended."""

    name: str
    passed: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} {'passed' if self.passed else 'FAILED'}"


def pytest_command(arguments: list[str]) -> list[str]:
    fast = ["-m", "not slow"] if "--fast" in arguments else []
    rest = [argument for argument in arguments if argument != "--fast"]
    named = any(not argument.startswith("-") for argument in rest)
    alone = named or any(argument.startswith(("-n", "-s", "--pdb")) for argument in rest)
    spread = [] if alone else [f"-n{processes()}", "--dist=loadscope", "--no-loadscope-reorder"]
    return ["-m", "pytest", *fast, *spread, *rest]


def processes() -> int:
    """Three for every two cores, as far as memory allows: a third of a test's time it waits for others."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min((os.cpu_count() or 1) * 3 // 2, MOST, memory // NEEDED))


def run(name: str, command: list[str], *, aside: bool = False) -> Result:
    """Run one check.

    Args:
        name: to be printed.
        command: what follows this Python.
        aside: beside another, whose pauses it fills; its output is printed at its end, if it failed.
    """
    if not aside:
        print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    # UTF-8 mode: what the tools print must not depend on the locale of the shell. Each of the many processes
    # that tests start would compile the project's modules anew if none may keep what it compiled.
    environment = {**os.environ, "PYTHONUTF8": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if aside else None,
        stderr=subprocess.STDOUT if aside else None,
        text=True,
        encoding="utf-8",
    )
    if aside:
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    said, _ = process.communicate()
    result = Result(name, process.returncode == 0, time.monotonic() - start)
    output = f"\n=== {name}\n{said}" if aside and not result.passed else ""
    print(f"{output}--- {result} in {result.seconds:.1f} s", flush=True)
    return result


def record(results: list[Result], seconds: float) -> None:
    """Add the checks, and the time of the whole, to what the tests left in the record."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    durations.write(
        {
            "seconds": round(seconds, 1),
            "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "checks": {result.name: round(result.seconds, 1) for result in results},
            **durations.read(),
        }
    )
    print(f"processor time {usage.ru_utime + usage.ru_stime:.0f} s; by test in {durations.RECORD.name}")


def main(arguments: list[str]) -> int:
    """Run all checks, also after one has failed, and close with a line on each."""
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        static = [pool.submit(run, name, command, aside=True) for name, command in STATIC.items()]
        tests = run("pytest", pytest_command(arguments))
        results = [*(check.result() for check in static), tests]
    good = all(result.passed for result in results)
    seconds = time.monotonic() - start
    record(results, seconds)
    print(f"\n{'ALL PASSED' if good else 'FAILED'} in {seconds:.0f} s: ", end="")
    print(", ".join(str(result) for result in results if good or not result.passed))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
