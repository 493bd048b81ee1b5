"""Every check of the project: python -m tests [--fast | --all] [--xla] [pytest arguments]

  --fast   leave out the tests marked slow: {fast} on two cores instead of {whole}
  --all    also those marked exhaustive, which the others imply: all engines, pairs of formats, random cases
  --xla    only the tests that need torch_xla, and no static checks: {xla}; in an environment of their own,
           pip install -c constraints-xla.txt -e '.[test-xla]'. Without it they are left out

The static checks (ruff, mypy, import-linter, the generated pages, budget.toml) run beside the tests.
Several processes share the tests; -n0, or tests that are named, run in one. The end lists the longest tests.
The exit code is 0 only where every check passed. pytest's own options: python -m pytest --help
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

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
    "budget": ["-m", "tests.budget"],
    "promises": ["-m", "tests.promises", "--check"],
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


TIMES = {"whole": "10 minutes", "fast": "1 minute", "xla": "3 minutes"}
XLA_ELSEWHERE = (
    "The tests that need torch_xla are left out; in the environment of constraints-xla.txt, "
    "`python -m tests --xla` runs them."
)


def pytest_command(arguments: list[str]) -> list[str]:
    marks = ["xla" if "--xla" in arguments else "not xla", *["not slow"] * ("--fast" in arguments)]
    rest = [argument for argument in arguments if argument not in ("--fast", "--xla")]
    named = any(not argument.startswith("-") for argument in rest)
    alone = named or any(argument.startswith(("-n", "-s", "--pdb")) for argument in rest)
    spread = [] if alone else [f"-n{processes()}", "--no-loadscope-reorder"]
    return ["-m", "pytest", "-m", " and ".join(marks), "--durations=10", *spread, *rest]


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


def main(arguments: list[str]) -> int:
    """Run all checks, also after one has failed, and close with a line on each."""
    if {"--help", "-h"} & set(arguments):
        print((__doc__ or "").format(**TIMES), end="")
        return 0
    xla = "--xla" in arguments
    if xla and find_spec("torch_xla") is None:
        install = "pip install -c constraints-xla.txt -e '.[test-xla]'"
        print(f"error: --xla: torch_xla is not installed; in a new environment: {install}", file=sys.stderr)
        return 2
    print("" if xla else XLA_ELSEWHERE, flush=True)
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        checks = {} if xla else STATIC  # they are those of the first environment
        static = [pool.submit(run, name, command, aside=True) for name, command in checks.items()]
        tests = run("pytest", pytest_command(arguments))
        results = [*(check.result() for check in static), tests]
    good = all(result.passed for result in results)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - start:.0f} s ({usage.ru_utime + usage.ru_stime:.0f} s of processors)"
    print(f"\n{'ALL PASSED' if good else 'FAILED'} in {seconds}: ", end="")
    print(", ".join(str(result) for result in results if good or not result.passed))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
