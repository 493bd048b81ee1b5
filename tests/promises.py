"""``docs/promises.md``: documented promises to users, the test of each, and the last figure of that test.

``python -m tests.promises`` writes the page from ``promises.toml`` and ``promises.json``. ``--check``, one of
the static checks, only prints whether the page is up to date and whether every named test exists. Tests pass
their compared values to :func:`record`: if ``PORTABLE_WRITE_DOCS=1`` is set, the largest difference of a
file's tests is written to ``promises.json``. Such a session is one process: ``PORTABLE_WRITE_DOCS=1 python -m
pytest -n0 FILE``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "promises.md"
TABLE = Path(__file__).with_suffix(".toml")
FIGURES = Path(__file__).with_suffix(".json")

_INTRODUCTION = """\
# Guarantees

<!-- Written by `python -m tests.promises` from tests/promises.toml and promises.json. Edit those. -->

This page lists the guaranteed behavior of portable-trainer. Each guarantee names the test that checks it, and
these tests run on CPUs after every change. The tests have not yet been run on a TPU or against a cloud object
store. For what has been tested on which hardware, see [GPUs](machines.md#tested-hardware),
[TPU](tpu.md#what-has-been-tested-without-a-tpu), and [object stores](storage.md#what-has-been-tested).

Links such as *how* lead to a description of the feature.

On this page, an *engine* is either a [training strategy](strategies.md) (DDP, FSDP2, or ZeRO) or the XLA
backend. To *move* a run means to resume it with another strategy, backend, or number of ranks.

The last column contains one of the following:

| last result | meaning |
| --- | --- |
| 1.7e-07 of 1e-05, 2026-11-27 | largest relative difference, allowed difference, and date |
| passed | the test compares bit for bit, or checks a condition |
| not recorded | the test compares with the bound in the guarantee, but does not store the difference |
| 230 kills, none lost (2026-11-25) | result that a program has measured, and its date |

`python -m tests.broken` checks the tests: it introduces one bug at a time into a copy of the code, and checks
that a test fails.
"""

_seen: dict[str, tuple[float, float]] = {}
"""Tightest bound and largest difference under it, by test file, of this session."""


def promises() -> dict[str, list[dict[str, Any]]]:
    """Return the table, by chapter."""
    return tomllib.loads(TABLE.read_text("utf-8"))


def record(found: Sequence[float], expected: Sequence[float], within: float) -> None:
    """Record the relative difference of ``found`` from ``expected``, which the test has checked.

    If a file has several bounds, the tightest is kept.
    """
    if os.environ.get("PORTABLE_WRITE_DOCS") != "1":
        return
    off = max(abs(one - other) / (abs(other) or 1.0) for one, other in zip(found, expected, strict=True))
    file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    bound, largest = _seen.get(file, (within, 0.0))
    if within <= bound:
        _seen[file] = bound, largest = within, max(off, largest if within == bound else 0.0)
    figures = json.loads(FIGURES.read_text("utf-8"))
    figures[file] = {
        "date": f"{datetime.now(UTC).date()}",
        "figure": f"{largest:.1e}" if largest else "0",
        "within": bound,
    }
    FIGURES.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", "utf-8")


def find_bounds(promise: str) -> set[float]:
    """Return the allowed differences in a promise, such as ``1e-5`` and ``10 %``."""
    powers = {float(bound) for bound in re.findall(r"\d+e-\d+", promise)}
    return powers | {int(percent) / 100 for percent in re.findall(r"(\d+) %", promise)}


def page() -> str:
    """Return the text of the page."""
    figures = json.loads(FIGURES.read_text("utf-8"))
    parts = [_INTRODUCTION]
    for chapter, rows in promises().items():
        parts += [f"## {chapter}", "", "| subject | guarantee | test | last result |"]
        parts += ["| --- | --- | --- | --- |"]
        for row in rows:
            bounds = find_bounds(row["promise"])
            tests = ", ".join(f"`{test}`" for test in row["tests"])
            recorded = [figures[test] for test in row["tests"] if test in figures]
            # A file has only the figure of its tightest bound: other guarantees of the file do not show it.
            results = [
                f"{entry['figure']} of {entry['within']:g}, {entry['date']}"
                for entry in recorded
                if entry["within"] in bounds
            ]
            last = row.get("figure") or "; ".join(results) or ("not recorded" if bounds else "passed")
            parts.append(f"| {row['name']} | {row['promise']} | {tests} | {last} |")
        parts.append("")
    return "\n".join(parts)


def stale() -> Iterator[str]:
    """Yield errors of the table and the page, one per line."""
    rows = [row for chapter in promises().values() for row in chapter]
    for row in rows:
        for test in row["tests"]:
            if test.startswith("tests/") and not (ROOT / test).exists():
                yield f"{TABLE.name}: {test} does not exist"
    named = {test for row in rows for test in row["tests"]}
    for file in sorted(json.loads(FIGURES.read_text("utf-8")).keys() - named):
        yield f"{FIGURES.name}: {file} holds no promise of {TABLE.name}"
    if PAGE.read_text("utf-8") != page():
        yield "docs/promises.md is out of date; run python -m tests.promises"


def main(arguments: list[str]) -> int:
    """Write the page, or check it. The exit code is 1 if there is an error."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m tests.promises [--check]", file=sys.stderr)
        return 2
    if not arguments:
        PAGE.write_text(page(), "utf-8")
    wrong = list(stale())
    print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
