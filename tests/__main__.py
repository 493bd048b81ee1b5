"""Every check of the project: ``python -m tests [--fast] [pytest arguments]``.

``--fast`` leaves out the tests marked slow. Several processes share the tests, file by file; ``-n1`` or tests
that are named run in one. The exit code is 0 only where every check passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MOST = 8
NEEDED = 5 << 30
"""Bytes of memory for each process that runs tests, with the ranks that it keeps."""

Check = tuple[str, list[str]]


def checks(arguments: list[str]) -> list[Check]:
    """The checks in order, quick ones first, each as a heading and a command of this Python."""
    fast = ["-m", "not slow"] if "--fast" in arguments else []
    rest = [argument for argument in arguments if argument != "--fast"]
    named = any(not argument.startswith("-") for argument in rest)
    alone = named or any(argument.startswith(("-n", "-s", "--pdb")) for argument in rest)
    spread = [] if alone else [f"-n{processes()}", "--dist=loadfile"]
    return [
        ("ruff check", ["-m", "ruff", "check"]),
        ("ruff format", ["-m", "ruff", "format", "--check"]),
        ("mypy", ["-m", "mypy"]),
        ("import-linter", ["-c", "from importlinter.cli import lint_imports_command as main; main()"]),
        ("reference", ["-m", "portable.config.reference", "--check"]),
        ("pytest", ["-m", "pytest", *fast, *spread, *rest]),
    ]


def processes() -> int:
    """As many as there are cores, as far as memory allows: more, and tests that look at clocks may fail."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, MOST, memory // NEEDED))


def run(check: Check) -> tuple[bool, str]:
    """Run one check under its heading; whether it passed, and the word for the summary."""
    name, command = check
    print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    # UTF-8 mode: what the tools print must not depend on the locale of the shell.
    environment = {**os.environ, "PYTHONUTF8": "1"}
    code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False).returncode
    verdict = "passed" if code == 0 else f"FAILED (exit code {code})"
    print(f"--- {name} {verdict} in {time.monotonic() - start:.1f} s", flush=True)
    return code == 0, f"{name} {verdict}"


def main(arguments: list[str]) -> int:
    """Run all checks, also after one has failed, and close with a line on each."""
    start = time.monotonic()
    results = [run(check) for check in checks(arguments)]
    good = all(passed for passed, _ in results)
    print(f"\n{'ALL PASSED' if good else 'FAILED'} in {time.monotonic() - start:.0f} s: ", end="")
    print(", ".join(summary for passed, summary in results if good or not passed))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
