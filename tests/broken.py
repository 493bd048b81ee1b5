"""Break the product on purpose, and check that the tests notice: ``python -m tests.broken [name ...]``.

``faults.toml`` has the faults. Each changes one place in a copy of the project and runs the tests that should
fail. It survives if they pass. Two run at a time, and ``--from NAME`` continues after an earlier call.
The last lines name the faults that survived. The exit code is 0 only if there is none. ``test_broken.py``
checks that the faults still match the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("portable", "converters", "gpu", "tpu", "configs", "tests", "benchmarks", "docs")
AT_ONCE = 2


class Mutant(NamedTuple):
    """A change of ``before``, which occurs once in ``file``, to ``after``, and the tests that must fail."""

    file: str
    before: str
    after: str
    tests: list[str]


MUTANTS: dict[str, Mutant] = {
    name: Mutant(**values)
    for name, values in tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8")).items()
}


def linked(source: str, target: str) -> None:
    """Link a file of the copy to the file itself if the system supports it, and copy it otherwise."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def caught(mutant: Mutant) -> list[str]:
    """Return up to three tests that fail with ``mutant``."""
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=ignored, copy_function=linked, symlinks=True)
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / mutant.file
        broken = path.read_text("utf-8").replace(mutant.before, mutant.after)
        path.unlink()  # which may be the project's own file
        path.write_text(broken, "utf-8")
        options = ("-q", "-n0", "--maxfail=3", "--tb=no", "-p", "no:cacheprovider")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *mutant.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    if done.returncode > 1:  # such as for a file that is not there
        print(done.stdout[-500:], flush=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.split()[1] for line in failed]


def tried(name: str) -> bool:
    """Return whether a fault was detected, and print by which test."""
    start = time.monotonic()
    failed = caught(MUTANTS[name])
    decision = f"caught by {failed[0]}" if failed else "SURVIVED"
    print(f"{name}: {decision} ({time.monotonic() - start:.0f} s)", flush=True)
    return bool(failed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.broken", description="Break the product on purpose.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault of tests/faults.toml; none: all")
    parser.add_argument("--from", dest="first", metavar="NAME", help="this one, and all after it")
    asked = parser.parse_args(arguments)
    every = list(MUTANTS)
    if unknown := {*asked.names, asked.first} - {*every, None}:
        parser.error(f"{min(unknown)}: is no fault of tests/faults.toml")
    names = asked.names or every[every.index(asked.first or every[0]) :]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(names, pool.map(tried, names), strict=True))
    survived = [name for name, was in found.items() if not was]
    print(f"{len(found) - len(survived)} of {len(found)} faults are found")
    print("\n".join(f"SURVIVED: {name}" for name in survived))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
