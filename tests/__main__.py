"""Run all checks of the project: python -m tests [--fast | --all] [--xla] [pytest arguments]

  --fast   skip the tests marked slow: {fast} on two cores instead of {full}
  --all    also run the tests marked exhaustive, which other tests imply: all engines, all pairs of formats,
           random cases
  --xla    run only the tests that need torch_xla, without the static checks: {xla}. They need a separate
           environment: pip install -c constraints-xla.txt -e '.[test-xla]'. Without --xla they are skipped

The static checks (ruff, mypy, import-linter, the generated pages, the language) run at the same time as the
tests. Several processes share the tests. With -n0, or if you name tests, one process runs them. The output
ends with the slowest tests. The exit code is 0 only if all checks passed. Options of pytest are listed by
python -m pytest --help
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

MAX_PROCESSES = 8
BYTES_PER_PROCESS = 5 << 30
"""Memory that a test process and its ranks need."""

NICENESS = 10
"""Niceness of the static checks. They finish in time, because tests often wait for other processes."""

STATIC: dict[str, list[str]] = {
    "ruff check": ["-m", "ruff", "check"],
    "ruff format": ["-m", "ruff", "format", "--check"],
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command as main; main()"],
    "reference": ["-m", "portable.config.reference", "--check"],
    "keys of other programs": ["-m", "portable.importing.reference", "--check"],
    "promises": ["-m", "tests.promises", "--check"],
    "language": ["-m", "tests.language"],
    "mypy": ["-m", "mypy"],
}
"""Arguments of Python for each static check. Fast checks come first."""


class Result(NamedTuple):
    """Result of a check.

    Attributes:
        name: Name of the check.
        passed: Whether the check passed.
        seconds: Run time.
    """

    name: str
    passed: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} {'passed' if self.passed else 'FAILED'}"


TIMES = {"full": "half an hour", "fast": "1 minute", "xla": "4 minutes"}
XLA_NOTE = (
    "Tests that need torch_xla are skipped. Run them with `python -m tests --xla` in the environment of "
    "constraints-xla.txt."
)


def build_pytest_command(arguments: list[str]) -> list[str]:
    """Build the arguments of Python that run pytest.

    Args:
        arguments: Arguments of this program. Its own options are replaced, and others are passed to pytest.
    """
    marks = ["xla" if "--xla" in arguments else "not xla", *["not slow"] * ("--fast" in arguments)]
    others = [argument for argument in arguments if argument not in ("--fast", "--xla")]
    names_tests = any(not argument.startswith("-") for argument in others)
    in_one_process = names_tests or any(argument.startswith(("-n", "-s", "--pdb")) for argument in others)
    xdist = [] if in_one_process else [f"-n{count_processes()}", "--no-loadscope-reorder"]
    return ["-m", "pytest", "-m", " and ".join(marks), "--durations=10", *xdist, *others]


def count_processes() -> int:
    """Return the number of test processes: three for every two cores, or fewer if there is not enough memory.

    There are more processes than cores because a test waits for other processes in a third of its run time.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min((os.cpu_count() or 1) * 3 // 2, MAX_PROCESSES, memory // BYTES_PER_PROCESS))


def run_check(name: str, command: list[str], *, in_background: bool = False) -> Result:
    """Run one check.

    Args:
        name: Name of the check to print.
        command: Arguments of Python.
        in_background: Whether another check runs at the same time. If so, the check has a lower priority, and
            its output is printed at the end if it failed.
    """
    if not in_background:
        print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    # UTF-8 mode makes the output independent of the locale of the shell. Bytecode is written, or otherwise
    # each of the many processes that the tests start would compile the modules of the project again.
    environment = {**os.environ, "PYTHONUTF8": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if in_background else None,
        stderr=subprocess.STDOUT if in_background else None,
        text=True,
        encoding="utf-8",
    )
    if in_background:
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    output, _ = process.communicate()
    result = Result(name, process.returncode == 0, time.monotonic() - start)
    details = f"\n=== {name}\n{output}" if in_background and not result.passed else ""
    print(f"{details}--- {result} in {result.seconds:.1f} s", flush=True)
    return result


def main(arguments: list[str]) -> int:
    """Run all checks, even if some fail, and print a summary.

    Returns:
        Exit code: 0 if all checks passed, 1 if a check failed, 2 if torch_xla is not installed.
    """
    if {"--help", "-h"} & set(arguments):
        print((__doc__ or "").format(**TIMES), end="")
        return 0
    xla = "--xla" in arguments
    if xla and find_spec("torch_xla") is None:
        install = "pip install -c constraints-xla.txt -e '.[test-xla]'"
        print(f"error: --xla: torch_xla is not installed; in a new environment: {install}", file=sys.stderr)
        return 2
    print("" if xla else XLA_NOTE, flush=True)
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        checks = {} if xla else STATIC  # The main environment runs the static checks.
        static = [
            pool.submit(run_check, name, command, in_background=True) for name, command in checks.items()
        ]
        tests = run_check("pytest", build_pytest_command(arguments))
        results = [*(check.result() for check in static), tests]
    all_passed = all(result.passed for result in results)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - start:.0f} s ({usage.ru_utime + usage.ru_stime:.0f} s of CPU time)"
    print(f"\n{'ALL PASSED' if all_passed else 'FAILED'} in {seconds}: ", end="")
    print(", ".join(str(result) for result in results if all_passed or not result.passed))
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
